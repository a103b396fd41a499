"""Run a small OpenAI-compatible server in a thread. It is strict about requests, and records them."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from openai.types.chat.completion_create_params import CompletionCreateParamsBase

KNOWN_FIELDS = {*CompletionCreateParamsBase.__annotations__, "stream"}
PROMPT_TOKENS = 7
KNOWN_ASSISTANT_FIELDS = {"role", "content", "refusal", "audio", "tool_calls", "function_call"}
THOUGHTS = ("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks")
EXTENSION_FIELDS = {"cache_salt", "return_token_ids", "session_id", "vllm_xargs"}


@dataclass
class Received:
    """Hold one request as it came in; header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeServer:
    """Answer as each test says. extension: whether to answer as agentspec's extension does."""

    extension: bool = False
    api_key: str | None = None
    failures: list[int] = field(default_factory=list)  # statuses of the next chat calls
    retry_after: tuple[str, str] = ("Retry-After-Ms", "1")  # header by which clients are told how long to wait
    answers: list[dict[str, Any]] = field(default_factory=list)  # messages of the next replies
    probe: Callable[[], tuple[int, Any]] | None = None
    counts: dict[str, Any] | None = None
    token_ids: tuple[list[int], list[int]] | None = None  # ids of prompt and answer, for requests that ask for them
    prediction_usage: tuple[int, int] | None = None  # accepted and rejected tokens
    finish_reason: str | None = None
    erasing: list[int] = field(default_factory=list)  # statuses of the next erasures; 202: something is left
    broken_stream: bool = False
    cut: bool = False  # chat answers are shorter than their headers say, as if the server had died
    refuses_thoughts: bool = False
    max_model_len: int | None = None  # as vLLM tells it of its model "small"; None: there is no list of models
    hold: threading.Event | None = None  # chat calls wait for it
    received: list[Received] = field(default_factory=list)
    taking: threading.Lock = field(default_factory=threading.Lock)  # while a handler's thread notes or takes something

    def __post_init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"state": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def chats(self) -> list[Received]:
        return [request for request in self.received if request.path.endswith("/chat/completions")]

    @property
    def erased(self) -> list[str]:
        """Return the sessions that clients asked to erase."""
        paths = [request.path for request in self.received if request.method == "DELETE"]
        return [unquote(path.removeprefix("/v1/agentspec/sessions/")) for path in paths]

    @property
    def probes(self) -> list[Received]:
        return [request for request in self.received if request.path == "/v1/agentspec"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/agentspec":
            if self.probe is not None:
                return self.probe()
            if self.extension:
                return 200, {"agentspec": "0.1.0"}
        if path == "/v1/models" and self.max_model_len is not None:
            return 200, {"object": "list", "data": [{"id": "small", "max_model_len": self.max_model_len}]}
        prefix = "/v1/agentspec/requests/"
        if self.extension and path.startswith(prefix) and self.counts is not None:
            return 200, {"request_id": unquote(path.removeprefix(prefix)), **self.counts}
        return 404, {"error": {"message": f"no {path}", "type": "not_found"}}

    def refusal(self, body: dict[str, Any]) -> str | tuple[int, Any] | None:
        """Return why a strict server would refuse this body, alone or as a status and a body; None if it takes it."""
        known = KNOWN_FIELDS | EXTENSION_FIELDS if self.extension else KNOWN_FIELDS
        if unknown := body.keys() - known:
            return f"unknown fields: {sorted(unknown)}"
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        if self.max_model_len is not None and PROMPT_TOKENS + wanted >= self.max_model_len:  # as SGLang counts
            return f"Requested token count exceeds the model's maximum context length of {self.max_model_len} tokens."
        open_calls: set[str] = set()
        for message in body["messages"]:
            if message["role"] == "assistant":
                if unknown := message.keys() - KNOWN_ASSISTANT_FIELDS - set(() if self.refuses_thoughts else THOUGHTS):
                    return f"unknown fields of an assistant message: {sorted(unknown)}"
                open_calls = {call["id"] for call in message.get("tool_calls", ())}
            elif message["role"] == "tool":
                if message["tool_call_id"] not in open_calls:
                    return f"no such tool call: {message['tool_call_id']}"
                open_calls.discard(message["tool_call_id"])
            elif open_calls:
                return f"tool calls without an answer: {sorted(open_calls)}"
        return None

    def answer(self, number: int) -> dict[str, Any]:
        """Return the answer to the chat call with this number. Calls at the same time have numbers of their own."""
        with self.taking:
            message = self.answers.pop(0) if self.answers else {"content": f"answer {number}"}
        reason = self.finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 3, "total_tokens": PROMPT_TOKENS + 3}
        return {
            "id": f"chatcmpl-{number}",
            "created": 1,
            "model": "small",
            "object": "chat.completion",
            "usage": usage,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": reason,
                    "logprobs": None,
                    # annotations: a field that servers send and that must not be sent back
                    "message": {"role": "assistant", "content": None, "annotations": [], **message},
                }
            ],
        }


def pieces_of(value: Any) -> list[Any]:
    """Return a text in pieces of three characters, or each part of a list in a list of its own."""
    if isinstance(value, list):
        return [[part] for part in value]
    return [value[start : start + 3] for start in range(0, len(value), 3)]


def chunks_of(answer: dict[str, Any], *, usage: bool) -> list[dict[str, Any]]:
    """Return the answer as the chunks of a stream: text and tool arguments in pieces of three characters."""
    base = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice = answer["choices"][0]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: piece} for name in THOUGHTS for piece in pieces_of(message.get(name) or "")]
    text = message["content"] or ""
    deltas += [{"content": text[start : start + 3]} for start in range(0, len(text), 3)]
    if call := message.get("function_call"):
        deltas.append({"function_call": {"name": call["name"], "arguments": ""}})
        deltas += [{"function_call": {"arguments": piece}} for piece in (call["arguments"][:3], call["arguments"][3:])]
    for index, call in enumerate(message.get("tool_calls", ())):
        kind, text = ("custom", "input") if "custom" in call else ("function", "arguments")
        body = call[kind]
        deltas.append({"tool_calls": [{"index": index, **call, kind: {"name": body["name"], text: ""}}]})
        deltas += [{"tool_calls": [{"index": index, kind: {text: piece}}]} for piece in pieces_of(body[text])]
    result = [{**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if "prompt_token_ids" in answer:
        result[0]["prompt_token_ids"] = answer["prompt_token_ids"]
        for chunk, token in zip(itertools.cycle(result), choice["token_ids"], strict=False):
            chunk["choices"][0].setdefault("token_ids", []).append(token)
    result.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]})
    if usage:
        result.append({**base, "choices": [], "usage": answer["usage"]})
    if "agentspec" in answer:
        result.append({**base, "choices": [], "agentspec": answer["agentspec"]})
    return result


class Handler(BaseHTTPRequestHandler):
    """Answer for the FakeServer that a subclass names."""

    state: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._record({})
        if self._allowed():
            self._send(*self.state.get(self.path))

    def do_DELETE(self) -> None:
        self._record({})
        if self._allowed():
            status = self.state.erasing.pop(0) if self.state.erasing else 200 if self.state.extension else 404
            self._send(status, {"complete": status == 200})

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._record(body)
        if self._allowed():
            status = self.state.failures.pop(0) if self.state.failures else 200 if self.state.extension else 404
            self._send(status, {"added": len(body.get("texts", ())) or 1})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = self._record(body)
        if not self._allowed():
            return
        if self.state.hold is not None:
            self.state.hold.wait(10)
        with self.state.taking:
            status = self.state.failures.pop(0) if self.state.failures else None
        if status is not None:
            return self._send(status, {"error": {"message": f"told to answer {status}"}})
        if reason := self.state.refusal(body):
            return self._send(*(reason if isinstance(reason, tuple) else (400, {"error": {"message": reason}})))
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            return self._stream(chunks_of(self._answer(body, number), usage=usage))
        return self._send(200, self._answer(body, number))

    def _answer(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        answer = self.state.answer(number)
        if body.get("prediction") and self.state.prediction_usage is not None:
            accepted, rejected = self.state.prediction_usage
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
            answer["usage"]["completion_tokens_details"] = details
        if body.get("return_token_ids") and self.state.token_ids is not None:
            answer["prompt_token_ids"], answer["choices"][0]["token_ids"] = self.state.token_ids
        if self.state.extension and self.state.counts is not None and "X-Agentspec-Figures" in self.headers:
            answer["agentspec"] = {"request_id": answer["id"], **self.state.counts}
        return answer

    def _record(self, body: dict[str, Any]) -> int:
        """Note the request. Return the number of chat calls up to this one."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.state.taking:
            self.state.received.append(Received(self.command, self.path, headers, body))
            return len(self.state.chats)

    def _allowed(self) -> bool:
        if self.state.api_key is None or self.headers.get("Authorization") == f"Bearer {self.state.api_key}":
            return True
        self._send(401, {"error": {"message": "wrong key"}})
        return False

    def _send(self, status: int, body: Any) -> None:
        is_text = isinstance(body, str)
        payload = (body if is_text else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if is_text else "application/json")
        cut = self.state.cut and self.command == "POST"
        self.send_header("Content-Length", str(len(payload) + cut))
        self.close_connection = self.close_connection or cut
        self.send_header(*self.state.retry_after)
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # a client that no longer waits
            self.wfile.write(payload)

    def _stream(self, chunks: list[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        if self.state.cut:
            self.send_header("Content-Length", "1000000")
        self.end_headers()
        broken = self.state.broken_stream or self.state.cut
        for chunk in chunks[: len(chunks) // 2] if broken else chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if not broken:
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
