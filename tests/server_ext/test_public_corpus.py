"""Test the operator's file of public texts: its forms, its errors, and what an engine reports of it."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.errors import ConfigurationError
from agentspec.server_ext.engine import DraftingEngine
from agentspec.server_ext.identity import Identity
from agentspec.server_ext.public_corpus import PublicCorpus, read_texts
from agentspec.server_ext.settings import Settings, load_settings
from agentspec.server_ext.step import Batch, NewRequest, Step
from agentspec.server_ext.vllm_adapter.worker.engine_builder import served_tokenizer
from tests.server_ext.plain_engine import in_memory

from .session_server import MODEL

WORDS = list(range(100, 130))


def tokenize(text: str) -> list[int]:
    """Return one token for each word: "w5" is 105."""
    return [100 + int(word[1:]) for word in text.split()]


def words(numbers: Sequence[int]) -> str:
    return " ".join(f"w{number}" for number in numbers)


def load(path: Path, content: str | bytes, **options: Any) -> tuple[SuffixCache, dict[str, Any]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    cache = SuffixCache(vocab_size=1000)
    corpus = PublicCorpus(path, cache, options.get("max_bytes", 1 << 20), options.get("tokenize", tokenize))
    corpus.start()
    assert corpus.wait(180)
    return cache, corpus.stats()


def drafts(cache: SuffixCache, prompt: list[int]) -> list[int]:
    cache.start("q", prompt, tenant="anybody")
    found = cache.propose(["q"], 3)[0]
    cache.abort("q")
    assert found.source in ("public", "")
    tokens: list[int] = found.token_ids.tolist()
    return tokens


TEXT = words(range(30))
FORMS: dict[str, str] = {
    "a.jsonl": json.dumps({"token_ids": WORDS}),
    "b.jsonl": "\n".join(["", json.dumps({"text": TEXT, "source": "manual"}), ""]),
    "c.jsonl": json.dumps({"session": "s", "turn": 0, "prompt_token_ids": WORDS[:4], "response_token_ids": WORDS[4:]}),
    "d.jsonl": json.dumps({"session": "s", "turn": 0, "prompt": words(range(4)), "response": words(range(4, 30))}),
    "e.json": json.dumps({"version": 1, "id": "s", "log": "l", "turns": [{"prompt": [1, 2], "response": WORDS}]}),
    "f.txt": TEXT,
    "h.jsonl": "\ufeff" + json.dumps({"token_ids": WORDS}),
    "g.md": "\n".join(words([number]) for number in range(30)),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_each_form_is_read(tmp_path: Path, name: str, packed: bool) -> None:
    content = gzip.compress(FORMS[name].encode()) if packed else FORMS[name].encode()
    cache, stats = load(tmp_path / (name + ".gz" if packed else name), content)
    assert stats["state"] == "ready" and stats["texts"] == 1 and stats["skipped"] == 0
    assert drafts(cache, WORDS[:20]) == WORDS[20:23]


@pytest.mark.parametrize("name", ["a.jsonl", "f.txt"])
def test_a_packed_file_is_read_whatever_its_name_is(tmp_path: Path, name: str) -> None:
    cache, stats = load(tmp_path / name, gzip.compress(FORMS[name].encode()))
    assert (stats["texts"], stats["skipped"]) == (1, 0)
    assert drafts(cache, WORDS[:20]) == WORDS[20:23]


def test_a_long_plain_text_is_several_texts(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1).integers(0, 800, 60_000).tolist()
    lines = "\n".join(words(numbers[at : at + 10]) for at in range(0, len(numbers), 10))
    cache, stats = load(tmp_path / "long.txt", lines, max_bytes=4 << 20)
    assert stats["tokens"] == 60_000 and 3 < stats["texts"] < 10
    at = 41_000
    assert drafts(cache, [100 + n for n in numbers[at : at + 8]])[:1] == [100 + numbers[at + 8]]


def test_texts_of_long_lines_are_named_by_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("\n".join(("x" * 200_000, "y" * 65_536, "z" * 65_535, "short", "w" * 70_000, "end")))
    texts: list[str] = []

    def keep(text: str) -> list[int]:
        texts.append(text)
        return [1]

    wheres = [where for where, make in read_texts(path) if len(make(keep))]
    assert "".join(texts) == path.read_text()
    begins = ["".join(texts[:number]).count("\n") + 1 for number in range(len(texts))]
    assert wheres == [f"line {begin}" for begin in begins]
    assert len(set(begins)) > 3


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("{", "JSON object"),
        ("[1, 2]", "JSON object"),
        ('{"token_ids": [1, -5]}', "token_ids"),
        ('{"token_ids": [1, 2147483647]}', "token_ids"),
        ('{"token_ids": "many"}', "token_ids"),
        ('{"text": 5}', "text: give a string"),
        ('{"other": 5}', "none of token_ids"),
        ('{"turns": [5]}', "turns.0"),
        ("[" * 100_000, "JSON object"),
    ],
)
def test_a_bad_line_is_skipped_and_named(tmp_path: Path, bad: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    cache, stats = load(tmp_path / "some.jsonl", f"{bad}\n{json.dumps({'token_ids': WORDS})}")
    assert (stats["state"], stats["texts"], stats["skipped"]) == ("ready", 1, 1)
    assert "line 1" in caplog.text and why in caplog.text and "some.jsonl" in caplog.text
    assert drafts(cache, WORDS[:20]) == WORDS[20:23]


def test_a_text_that_the_tokenizer_refuses_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One such text must not cost the whole file."""
    model = SimpleNamespace(
        skip_tokenizer_init=False, tokenizer=str(MODEL), tokenizer_revision=None, trust_remote_code=False
    )
    content = "\n".join(json.dumps({"text": text}) for text in ("half a pair: \ud83d", "all is well", "\udc00"))
    _, stats = load(tmp_path / "some.jsonl", content, tokenize=served_tokenizer(model))
    assert (stats["state"], stats["texts"], stats["skipped"]) == ("ready", 1, 2)
    assert "line 1: skipped: text: the tokenizer refuses it" in caplog.text


def test_a_tokenizer_that_cannot_be_loaded_costs_the_corpus(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = SimpleNamespace(
        skip_tokenizer_init=False, tokenizer=str(tmp_path), tokenizer_revision=None, trust_remote_code=False
    )
    _, stats = load(tmp_path / "some.txt", TEXT, tokenize=served_tokenizer(model))
    assert stats["state"] == "failed" and "not used" in caplog.text


def test_text_needs_a_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, stats = load(tmp_path / "some.txt", TEXT, tokenize=None)
    assert stats["skipped"] == 1 and stats["texts"] == 0
    assert "give token_ids" in caplog.text


def test_a_file_that_cannot_be_read_costs_the_corpus_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache, stats = load(tmp_path / "torn.jsonl.gz", gzip.compress(b"{}" * 1000)[:-9])
    assert stats["state"] == "failed" and "torn.jsonl.gz: not used" in caplog.text
    assert (
        drafts(cache, WORDS[:20]) == [] and cache.stats().bytes == SuffixCache().stats().bytes + cache_of_one_tenant()
    )


def cache_of_one_tenant() -> int:
    cache = SuffixCache(vocab_size=1000)
    drafts(cache, WORDS[:20])
    return cache.stats().bytes


def test_ten_times_its_limit_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(1)
    lines = [json.dumps({"token_ids": rng.integers(0, 900, 1000).tolist()}) for _ in range(200)]
    cache, stats = load(tmp_path / "much.jsonl", "\n".join(lines), max_bytes=256 << 10)
    assert stats["state"] == "ready" and stats["left_out"] > 150
    assert 0 < stats["bytes"] <= 256 << 10 and cache.stats().bytes < 300 << 10
    assert "left out" in caplog.text


def test_a_file_that_is_not_there_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'public'.*give a file"):
        load_settings({"agentspec": {"public": str(tmp_path / "nothing.jsonl")}})


def test_an_engine_shows_it_as_a_source(tmp_path: Path) -> None:
    """Each tenant drafts from the corpus; the step record and the figures name it."""
    file, record = tmp_path / "public.jsonl", tmp_path / "record.jsonl"
    file.write_text(json.dumps({"token_ids": WORDS}))
    settings = Settings(store="memory://", public=str(file), record=str(record))
    engine = DraftingEngine(settings, in_memory(settings))
    assert engine.stats()["public"]["state"] == "waiting"
    engine.warm_up()
    assert engine._public is not None and engine._public.wait(180)
    tokens = np.array([WORDS], np.int32)
    for tenant in ("a", "b"):
        batch, length = Batch((tenant,), np.zeros(1, np.int32)), 9
        draft: list[int] = []
        for _ in range(2):
            length += 1 + len(draft)
            step = Step(
                started=[NewRequest(tenant, WORDS[:9], Identity(tenant, caller=tenant))] if length == 10 else [],
                batch=batch,
                tokens=tokens,
                lengths=np.array([length], np.int32),
                max_draft_tokens=np.array([5], np.int32),
                num_verified_draft_tokens=np.array([len(draft)], np.int32),
                num_draft_tokens=len(draft),
            )
            (draft,) = engine.propose(step)
            assert draft
        figures = engine.request(tenant, tenant)
        assert figures is not None and figures["accepted_by_source"]["public"] == 5
        engine.finish(tenant)
    stats = engine.stats()
    assert stats["accepted_by_source"]["public"] == 10 and stats["public"]["tokens"] == 30
    engine.close()
    assert {json.loads(line)["source"] for line in record.read_text().splitlines()} == {None, "public"}
