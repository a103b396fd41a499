"""The trees and a draft model together: which rows the model is run for, what its tokens are worth, what is drafted.

``hybrid``   one step: whom to ask, what to offer to the trees, what to learn
``arbiter``  for which rows the model is worth its time
``chains``   what trees and model say of one request's next tokens
``chances``  how likely a token is accepted, given both opinions
``model``    what is asked of a draft model, and what it answers

Plain Python and numpy: neither torch nor vLLM.
"""

from agentspec.server_ext.fusion.draft_model import FREE, ModelDraft, StepModel
from agentspec.server_ext.fusion.fusion import DraftFusion, TreeDrafts

__all__ = ["FREE", "DraftFusion", "ModelDraft", "StepModel", "TreeDrafts"]
