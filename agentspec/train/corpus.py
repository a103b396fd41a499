"""Gather the conversations of a run, and divide them into those to train on and those held out.

The sources are read once. Their conversations are divided by session and kept on disk, so that a resumed run trains on
the same conversations even if a source has grown.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agentspec.cache.store import LogNames, open_store
from agentspec.cache.types import Int32Array
from agentspec.errors import InvalidInputError
from agentspec.files import replacing, text_files, weight_files
from agentspec.server_ext.identity.server_secrets import server_secret
from agentspec.server_ext.persistence.model_key import find_model_key, overrides_text
from agentspec.server_ext.settings import Settings
from agentspec.train.config import Data, Model, PromptsSource, Source, StoreSource, TrainingConfig
from agentspec.train.conversations import Conversation, cut, from_records, from_store
from agentspec.train.files import make_folder, readable, writable

logger = logging.getLogger(__name__)

_PART = 2**20
"""Most bytes of a file that are hashed at once."""
Answer = Callable[[PromptsSource, Path], None]
"""Function that writes the target's answers to a source's prompts into a file of recorded calls."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Hold the conversations to train on and the held-out ones; no session is in both."""

    train: list[Conversation]
    held_out: list[Conversation]

    def digest(self) -> str:
        """Return a digest of all conversations."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            for conversation in part:
                digest.update(repr((conversation.session, conversation.responses)).encode())
                digest.update(conversation.tokens.tobytes())
            digest.update(b"end")
        return digest.hexdigest()


def source_sizes(config: TrainingConfig) -> list[int]:
    """Return the size of each of the sources' files, in bytes. Raises InvalidInputError for an unreadable file."""
    return [_size(path) for path in _files(config.data)]


def folder_of(config: TrainingConfig, sizes: Sequence[int] | None = None) -> Path:
    """Return the folder that caches all that is computed from these data and this target.

    sizes: size of each file in bytes when a resumed run began, so that later growth does not count; None: the present.
    """
    paths = _files(config.data)
    if sizes is None or len(sizes) != len(paths):
        sizes = source_sizes(config)
    data = config.data.model_dump(mode="json", exclude={"cache_dir"})
    for source in (*data["sources"], *data["eval_sources"]):
        if source["type"] == "store":  # which had these fields, and caches of earlier checkouts stay in use
            source.update(revision=None, hf_overrides={})
    files = [_digest(path, size) for path, size in zip(paths, sizes, strict=True)]
    name, folder = config.model.name_or_path, Path(config.model.name_or_path)
    model = [str(folder.resolve()), weight_files(folder), text_files(folder)] if folder.is_dir() else name
    tokenizers = [text_files(path) for path in _tokenizers(config.data) if path.exists()]
    variant = [config.model.variant] if config.model.variant else []  # as above
    key = json.dumps([data, files, model, tokenizers, config.model.dtype, *variant], sort_keys=True)
    return config.data.cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]


def gather(config: TrainingConfig, folder: Path, answer: Answer) -> Corpus:
    """Return the run's conversations, from ``folder`` if they were gathered before.

    answer: called for each source of prompts. Raises InvalidInputError if none would be left to train on or to hold
    out, and the errors of the sources.
    """
    files = _gathered(folder)
    if not is_gathered(folder):
        make_folder(folder, "data.cache_dir")
        corpus = _gather(config, folder, answer)
        for part, file in zip((corpus.train, corpus.held_out), files, strict=True):
            _save(part, file)
    return Corpus(*(_load(file) for file in files))


def is_gathered(folder: Path) -> bool:
    """Return whether the folder holds the conversations of a run."""
    return all(file.exists() for file in _gathered(folder))


def _gathered(folder: Path) -> tuple[Path, Path]:
    return folder / "train.safetensors", folder / "held-out.safetensors"


def _gather(config: TrainingConfig, folder: Path, answer: Answer) -> Corpus:
    data = config.data
    sources = _read(data.sources, config, folder / "answers", answer)
    train = _not_empty(sources, "sources", data)
    if data.eval_sources:
        held_out = _read(data.eval_sources, config, folder / "held-out-answers", answer)
        return _apart(sources, _not_empty(held_out, "eval_sources", data))
    share = data.train_eval_split[1]
    parts = Corpus(
        train=[conversation for conversation in train if _place(conversation.session) >= share],
        held_out=[conversation for conversation in train if _place(conversation.session) < share],
    )
    for name, part in (("trained on", parts.train), ("held out", parts.held_out)):
        if not part:
            raise InvalidInputError(
                f"data.train_eval_split: of {len(train)} conversations none is {name}; give more sessions, other "
                "shares, or data.eval_sources"
            )
    return parts


def _apart(sources: list[list[Conversation]], held_out: list[Conversation]) -> Corpus:
    """Return both parts. Take the sessions that are held out, too, out of the conversations to train on.

    sources: the conversations to train on, by source. Sessions are the same if they have the same name and one's first
    prompt begins with the other's: a source may have a session up to or from a later turn on, or another answer to a
    prompt. The name alone proves nothing: two files may both number their prompts. Raises InvalidInputError if none is
    left to train on.
    """
    prompts: dict[str, list[Int32Array]] = {}
    for conversation in held_out:
        prompts.setdefault(conversation.session, []).append(_prompt(conversation))
    left: list[Conversation] = []
    for source in sources:
        both = {
            each.session
            for each in source
            if any(_begin_alike(_prompt(each), prompt) for prompt in prompts.get(each.session, ()))
        }
        if both:
            logger.info("agentspec: %d sessions are held out, so they are not trained on", len(both))
        left += [conversation for conversation in source if conversation.session not in both]
    if not left:
        raise InvalidInputError(
            "data.eval_sources: every session of data.sources is in it; give other sessions to measure on, or leave it "
            "out to hold out a share of data.sources"
        )
    return Corpus(left, held_out)


def _prompt(conversation: Conversation) -> Int32Array:
    return conversation.tokens[: conversation.responses[0][0]]


def _begin_alike(one: Int32Array, other: Int32Array) -> bool:
    length = min(len(one), len(other))
    return np.array_equal(one[:length], other[:length])


def _not_empty(sources: list[list[Conversation]], field: str, data: Data) -> list[Conversation]:
    """Return the conversations of all sources. Raises InvalidInputError if there is none."""
    found = list(itertools.chain.from_iterable(sources))
    if not found:
        stored = any(isinstance(source, StoreSource) for source in _all(data))
        as_served = (
            "; of a store, give url, tenant, model_key, tokenizer, model.name_or_path, model.revision, "
            "model.hf_overrides and AGENTSPEC_SECRET as its server has them (a server with API keys and no tenant has "
            "a log for each key, which is not read)"
        )
        raise InvalidInputError(
            f"data.{field}: no session with a response of two tokens or more within data.max_length "
            f"({data.max_length}); give more data{as_served if stored else ''}"
        )
    return found


def _read(sources: Sequence[Source], config: TrainingConfig, answers: Path, answer: Answer) -> list[list[Conversation]]:
    """Return the conversations of each source."""
    read: list[list[Conversation]] = []
    for number, source in enumerate(sources):
        if isinstance(source, StoreSource):
            found = _stored(source, config.model)
        elif isinstance(source, PromptsSource):
            file = answers.with_name(f"{answers.name}-{number}.jsonl")
            answer(source, file)
            found = from_records(file, None)
        else:
            of_target = source.tokenizer == config.model.name_or_path
            found = from_records(source.path, source.tokenizer, config.model.revision if of_target else None)
        shortened = (cut(conversation, config.data.max_length) for conversation in found)
        read.append([conversation for conversation in shortened if conversation.responses])
    return read


def _stored(source: StoreSource, model: Model) -> list[Conversation]:
    store = open_store(source.url, must_exist=True)
    try:
        store.ping()  # raises here if the store is away; `server_secret` would warn and return a temporary secret
        key = find_model_key(
            model.name_or_path,
            source.tokenizer,
            revision=model.revision,
            tokenizer_revision=source.tokenizer_revision,
            overrides=overrides_text(model.hf_overrides),
            given=source.model_key,
        )
        logs = LogNames(key, server_secret(Settings(store=source.url)))
        return from_store(store, logs.of(source.tenant), source.newest)
    finally:
        store.close()


def _all(data: Data) -> list[Source]:
    return [*data.sources, *data.eval_sources]


def _tokenizers(data: Data) -> list[Path]:
    """Return what the sources give as tokenizers, which may be paths."""
    named = [None if isinstance(source, PromptsSource) else source.tokenizer for source in _all(data)]
    return [Path(name) for name in named if name is not None]


def _files(data: Data) -> list[Path]:
    return [source.path for source in _all(data) if not isinstance(source, StoreSource)]


def _size(path: Path) -> int:
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InvalidInputError(
            f"{path}: is a pipe or a device, which a training that goes on cannot read again; give a file"
        )
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None


def _digest(path: Path, size: int) -> str:
    """Return the hash of a file's first ``size`` bytes."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while size > 0 and (part := file.read(min(size, _PART))):
                digest.update(part)
                size -= len(part)
    except OSError as error:
        raise _unreadable(path, error) from None
    return digest.hexdigest()


def _unreadable(path: Path, error: OSError) -> InvalidInputError:
    return InvalidInputError(f"{path}: cannot be read: {error.strerror}; give a file of JSON lines")


def _place(session: str) -> float:
    """Return a number from 0 to 1, evenly distributed, that depends on the session's name alone."""
    return int.from_bytes(hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=6).digest()) / 2**48


def _save(conversations: Sequence[Conversation], file: Path) -> None:
    names = json.dumps([conversation.session for conversation in conversations]).encode()
    tensors = {
        "sessions": torch.frombuffer(bytearray(names), dtype=torch.uint8),  # metadata takes 100 MB at most
        "tokens": torch.cat([torch.from_numpy(conversation.tokens.copy()) for conversation in conversations]),
        "lengths": torch.tensor([len(conversation.tokens) for conversation in conversations]),
        "responses": torch.tensor([(i, *span) for i, each in enumerate(conversations) for span in each.responses]),
    }
    with writable(file), replacing(file, sync=True) as partial:
        save_file(tensors, partial)


def _load(file: Path) -> list[Conversation]:
    with readable(file, file.parent), safe_open(file, framework="pt") as stored:
        earlier = stored.metadata() or {}  # of a file that an earlier checkout wrote
        names = earlier["sessions"] if earlier else stored.get_tensor("sessions").numpy().tobytes()
        sessions: list[str] = json.loads(names)
        texts = stored.get_tensor("tokens").split(stored.get_tensor("lengths").tolist())
        spans: list[list[tuple[int, int]]] = [[] for _ in sessions]
        for index, start, end in stored.get_tensor("responses").tolist():
            spans[index].append((start, end))
    return [
        Conversation(session, text.numpy(), tuple(span))
        for session, text, span in zip(sessions, texts, spans, strict=True)
    ]
