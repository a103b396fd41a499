"""Join the suffix index and a draft model: for which rows the model runs, what its tokens are worth, what is drafted.

``fusion``        one step: whom to ask, what to offer to the suffix index, what to learn
``scheduler``     for which rows the model is worth its time
``alternatives``  how one request's text may go on, by the suffix draft and by the model
``calibrator``    how probable it is that a token is accepted, given both
``draft_model``   what is asked of a draft model, and what it answers

Plain Python and numpy: neither torch nor vLLM.
"""

from agentspec.server_ext.fusion.draft_model import FREE, ModelDraft, StepModel
from agentspec.server_ext.fusion.fusion import DraftFusion

__all__ = ["FREE", "DraftFusion", "ModelDraft", "StepModel"]
