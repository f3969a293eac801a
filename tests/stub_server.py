"""A programmable stand-in for vLLM's OpenAI server: no model, every answer decided by the test.

    with StubServer() as server:
        server.on("2+2", Reply(status=503, retry_after=2), Reply(status=503), Reply(answer="4"))
        server.on_capture(lambda tokens, number: Capture(delay_s=0.1))

* `/v1/chat/completions` with `return_token_ids`; the n-th request for a prompt gets the n-th reply, the last repeats
* `/v1/completions` as the hidden-state connector answers it: a file in `server.storage` (`hidden_states`,
  `token_ids`) with a `.lock` that is held until the file is written; `server.paths` are the files in order of asking
* a chat request with `kv_transfer_params: {"include_output_tokens": true}` gets such a file too, of prompt and answer
  without the last token; `on_capture` decides about both
* `/version` and `/health` beside /v1, when `server.version` and `server.health` say what they answer
* `/v1/models`, `/metrics`, and `server.requests`, the log of everything asked, each with its time `at`

Answers can call tools and count tokens; a function can decide them from the whole request:

    Reply(answer=None, tool_calls=[{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}])
    Reply(usage=(7, 9)), Reply(with_usage=False)
    server.on_chat(lambda body, number: Reply(drop=number == 0))  # number counts requests with the same `messages`

Limits of a server, of context and of requests at a time:

    with StubServer(max_model_len=64) as server:
        server.strict_context = True  # 400 when prompt and max_tokens exceed it; answers end at max_tokens
        server.max_concurrent = 8  # 503 beyond; server.peak is the most that was in flight

`/tokenize` beside /v1 takes `messages` (the ids a chat's prompt has) or `prompt` (the pocket verifier's tokenizer):

    server.on_tokenize(lambda body: 404)  # or a list of ids

The server can go and come back on its port, from any thread; connections are reset, later ones refused:

    server.away()
    server.back()

Functions given to `on_*` run in the server's event loop: they may decide, not wait.  Delays are the replies' own.
A client that hangs up ends its request.  `tests/chaos_server.py` is a server with random faults for benchmarks.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import hashlib
import json
import socket
import struct
import tempfile
import threading
import time
from asyncio import sleep  # bound here: tests replace asyncio.sleep for the client's sake
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from aiohttp import web
from safetensors.numpy import save
from tokenizers import Tokenizer

THINK_OPEN, THINK_CLOSE, END = 504, 505, 490  # the pocket verifier's ids
MODEL = "stub"
TOKENIZER = Path(__file__).parents[1] / "slipstream" / "pocket" / "verifier" / "tokenizer.json"
LINGER = struct.pack("ii", 1, 0)  # closing sends a reset


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
    tool_calls: Sequence[dict[str, Any]] = ()
    retry_after: float | None = None  # seconds, on an error status
    with_usage: bool = True
    usage: tuple[int, int] | None = None  # prompt and completion tokens; None counts the ids


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
    failed: bool = False  # the writer lets go of the lock without a file
    data: bytes | None = None  # the file's bytes, instead of a sample
    raw: tuple[str, bytes] | None = None
    prompt_logprobs: Sequence[dict[int, float] | None] | None = None  # given to a request that asks for them
    refuses_logprobs: bool = False  # such a request gets 400


@dataclass(frozen=True)
class Request:
    """One entry of the log."""

    path: str
    body: dict[str, Any]
    at: float = field(default_factory=time.time)  # arrival


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


def as_native(states: np.ndarray, token_ids: np.ndarray) -> bytes:
    """A file of vLLM's connector."""
    return save({"hidden_states": states, "token_ids": token_ids})


def as_fp8(states: np.ndarray, token_ids: np.ndarray) -> bytes:
    """A file of hs-connectors' fp8 connector."""
    import torch
    from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
    from safetensors.torch import save as save_torch

    codes, scales = quantize_tensor_to_fp8(torch.from_numpy(states))
    return save_torch({"hidden_states": codes, SCALES_KEY: scales, "token_ids": torch.from_numpy(token_ids)})


def logprobs_page(rows: Sequence[dict[int, float] | None] | None) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` as vLLM words them: null first, then an entry a token with its rank."""
    if rows is None:
        return None
    page: list[dict[str, Any] | None] = []
    for row in rows:
        ranked = sorted(row.items(), key=lambda item: -item[1]) if row else []
        entries = enumerate(ranked, 1)
        page.append(
            {str(t): {"logprob": v, "rank": i, "decoded_token": "x"} for i, (t, v) in entries} if ranked else None
        )
    return page


def completion(reply: Reply) -> dict[str, Any]:
    """A chat completion as vLLM words it."""
    prompt, output = list(reply.prompt_ids or ()), list(reply.output_ids or ())
    message: dict[str, Any] = {"role": "assistant", "content": reply.answer}
    if reply.spelling is not None:
        message[reply.spelling] = reply.thinking
    if reply.tool_calls:
        message["tool_calls"] = list(reply.tool_calls)
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reply.finish_reason}
    answer: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": MODEL}
    if reply.with_ids:
        answer["prompt_token_ids"] = prompt
        choice["token_ids"] = output
    if reply.with_usage:
        asked, made = (len(prompt), len(output)) if reply.usage is None else reply.usage
        answer["usage"] = {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
    return answer | {"choices": [choice]}


def page(status: int, data: bytes, kind: str = "application/json", retry_after: float | None = None) -> web.Response:
    """An answer of these bytes; only an error carries Retry-After."""
    headers = {"Content-Type": kind}
    if retry_after is not None and status != 200:
        headers["Retry-After"] = f"{retry_after:g}"
    return web.Response(status=status, body=data, headers=headers)


def as_json(value: Any) -> web.Response:
    """The answer 200."""
    return page(200, json.dumps(value).encode())


def failed(status: int, message: str | None = None, retry_after: float | None = None) -> web.Response:
    """An error as vLLM answers it."""
    error = {"message": message or f"stub says {status}", "code": status}
    return page(status, json.dumps({"error": error}).encode(), retry_after=retry_after)


@functools.cache
def tokenizer() -> Tokenizer:
    """The pocket verifier's."""
    return Tokenizer.from_file(str(TOKENIZER))


def tokenize(body: dict[str, Any]) -> list[int]:
    """The ids of a `/tokenize` request."""
    if "messages" in body:
        return ids_of(text_of(body))[0]
    return tokenizer().encode(body["prompt"], add_special_tokens=False).ids


def reset(transport: asyncio.Transport | None) -> None:
    """Ends a connection at once: the client sees a reset, bytes on their way are lost."""
    if transport is not None and not transport.is_closing():
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
        transport.abort()


class LoopbackServer:
    """HTTP on the loopback interface in a thread with its own event loop; a context manager.  `url` ends in /v1.

    The port is its own from enter to exit, also while it is away.  Subclasses add to `answer`.
    """

    def __init__(self, port: int = 0, max_model_len: int = 4096) -> None:
        self.max_model_len = max_model_len
        self.model = MODEL  # the name it lists; answers carry MODEL
        self._wanted = port
        self._listener: asyncio.Server | None = None
        self._tokenize: Callable[[dict[str, Any]], list[int] | int] = tokenize

    def __enter__(self) -> Self:
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", self._wanted))
        self._port = int(self._reserved.getsockname()[1])
        self.url = f"http://127.0.0.1:{self._port}/v1"
        self._loop = asyncio.new_event_loop()
        self._server = web.Server(self._dispatch, loop=self._loop, access_log=None, handler_cancellation=True)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.back()
        return self

    def __exit__(self, *_: object) -> None:
        self.away()
        self._call(self._cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._reserved.close()

    async def answer(self, method: str, path: str, data: bytes) -> web.Response | None:
        """What a request gets; None closes its connection without an answer."""
        match method, path:
            case "GET", "/v1/models":
                entry = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
                return as_json({"object": "list", "data": [entry]})
            case "POST", "/tokenize":
                ids = self._tokenize(json.loads(data))
                if isinstance(ids, int):
                    return failed(ids)
                return as_json({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})
        return failed(404, "no such page")

    def away(self) -> None:
        """Stops listening and resets every connection; both have happened when it returns."""
        if threading.current_thread() is self._thread:
            self._leave()
        else:
            self._call(self._left())

    def back(self) -> None:
        """Listens again on the same port; not from a function that the server itself calls."""
        self._call(self._listen())

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = await self._loop.create_server(self._server, "127.0.0.1", self._port, backlog=1024)

    def _leave(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in self._server.connections:
            reset(connection.transport)

    async def _left(self) -> None:
        self._leave()
        await sleep(0)  # asyncio closes the sockets in its next turn

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        data = await request.content.read()
        if self._listener is None:  # accepted just before the server went away
            reset(request.transport)
            return web.Response()
        response = await self.answer(request.method, request.raw_path, data)
        if response is None:
            if request.transport is not None:
                request.transport.close()
            return web.Response()
        return response


class StubServer(LoopbackServer):
    """The server; a context manager.  `url` ends in /v1."""

    def __init__(self, layers: int = 4, hidden: int = 8, max_model_len: int = 4096, port: int = 0) -> None:
        super().__init__(port, max_model_len)
        self.layers, self.hidden = layers, hidden
        self.fp8 = False  # writes files of hs-connectors' fp8 connector
        self.strict_context = False
        self.max_concurrent: int | None = None
        self.peak = 0
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.default = Reply()
        self.metrics: str | None = None
        self.drafts = 0
        self.version: str | None = None
        self.health: int | None = None  # status
        self.paths: list[Path] = []
        self._replies: dict[str, tuple[Reply, ...]] = {}
        self._asked: Counter[str] = Counter()
        self._chat: Callable[[dict[str, Any], int], Reply] | None = None
        self._repeats: Counter[str] = Counter()
        self._running = 0
        self._capture: Callable[[list[int], int], Capture] = lambda tokens, number: Capture()
        self._captures = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="stub-")
        self.storage = Path(self._folder.name).resolve()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._folder.cleanup()

    def on(self, text: str, *replies: Reply) -> None:
        """Successive requests for this prompt get these replies, the last one for ever."""
        self._replies[text] = replies

    def on_chat(self, decide: Callable[[dict[str, Any], int], Reply]) -> None:
        """`decide(body, number of the request among those with equal messages)` says what every chat request gets."""
        self._chat = decide

    def on_capture(self, decide: Callable[[list[int], int], Capture]) -> None:
        """`decide(token ids, number of the request)` says what a hidden-state request gets."""
        self._capture = decide

    def on_tokenize(self, decide: Callable[[dict[str, Any]], list[int] | int]) -> None:
        """`decide(body)` gives the ids of a `/tokenize` request, or the HTTP status that refuses it."""
        self._tokenize = decide

    def asked(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        """The bodies of the requests for `path`, in order of arrival."""
        return [request.body for request in list(self.requests) if request.path == path]

    def hits(self, text: str) -> int:
        """How many chat requests came for this prompt."""
        return sum(text_of(body) == text for body in self.asked())

    def reply(self, body: dict[str, Any]) -> Reply:
        """The next reply for a chat request."""
        text, messages = text_of(body), json.dumps(body["messages"], sort_keys=True)
        with self.lock:
            replies = self._replies.get(text, (self.default,))
            chosen = replies[min(self._asked[text], len(replies) - 1)]
            number = self._repeats[messages]
            self._asked[text] += 1
            self._repeats[messages] += 1
        if self._chat is not None:
            chosen = self._chat(body, number)
        prompt, output = ids_of(text)
        return replace(
            chosen,
            prompt_ids=list(prompt if chosen.prompt_ids is None else chosen.prompt_ids),
            output_ids=list(output if chosen.output_ids is None else chosen.output_ids),
        )

    def capture(self, tokens: list[int], name: str | None = None, kind: str = "cmpl") -> tuple[Capture, Path]:
        """What a hidden-state request gets and the file that belongs to it, called as vLLM calls it."""
        with self.lock:
            number = self._captures
            self._captures += 1
            path = self.storage / (
                f"{kind}-{name}-0-{number:08x}.safetensors" if name else f"{kind}-{number}.safetensors"
            )
            self.paths.append(path)
        return self._capture(tokens, number), path

    def write(self, capture: Capture, tokens: list[int], path: Path) -> None:
        """Writes the file under its lock; the lock is taken here, the writing may come later."""
        lock = path.with_name(path.name + ".lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            if capture.failed:
                return
            data = capture.data
            if data is None:
                held = tokens if capture.tokens is None else capture.tokens
                states = states_of(held, self.layers, self.hidden) if capture.states is None else capture.states
                token_ids = np.asarray(held, dtype=np.int64)
                data = as_fp8(states, token_ids) if self.fp8 else as_native(states, token_ids)
            temporary = path.with_name(path.name + ".tmp")
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            except OSError:  # a full disk; vLLM's writer thread logs it, and the answer was sent before
                temporary.unlink(missing_ok=True)

        async def finish_later() -> None:
            with lock:
                await sleep(capture.write_delay_s)
                finish()

        if capture.write_delay_s:
            asyncio.run_coroutine_threadsafe(finish_later(), self._loop)
        else:
            with lock:
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

    async def answer(self, method: str, path: str, data: bytes) -> web.Response | None:
        request = Request(path, json.loads(data) if method == "POST" else {})
        with self.lock:
            self.requests.append(request)
        match method, path:
            case "POST", "/v1/chat/completions":
                return await self._admit(request.body)
            case "POST", "/v1/completions":
                return await self._extract(request.body)
            case "GET", "/version" if self.version is not None:
                return as_json({"version": self.version})
            case "GET", "/health" if self.health is not None:
                return page(self.health, b"")
            case "GET", "/metrics":
                return page(200, self.metrics_page().encode(), "text/plain; version=0.0.4")
        return await super().answer(method, path, data)

    async def _admit(self, body: dict[str, Any]) -> web.Response | None:
        if self.max_concurrent is not None and self._running >= self.max_concurrent:
            return failed(503, "too many requests at a time")
        self._running += 1
        self.peak = max(self.peak, self._running)
        try:
            return await self._converse(body)
        finally:
            self._running -= 1

    async def _converse(self, body: dict[str, Any]) -> web.Response | None:
        reply = self.reply(body)
        completes = reply.status == 200 and reply.raw is None and not reply.drop
        if self.strict_context and completes:
            budget = body.get("max_completion_tokens", body.get("max_tokens"))
            complaint = _too_long(len(reply.prompt_ids or ()), budget, self.max_model_len)
            if complaint is not None:
                return failed(400, complaint)
            reply = _cut(reply, budget)
        await sleep(reply.delay_s)
        if reply.drop:
            return None
        if reply.raw is not None:
            return page(reply.status, reply.raw[1], reply.raw[0], reply.retry_after)
        if reply.status != 200:
            return failed(reply.status, retry_after=reply.retry_after)
        with self.lock:
            self.drafts += 1
        return as_json(completion(reply) | self._states(body, reply))

    def _states(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        """What an extraction server adds to a chat answer: the states of all tokens but the last, in a file."""
        if not (body.get("kv_transfer_params") or {}).get("include_output_tokens"):
            return {}
        tokens = [*(reply.prompt_ids or ()), *(reply.output_ids or ())][:-1]
        capture, path = self.capture(tokens, body.get("request_id"), "chatcmpl")
        if capture.write:
            self.write(capture, tokens, path)
        named = str(path) if capture.named is None else capture.named
        return {"kv_transfer_params": {"hidden_states_path": named}} if named else {}

    async def _extract(self, body: dict[str, Any]) -> web.Response:
        tokens = list(body["prompt"])
        capture, path = self.capture(tokens, body.get("request_id"))
        await sleep(capture.delay_s)
        if capture.raw is not None:
            return page(capture.status, capture.raw[1], capture.raw[0])
        if capture.status != 200:
            return failed(capture.status)
        if capture.refuses_logprobs and "prompt_logprobs" in body:
            return failed(400, "prompt_logprobs are not supported here")
        if capture.write:
            self.write(capture, tokens, path)
        named = str(path) if capture.named is None else capture.named
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length"}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = logprobs_page(capture.prompt_logprobs)
        answer = {"id": path.stem, "object": "text_completion", "model": MODEL, "choices": [choice]}
        return as_json(answer | ({"kv_transfer_params": {"hidden_states_path": named}} if named else {}))


def _too_long(prompt: int, budget: int | None, limit: int) -> str | None:
    """vLLM's complaint when prompt and answer do not fit into the context."""
    if prompt + (budget or 0) <= limit:
        return None
    return (
        f"This model's maximum context length is {limit} tokens. However, you requested {budget or 0} output tokens "
        f"and your prompt contains {prompt} input tokens, for a total of {prompt + (budget or 0)} tokens. "
        "Please reduce the length of the input prompt or the number of requested output tokens."
    )


def _cut(reply: Reply, budget: int | None) -> Reply:
    """The reply that ends when the budget does."""
    ids = reply.output_ids or ()
    if budget is None or len(ids) <= budget:
        return reply
    return replace(reply, output_ids=ids[:budget], finish_reason="length")
