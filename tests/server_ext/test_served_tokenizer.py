"""Test the copy of vLLM's tokenizer that agentspec works with, on tokenizers as vLLM makes them."""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from agentspec.server_ext.vllm_adapter.frontend import chats
from agentspec.server_ext.vllm_adapter.frontend.chats import ServedTokenizer, tokenizer_of
from tests.end_to_end.conftest import MODEL

TEXT = "".join(f"def function_{number}(value):\n    return value + {number}\n\n" for number in range(40))


@pytest.fixture(scope="module")
def plain() -> Any:
    """Return the demo model's tokenizer as vLLM loads it."""
    from vllm.tokenizers.hf import CachedHfTokenizer

    return CachedHfTokenizer.from_pretrained(str(MODEL))


def pooled(tokenizer: Any) -> Any:
    """Return a pool of two copies, as vLLM makes it for most models."""
    import copy

    from vllm.tokenizers.hf import maybe_make_thread_pool

    return maybe_make_thread_pool(copy.deepcopy(tokenizer), 2)


@contextmanager
def vllm_truncates(tokenizer: Any) -> Iterator[None]:
    """Let a thread use the tokenizer as vLLM's does: each call truncates, which is a state of the tokenizer."""
    ending = threading.Event()

    def work() -> None:
        while not ending.is_set():
            tokenizer(TEXT, truncation=True, max_length=100)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@pytest.mark.parametrize("is_pooled", [True, False])
def test_it_gives_the_tokens_and_the_texts_of_vllms(plain: Any, is_pooled: bool) -> None:
    served = ServedTokenizer(pooled(plain) if is_pooled else plain)
    tokens = plain.encode(TEXT, add_special_tokens=False)
    assert served.encode(TEXT) == tokens and served.decode(tokens) == plain.decode(tokens)
    messages = [{"role": "user", "content": "x"}]
    assert served.apply_chat_template(messages, tokenize=False) == plain.apply_chat_template(messages, tokenize=False)


def test_vllms_truncation_cuts_none_of_our_texts(plain: Any) -> None:
    """Models whose tokenizer vLLM does not pool lost the ends of imported texts."""
    served = ServedTokenizer(plain)
    whole = len(plain.encode(TEXT, add_special_tokens=False))
    with vllm_truncates(plain):
        assert {len(served.encode(TEXT)) for _ in range(200)} == {whole}


def test_many_threads_make_no_copies(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's pool copies the tokenizer for each thread beyond the second, and keeps the copies."""
    source = pooled(plain)
    served = ServedTokenizer(source)
    monkeypatch.setattr("copy.deepcopy", lambda *_: pytest.fail("copied"))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(served.encode(TEXT * 10)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


def test_a_long_text_lets_others_have_their_turn(plain: Any) -> None:
    served, waited = ServedTokenizer(plain), list[float]()
    thread = threading.Thread(target=served.encode, args=(TEXT * 2_000,))
    thread.start()
    while thread.is_alive():
        begin = time.perf_counter()
        served.encode("x")
        waited.append(time.perf_counter() - begin)
        time.sleep(0.01)
    assert len(waited) >= 5, "it waited for the whole text"


def test_a_chat_template_that_takes_long_holds_up_no_text(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One caller's import is rendered while the texts of all callers' chats are encoded."""
    served = ServedTokenizer(plain)
    renders, goes_on = threading.Event(), threading.Event()

    def render(*_: object, **__: object) -> str:
        renders.set()
        assert goes_on.wait(60)
        return "a chat"

    monkeypatch.setattr(served._tokenizer, "apply_chat_template", render)
    with ThreadPoolExecutor(2) as threads:
        chat = threads.submit(served.apply_chat_template, [], tokenize=False)
        assert renders.wait(60)
        try:
            assert threads.submit(served.encode, "x").result(20)
        finally:
            goes_on.set()
        assert chat.result(60) == "a chat"


def test_a_long_text_has_the_tokens_of_its_whole(plain: Any) -> None:
    served = ServedTokenizer(plain)
    text = TEXT * 40
    assert len(text) > 4 * chats._PIECE
    assert served.encode(text) == plain.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("seed", range(40))
def test_pieces_make_up_the_text(seed: int) -> None:
    choice = random.Random(seed)
    signs = choice.sample(["a", "b", " ", "\n", "\n\n", "    x", "word "], choice.randrange(1, 7))
    text = "".join(choice.choice(signs) for _ in range(choice.randrange(40_000)))
    pieces = list(chats._pieces(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= chats._PIECE for piece in pieces[:-1]) and len(pieces[-1]) <= chats._PIECE


def test_a_server_has_one(plain: Any) -> None:
    class Client:
        def get_tokenizer(self) -> Any:
            return plain

    client = Client()
    assert tokenizer_of(client) is tokenizer_of(client) is not None


def test_one_that_cannot_be_copied_serves_as_it_is(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise TypeError("cannot be copied")

    monkeypatch.setattr("copy.deepcopy", fail)
    assert ServedTokenizer(plain).encode(TEXT) == plain.encode(TEXT, add_special_tokens=False)
