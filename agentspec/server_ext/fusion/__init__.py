"""Draft from the suffix index and a draft model together.

``fusion``        runs a step: asks both, merges their drafts, and learns from verified tokens
``scheduler``     chooses the rows for which the model is worth its time
``alternatives``  scores the suffix draft and the model's draft of one request
``calibrator``    gives the probability that a token is accepted
``draft_model``   the interface of a draft model

Plain Python and numpy: neither torch nor vLLM.
"""

from agentspec.server_ext.fusion.draft_model import ModelDraft, StepModel
from agentspec.server_ext.fusion.fusion import DraftFusion

__all__ = ["DraftFusion", "ModelDraft", "StepModel"]
