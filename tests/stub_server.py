"""A programmable stand-in for vLLM's OpenAI server: no model, every answer decided by the test.

    with StubServer() as server:
        server.on("2+2", Reply(status=503), Reply(status=503), Reply(answer="4"))
        server.on_capture(lambda tokens, number: Capture(delay_s=0.1))

* `/v1/chat/completions` with `return_token_ids`; the n-th request for a prompt gets the n-th reply, the last repeats
* `/v1/completions` as the hidden-state connector answers it: a file in `server.storage` (`hidden_states`,
  `token_ids`) with a `.lock` that is held until the file is written
* `/v1/models`, `/metrics`, and `server.requests`, the log of everything asked
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

THINK_OPEN, THINK_CLOSE, END = 504, 505, 490  # the pocket verifier's ids
MODEL = "stub"


@dataclass(frozen=True)
class Reply:
    """What one chat request gets; fields left None are derived from the prompt's text."""

    status: int = 200
    delay_s: float = 0.0
    drop: bool = False  # the connection closes without an answer
    thinking: str | None = "so"
    answer: str | None = "yes"
    spelling: str | None = "reasoning"  # or "reasoning_content", or None for neither
    prompt_ids: Sequence[int] | None = None
    output_ids: Sequence[int] | None = None
    finish_reason: str = "stop"
    with_ids: bool = True
    raw: tuple[str, bytes] | None = None  # content type and body, instead of a completion


CUT = Reply(answer=None, thinking="half", finish_reason="length", output_ids=(30, 31, 32))


@dataclass(frozen=True)
class Capture:
    """What one hidden-state request gets; fields left None are derived from the tokens."""

    status: int = 200
    delay_s: float = 0.0  # before the answer
    write_delay_s: float = 0.0  # between the answer and the file, the lock being held
    named: str | None = None  # "" names no file, another text is returned as the path
    tokens: Sequence[int] | None = None
    states: np.ndarray | None = None
    write: bool = True
    raw: tuple[str, bytes] | None = None


@dataclass(frozen=True)
class Request:
    """One entry of the log."""

    path: str
    body: dict[str, Any]


def text_of(body: dict[str, Any]) -> str:
    """The text of the last user turn."""
    return str(next(turn["content"] for turn in reversed(body["messages"]) if turn["role"] == "user"))


def ids_of(text: str) -> tuple[list[int], list[int]]:
    """Prompt and output ids that belong to a prompt's text, the same in every run."""
    hashed = hashlib.sha256(text.encode()).digest()
    prompt = [491, *(byte % 200 for byte in hashed[: 3 + hashed[0] % 5]), THINK_OPEN]
    output = [byte % 200 for byte in hashed[8 : 12 + hashed[1] % 8]]
    return prompt, [*output, THINK_CLOSE, output[0], END]


def states_of(tokens: Sequence[int], layers: int, hidden: int) -> np.ndarray:
    """float32 [tokens, layers, hidden]: a value that names token, layer and column."""
    token = np.asarray(tokens, dtype=np.float32)[:, None, None] + 1
    layer = np.arange(layers, dtype=np.float32)[None, :, None] * 1000
    return (token + layer + np.arange(hidden, dtype=np.float32)[None, None, :] / 64).astype(np.float32)


class StubServer:
    """The server; a context manager.  `url` ends in /v1."""

    def __init__(self, layers: int = 4, hidden: int = 8) -> None:
        self.layers, self.hidden = layers, hidden
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.default = Reply()
        self.metrics: str | None = None
        self.drafts = 0
        self._replies: dict[str, tuple[Reply, ...]] = {}
        self._asked: Counter[str] = Counter()
        self._capture: Callable[[list[int], int], Capture] = lambda tokens, number: Capture()
        self._captures = 0

    def __enter__(self) -> StubServer:
        self._folder = tempfile.TemporaryDirectory(prefix="stub-")
        self.storage = Path(self._folder.name).resolve()
        self._httpd = _Server(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._httpd.server_address[1]}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._httpd.shutdown()
        self._httpd.server_close()
        self._folder.cleanup()

    def on(self, text: str, *replies: Reply) -> None:
        """Successive requests for this prompt get these replies, the last one for ever."""
        self._replies[text] = replies

    def on_capture(self, decide: Callable[[list[int], int], Capture]) -> None:
        """`decide(token ids, number of the request)` says what a hidden-state request gets."""
        self._capture = decide

    def asked(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        """The bodies of the requests for `path`, in order of arrival."""
        return [request.body for request in list(self.requests) if request.path == path]

    def hits(self, text: str) -> int:
        """How many chat requests came for this prompt."""
        return sum(text_of(body) == text for body in self.asked())

    def reply(self, body: dict[str, Any]) -> Reply:
        """The next reply for a chat request."""
        text = text_of(body)
        with self.lock:
            replies = self._replies.get(text, (self.default,))
            chosen = replies[min(self._asked[text], len(replies) - 1)]
            self._asked[text] += 1
        prompt, output = ids_of(text)
        return replace(
            chosen,
            prompt_ids=list(prompt if chosen.prompt_ids is None else chosen.prompt_ids),
            output_ids=list(output if chosen.output_ids is None else chosen.output_ids),
        )

    def capture(self, tokens: list[int]) -> tuple[Capture, Path]:
        """What a hidden-state request gets and the file that belongs to it."""
        with self.lock:
            number = self._captures
            self._captures += 1
        return self._capture(tokens, number), self.storage / f"cmpl-{number}.safetensors"

    def write(self, capture: Capture, tokens: list[int], path: Path) -> None:
        """Writes the file under its lock; the lock is taken here, the writing may come later."""
        lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            time.sleep(capture.write_delay_s)
            held = tokens if capture.tokens is None else capture.tokens
            states = states_of(held, self.layers, self.hidden) if capture.states is None else capture.states
            data = save({"hidden_states": states, "token_ids": np.asarray(held, dtype=np.int64)})
            if self.storage.is_dir():
                path.write_bytes(data)
            os.close(lock)

        if capture.write_delay_s:
            threading.Thread(target=finish, daemon=True).start()
        else:
            finish()

    def metrics_page(self) -> str:
        """The Prometheus page: by default 10 drafts, 30 draft tokens and 20 accepted ones a chat request."""
        if self.metrics is not None:
            return self.metrics
        figures = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 20}
        lines = []
        for name, each in figures.items():
            lines.append(f"# TYPE vllm:spec_decode_num_{name} counter")
            lines.append(f'vllm:spec_decode_num_{name}_total{{engine="0"}} {each * self.drafts}')
        return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is part of the tests."""


def _handler(server: StubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            """Silent."""

        def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _json(self, status: int, value: Any) -> None:
            self._send(status, json.dumps(value).encode())

        def do_GET(self) -> None:
            with server.lock:
                server.requests.append(Request(self.path, {}))
            if self.path == "/v1/models":
                self._json(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            elif self.path == "/metrics":
                self._send(200, server.metrics_page().encode(), "text/plain; version=0.0.4")
            else:
                self._json(404, {"error": {"message": "no such page"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.requests.append(Request(self.path, body))
            if self.path == "/v1/chat/completions":
                self._chat(body)
            elif self.path == "/v1/completions":
                self._completion(body)
            else:
                self._json(404, {"error": {"message": "no such page"}})

        def _chat(self, body: dict[str, Any]) -> None:
            reply = server.reply(body)
            time.sleep(reply.delay_s)
            if reply.drop:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            elif reply.raw is not None:
                self._send(reply.status, reply.raw[1], reply.raw[0])
            elif reply.status != 200:
                self._json(reply.status, {"error": {"message": f"stub says {reply.status}", "code": reply.status}})
            else:
                with server.lock:
                    server.drafts += 1
                self._json(200, completion(reply))

        def _completion(self, body: dict[str, Any]) -> None:
            tokens = list(body["prompt"])
            capture, path = server.capture(tokens)
            time.sleep(capture.delay_s)
            if capture.raw is not None:
                self._send(capture.status, capture.raw[1], capture.raw[0])
                return
            if capture.status != 200:
                self._json(capture.status, {"error": {"message": f"stub says {capture.status}"}})
                return
            if capture.write:
                server.write(capture, tokens, path)
            named = str(path) if capture.named is None else capture.named
            choice = {"index": 0, "text": "x", "finish_reason": "length"}
            answer = {"id": path.stem, "object": "text_completion", "model": MODEL, "choices": [choice]}
            self._json(200, answer | ({"kv_transfer_params": {"hidden_states_path": named}} if named else {}))

    return Handler


def completion(reply: Reply) -> dict[str, Any]:
    """A chat completion as vLLM words it."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.answer}
    if reply.spelling is not None:
        message[reply.spelling] = reply.thinking
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
    answer: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": MODEL}
    if reply.with_ids:
        answer["prompt_token_ids"] = list(reply.prompt_ids or ())
        choice["token_ids"] = list(reply.output_ids or ())
    return answer | {"choices": [choice]}
