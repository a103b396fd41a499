"""Which of vLLM's own drafters stands beside the trees: the setting ``drafter``, in vLLM's names.

{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
{"method": "medusa", "model": "folder or hub id", "num_speculative_tokens": 4}
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class NgramSettings(BaseModel):
    """vLLM's prompt look-up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["ngram"]
    num_speculative_tokens: int = Field(ge=1, le=128)
    """Tokens that it drafts; the trees' drafts may be longer."""
    prompt_lookup_min: int | None = Field(default=None, ge=1)
    """Shortest n-gram to look up; None: vLLM's default."""
    prompt_lookup_max: int | None = Field(default=None, ge=1)
    """Longest one."""


class MedusaSettings(BaseModel):
    """Medusa heads that were trained for the served model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["medusa"]
    model: str = Field(min_length=1)
    """Folder or hub id."""
    num_speculative_tokens: int = Field(ge=1, le=128)
    """How many of its heads to use; at most as many as it has."""
    revision: str | None = None
    """Of the hub id."""


DrafterSettings = Annotated[NgramSettings | MedusaSettings, Field(discriminator="method")]
