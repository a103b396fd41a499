"""The conversations of a run: gathered from its sources once, divided by session, and kept, so that a resumed run
trains on the same ones even where a source has grown since."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agentspec.cache.store import namespace, open_store
from agentspec.errors import InvalidInputError
from agentspec.server_ext.model_key import model_name, tokenizer_fingerprint
from agentspec.train.config import Data, Model, PromptsSource, Source, StoreSource, TrainingConfig
from agentspec.train.conversations import Conversation, cut, from_records, from_store
from agentspec.train.files import whole

Answer = Callable[[PromptsSource, Path], None]
"""Writes the target's answers to a source's prompts into a file of recorded calls."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """What is trained on, and what is held out; no session is in both."""

    train: list[Conversation]
    held_out: list[Conversation]


def folder_of(config: TrainingConfig) -> Path:
    """Where everything derived from these data and this target is cached."""
    data = config.data.model_dump(mode="json", exclude={"cache_dir"})
    files = [_digest(source.path) for source in _all(config.data) if not isinstance(source, StoreSource)]
    key = json.dumps([data, files, model_name(config.model.name_or_path), config.model.dtype], sort_keys=True)
    return config.data.cache_dir / hashlib.sha256(key.encode()).hexdigest()[:16]


def gather(config: TrainingConfig, folder: Path, answer: Answer) -> Corpus:
    """The run's conversations, from ``folder`` if they were gathered before.

    Raises InvalidInputError where a part of them would be empty, and what the sources raise.
    """
    files = folder / "train.safetensors", folder / "held-out.safetensors"
    if not all(file.exists() for file in files):
        folder.mkdir(parents=True, exist_ok=True)
        corpus = _gather(config, folder, answer)
        for part, file in zip((corpus.train, corpus.held_out), files, strict=True):
            _save(part, file)
    return Corpus(*(_load(file) for file in files))


def _gather(config: TrainingConfig, folder: Path, answer: Answer) -> Corpus:
    data = config.data
    train = _read(data.sources, config, folder / "answers", answer)
    if data.eval_sources:
        held_out = _read(data.eval_sources, config, folder / "held-out-answers", answer)
    else:
        share = data.train_eval_split[1]
        held_out = [conversation for conversation in train if _place(conversation.session) < share]
        train = [conversation for conversation in train if _place(conversation.session) >= share]
    for name, part in (("data.sources", train), ("data.eval_sources or data.train_eval_split", held_out)):
        if not part:
            raise InvalidInputError(
                f"{name}: no session with a response of two tokens or more within data.max_length "
                f"({data.max_length}); give more data"
            )
    return Corpus(train, held_out)


def _read(sources: Sequence[Source], config: TrainingConfig, answers: Path, answer: Answer) -> list[Conversation]:
    found: list[Conversation] = []
    for number, source in enumerate(sources):
        if isinstance(source, StoreSource):
            found += _stored(source, config.model)
        elif isinstance(source, PromptsSource):
            file = answers.with_name(f"{answers.name}-{number}.jsonl")
            answer(source, file)
            found += from_records(file, None)
        else:
            found += from_records(source.path, source.tokenizer)
    shortened = (cut(conversation, config.data.max_length) for conversation in found)
    return [conversation for conversation in shortened if conversation.responses]


def _stored(source: StoreSource, model: Model) -> list[Conversation]:
    name = model.name_or_path
    store = open_store(source.url)
    try:
        key = namespace(model_name(name), tokenizer_fingerprint(name, None), source.tenant)
        return from_store(store, key, source.newest, source.tenant)
    finally:
        store.close()


def _all(data: Data) -> list[Source]:
    return [*data.sources, *data.eval_sources]


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error}; give a file of JSON lines") from None


def _place(session: str) -> float:
    """0 to 1, evenly: where a session stands, whatever else there is."""
    return int.from_bytes(hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=6).digest()) / 2**48


def _save(conversations: Sequence[Conversation], file: Path) -> None:
    tensors = {
        "tokens": torch.cat([torch.from_numpy(conversation.tokens.copy()) for conversation in conversations]),
        "lengths": torch.tensor([len(conversation.tokens) for conversation in conversations]),
        "responses": torch.tensor([(i, *span) for i, each in enumerate(conversations) for span in each.responses]),
    }
    with whole(file) as partial:
        save_file(tensors, partial, {"sessions": json.dumps([conversation.session for conversation in conversations])})


def _load(file: Path) -> list[Conversation]:
    with safe_open(file, framework="pt") as stored:
        sessions: list[str] = json.loads(stored.metadata()["sessions"])
        texts = stored.get_tensor("tokens").split(stored.get_tensor("lengths").tolist())
        spans: list[list[tuple[int, int]]] = [[] for _ in sessions]
        for index, start, end in stored.get_tensor("responses").tolist():
            spans[index].append((start, end))
    return [
        Conversation(session, text.numpy(), tuple(span))
        for session, text, span in zip(sessions, texts, spans, strict=True)
    ]
