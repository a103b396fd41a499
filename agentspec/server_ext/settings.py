"""Read the operator's settings; docs/settings.md says when to change them.

Settings come from ``--additional-config '{"agentspec": {...}}'``, which vLLM prints at start. So settings that may hold
a secret, such as the store URL with its password, can come from the environment, which takes precedence:
``AGENTSPEC_STORE``, ``AGENTSPEC_TENANT``, ``AGENTSPEC_RECORD``. A command's own option replaces its variable. Where a
trainer makes the engine, the environment is the only way in: ``AGENTSPEC_SETTINGS`` holds a JSON object of settings,
which apply where the engine's own say nothing.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from agentspec.cache import Scope
from agentspec.cache.policy import MAX_DRAFT, ArcticSettings, DraftPolicy
from agentspec.cache.store import (
    QUEUE_BYTES,
    Retention,
    can_write,
    check_layout,
    default_store_url,
    open_store,
    sqlite_path,
)
from agentspec.cache.types import DEFAULT_MAX_BYTES, MAX_QUOTABLE, HistoryWindow
from agentspec.errors import ConfigurationError, StoreUnavailableError
from agentspec.identifiers import check_session_id
from agentspec.json_lines import object_of, why_refused

logger = logging.getLogger(__name__)

_LARGEST_FIGURES = 32 << 20
_LARGEST_MEMORY_STORE = 256 << 20
_MOST_BYTES = 1 << 50
LONGEST_STEP = 2.0
"""Default for the longest duration of a step with several requests, in multiples of one without drafts. Steps may take
longer where every request accepts enough tokens (`pricing.step_cost`)."""
ENVIRONMENT = {"store": "AGENTSPEC_STORE", "tenant": "AGENTSPEC_TENANT", "record": "AGENTSPEC_RECORD"}
_SETTINGS = "AGENTSPEC_SETTINGS"
_SECTION = "agentspec"
"""Key of the settings in vLLM's ``additional_config``, which may hold those of other extensions, too."""
_MOST_SHOWN = 200
"""Most characters of a wrong value that an error quotes."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def default_store() -> str:
    """Return the URL of the server's own SQLite file in the user's data folder.

    Where it cannot be written, as in a container without a home folder, return that of a store in memory.
    """
    try:
        url = default_store_url("server.db")
        if can_write(sqlite_path(url)):
            return url
        why = f"{sqlite_path(url)} cannot be written"
    except StoreUnavailableError as error:
        why = str(error)
    return memory_instead(why)


@cache
def memory_instead(why: str) -> str:
    """Return the URL of a store in memory, and warn once that nothing outlives this process. why: cause."""
    logger.warning(
        "agentspec: turns are kept in memory and forgotten at shutdown, because %s; name another place with --store, "
        "AGENTSPEC_STORE or XDG_DATA_HOME",
        why,
    )
    return "memory://"


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """Hold the parts of one budget, in bytes.

    queue: for records to be written, and the same again for records to be applied. store: for a store in memory.
    """

    cache: int
    queue: int
    figures: int
    store: int

    @classmethod
    def of(cls, max_bytes: int, store: str = "") -> "MemoryShares":
        """Return the parts of ``max_bytes``.

        Figures and each queue get at most a sixteenth, and never more than they can use. store: URL of the store; a
        store in memory gets at most a quarter.
        """
        part = max_bytes // 16
        queue, figures = min(part, QUEUE_BYTES), min(part, _LARGEST_FIGURES)
        in_memory = min(max_bytes // 4, _LARGEST_MEMORY_STORE) if store.startswith("memory:") else 0
        return cls(max_bytes - 2 * queue - figures - in_memory, queue, figures, in_memory)


def refuse_switch(model: type[BaseModel], name: str, value: object) -> None:
    """Raise ValueError if a field that is not a switch gets true or false, alone or in a list, as true counts as 1."""
    given = value if isinstance(value, list) else [value]
    if model.model_fields[name].annotation is not bool and any(isinstance(each, bool) for each in given):
        raise ValueError(f"{name}: true and false are no values of it")


class Settings(BaseModel):
    """Hold the settings of the server extension; docs/settings.md explains each.

    Unknown names are rejected, so that typos are noticed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    """Switch for drafting; False: agentspec is installed but never drafts."""
    tenant: str | None = None
    """Tenant of all callers, who then share one index. None: each principal (API key) is a tenant of its own."""
    principal_header: str | None = None
    """Header by which a trusted gateway names a request's principal. None: no header names it."""
    tenant_header: str | None = None
    """Header by which a trusted gateway names a request's tenant. None: no header names it."""
    api_keys_file: str | None = None
    """File of lines ``sha256-of-key tenant``: the tenants of single API keys. Read again when it changes."""
    scope: Scope = "tenant"
    """Texts that a request drafts from beside its own: "tenant" (session, group and tenant), "session", or "none"."""
    public: str | None = None
    """File of texts that all requests of scope "tenant" draft from, whoever sent them. None: there is none."""
    store: str = Field(default_factory=default_store)
    """URL of the store: ``sqlite:///path``, ``redis://host:port/db`` or ``memory://``."""
    model_key: str | None = None
    """Name that stands for the model's config in the names of logs; servers share turns where it is the same. None: the
    hash of the config."""
    max_bytes: int = Field(default=DEFAULT_MAX_BYTES, ge=1_000_000, le=_MOST_BYTES)
    """Budget of all that agentspec holds in memory, in bytes: indexes, figures, queues of the store."""
    max_tokens: int | None = Field(default=None, ge=1_000, le=2_000_000_000)
    """A further limit on the tokens kept of finished requests. None: only `max_bytes` applies."""
    max_session_tokens: int | None = Field(default=None, ge=1_000, le=2_000_000_000)
    """Budget of one session, in tokens, beyond which it keeps its newest half. None: 524,288."""
    history_window: HistoryWindow | None = None
    """How long responses are drafted from: "2 weights", "3 epochs" or "200000 tokens". None: while there is room."""
    retention_days: float | None = Field(default=30.0, gt=0.0, le=36_500.0)
    """Age at which stored turns are removed from the store, in days. None: no limit."""
    retention_bytes: int | None = Field(default=2 << 30, ge=1_000_000, le=_MOST_BYTES)
    """Bytes of the store beyond which its oldest turns are removed, those of small tenants last. None: no limit."""
    retention_records: int | None = Field(default=None, ge=1, le=1_000_000_000_000)
    """Number of stored turns beyond which the oldest are removed, those of small tenants last. None: no limit."""
    preload_records: int = Field(default=2_000, ge=0, le=1_000_000)
    """Number of a tenant's newest stored turns to read: at start or at its first request."""
    preload_timeout: float = Field(default=10.0, ge=0.0, le=600.0)
    """Longest time that the start waits for stored turns, in seconds; the rest is loaded while serving."""
    max_draft: int | None = Field(default=None, ge=1, le=MAX_DRAFT)
    """Longest draft of one request, in tokens. None: as long as the engine can verify."""
    verify_cost: float | None = Field(default=None, gt=0.0, le=1.0)
    """Price of verifying one more draft token, as a share of a decode step. None: measured while serving."""
    step_draft_tokens: int = Field(default=1024, ge=1)
    """Most draft tokens in one decode step, for all rows together; `pricing.draft_budget` says what lowers it."""
    quote_tokens: int = Field(default=MAX_QUOTABLE, ge=0, le=MAX_QUOTABLE)
    """Most tokens of a chat's prompt that it may also draft as responses spell them (`api.quotes`). 0: none."""
    longest_step: float | None = Field(default=LONGEST_STEP, gt=1.0)
    """Longest duration of a step with several requests, in multiples of one without drafts. None: no limit."""
    disable_by_batch_size: int | None = Field(default=None, ge=1)
    """Most rows of a step with drafts. None: no limit; the measured cost decides."""
    speculator: str | None = None
    """Folder or hub id of an MLP or LSTM speculator that was trained for the served model."""
    speculator_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the speculator drafts; None: as many as it was trained for."""
    speculator_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Data type of the speculator's weights; auto: the served model's."""
    speculator_fp8: Literal["off", "head", "all"] = "off"
    """Speculator weights in FP8: none, the head, or the projections too. FP8 halves the bytes to read."""
    score_suffix_drafts: bool = True
    """True: the draft model scores the suffix drafts, which changes, cuts or drops them. False: it only drafts."""
    arctic_suffix_rule: ArcticSettings | None = None
    """ArcticInference's rule in place of the learned one. Only ``arctic_methods`` sets it."""
    record: str | None = None
    """File for the step-by-step record (JSON lines); None: not written."""

    def draft_policy(self, max_draft: int) -> DraftPolicy:
        """Return the learned drafting rule, or ArcticInference's if the config names it. max_draft: in tokens."""
        return DraftPolicy(max_draft=max_draft, arctic=self.arctic_suffix_rule)

    def retention(self) -> Retention:
        """Return the limits of the store."""
        return Retention(self.retention_days, self.retention_bytes, self.retention_records)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: object, info: ValidationInfo) -> object:
        refuse_switch(cls, str(info.field_name), value)
        return value

    @field_validator("tenant", "model_key")
    @classmethod
    def _printable(cls, value: str | None, info: ValidationInfo) -> str | None:
        return None if value is None else check_session_id(value, str(info.field_name))

    @field_validator("store", "record", "api_keys_file", "public", "speculator")
    @classmethod
    def _usable_name(cls, value: str | None) -> str | None:
        if value == "":  # often from a variable that is not set
            raise ValueError("it is empty; give a value, or leave it out")
        if value is not None and "\0" in value:  # a file's name; Python's own error would be a traceback
            raise ValueError("no file has a NUL character in its name; leave it out")
        try:
            os.fsencode(value or "")
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair cannot be encoded; leave it out") from None
        return value

    @field_validator("history_window", mode="before")
    @classmethod
    def _window(cls, value: object) -> object:
        return value if value is None or isinstance(value, HistoryWindow) else HistoryWindow.parse(str(value))

    @field_validator("public")
    @classmethod
    def _a_file(cls, value: str | None) -> str | None:
        try:
            usable = value is None or Path(value).expanduser().is_file()
        except (OSError, RuntimeError):  # an impossible file name, or an unknown user's home
            usable = False
        if not usable:
            raise ValueError(
                "give a file of public texts that exists: JSON lines with token_ids or text, or plain text"
            )
        return value

    @field_validator("speculator_tokens", "speculator_dtype", "speculator_fp8")
    @classmethod
    def _of_the_speculator(cls, value: object, info: ValidationInfo) -> object:
        default = cls.model_fields[str(info.field_name)].default
        if value != default and info.data.get("speculator", "not valid") is None:
            raise ValueError("there is no speculator; give its folder or hub id as 'speculator', too")
        return value

    @field_validator("principal_header", "tenant_header")
    @classmethod
    def _header_name(cls, value: str | None) -> str | None:
        if value is not None and not _HEADER_NAME.fullmatch(value):
            raise ValueError("give the name of an HTTP header, such as X-Principal")
        return value


def load_settings(config: object, environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings from vLLM's ``additional_config`` value and the environment.

    Raises ConfigurationError that names the field and its allowed values.
    """
    given = config if isinstance(config, Mapping) else {}
    for key in given:
        if key != _SECTION and str(key).lower() == _SECTION:  # it would be ignored without a word
            raise ConfigurationError(f"additional-config: {key!r} is not known; spell it {_SECTION!r}")
    section = given.get(_SECTION, {})
    if not isinstance(section, Mapping):
        kind = type(section).__name__
        raise ConfigurationError(f"additional-config: 'agentspec' must be an object of settings, got {kind}")
    section = {**_from_environment(environ), **section}
    if "drafter" in section:
        raise ConfigurationError(
            "agentspec setting 'drafter' has gone: give the method to vLLM, with the same keys: --speculative-config "
            "'{\"method\": …}', offline engine_options(speculative_config={…})"
        )
    values: dict[str, Any] = dict(section)
    for field, variable in ENVIRONMENT.items():
        if environ.get(variable):
            values[field] = environ[variable]
    try:
        return Settings(**values)
    except ValidationError as error:
        raise ConfigurationError(_explain(error)) from None


def settle_store(config: object) -> Settings:
    """Return the settings, with a store that could be opened.

    config: vLLM's ``additional_config`` value. If the default store cannot be opened, as on a full disk, a store in
    memory replaces it, in this process and those that it starts. Raises ConfigurationError as ``load_settings`` does,
    and for an unusable URL of a store; StoreUnavailableError if a store that was named cannot be opened; StoreError if
    the store's file is not agentspec's or its logs have another number of shards.
    """
    settings = load_settings(config)
    try:
        with closing(open_store(settings.store, to_write=True)) as opened:
            check_layout(opened)
    except StoreUnavailableError as error:
        if "store" in settings.model_fields_set:
            raise StoreUnavailableError(f"store {error} (--store or AGENTSPEC_STORE)") from error
        _hand_on(memory_instead(str(error)))
        return load_settings(config)
    if "store" not in settings.model_fields_set and settings.store.startswith("memory:"):
        _hand_on(settings.store)  # so that other processes do not say so again
    return settings


def _hand_on(store: str) -> None:
    """Let a store replace the default one, in this process and those that it starts. A named store stays."""
    os.environ[_SETTINGS] = json.dumps({"store": store} | _from_environment(os.environ))


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in ``AGENTSPEC_SETTINGS``. Raises ConfigurationError if it is no JSON object."""
    text = environ.get(_SETTINGS)
    return json_object(_SETTINGS, text, "a JSON object of settings") if text else {}


def json_object(name: str, text: str, what: str = "a JSON object") -> dict[str, Any]:
    """Return the JSON object that an option or a variable holds.

    Raises ConfigurationError if it holds something else, or if an object in it has a field twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        why = why_refused(error)
        raise ConfigurationError(f"{name}: {why}" if why else f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name} must be {what}, got {type(value).__name__}")
    return value


def _explain(error: ValidationError) -> str:
    """Return pydantic's errors as one line that names settings as the operator does."""
    lines = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"]) or "agentspec"
        if item["type"] == "extra_forbidden":
            names = ", ".join(sorted(Settings.model_fields))
            lines.append(f"agentspec setting {field!r} is not known; known are: {names}")
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix(f"{field}: ")
            lines.append(f"agentspec setting {field!r}: {message}{_shown_input(item)}")
    return "; ".join(lines)


def _shown_input(item: Mapping[str, Any]) -> str:
    """Return the part of a message that quotes the wrong value; "" for a value that may hold a password."""
    value = item["input"]
    if item["loc"][:1] == ("store",) or not isinstance(value, str | int | float | bool | None) or "@" in str(value):
        return ""
    shown = repr(value)
    if len(shown) > _MOST_SHOWN:
        shown = f"{shown[:_MOST_SHOWN]}…, {len(str(value))} characters"
    return f" (got {shown})"


def check_draft_limit(value: int | None) -> int:
    """Return ``num_speculative_tokens`` as a usable draft limit. Raise ConfigurationError naming the range."""
    if value is None or not 1 <= value <= MAX_DRAFT:
        raise ConfigurationError(
            f"num_speculative_tokens must be between 1 and {MAX_DRAFT}, got {value}; "
            "it bounds the length of one request's draft; leave it out to get what the engine can verify"
        )
    return value
