"""A vLLM (or other OpenAI-compatible) server as the traces and acceptance stages talk to it.

Asks for `return_token_ids`, so nothing needs re-tokenising.  One request is one attempt here; who repeats it, and
how often, is decided in one place (`slipstream.traces.fleet`).  aiohttp instead of the OpenAI client: the client's
2.5 ms of CPU a request would make this process, not the server, the limit above 400 requests/s.
"""

from __future__ import annotations

import errno
import json
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from slipstream.encoding import decode, encode
from slipstream.errors import SlipstreamError, TransientError, is_transient_status
from slipstream.serving import Endpoint, authorization
from slipstream.verifier import THINK_CLOSE

OVERLOADED = frozenset({429, 503})
UNFINISHED = frozenset({"abort", "error"})  # vLLM's finish reasons when the engine gave up on a request
NO_SUCH_PAGE = frozenset({404, 405, 501})
CONNECT_S, PROBE_S = 30.0, 5.0
ASIDE = aiohttp.ClientTimeout(total=60)  # for what takes no generation: tokenizing, listing models
KEEP_ALIVE_S = 4.0  # uvicorn closes an idle connection after 5 s; a request sent into that would be lost

Message = dict[str, Any]


class Refused(SlipstreamError):
    """The server will not answer this request (a 4xx that no repetition changes)."""


class Unreachable(TransientError):
    """The connection failed or broke, or something before the server answered for it; the server may be gone."""


class Overloaded(Unreachable):
    """The server asks for less (429, 503); `retry_after_s` is its wish, if it named one."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Answer:
    """One chat completion.

    `prompt_ids` and `output_ids` are the server's own token ids (None when it gave none), `usage` its counts of
    prompt and output tokens; `thinking` and `answer` its texts, None when it returned none.  `states_file` is the path
    that an extraction server names.
    """

    prompt_ids: tuple[int, ...] | None
    output_ids: tuple[int, ...] | None
    finish_reason: str
    thinking: str | None
    answer: str | None
    tool_calls: tuple[Message, ...] = ()
    usage: tuple[int, int] | None = None
    states_file: str | None = None


def assistant_turn(answer: str | None, thinking: str | None, tool_calls: Sequence[Message]) -> Message:
    """An answer as a message of the history; thinking under both spellings, which servers of either kind read."""
    message: Message = {"role": "assistant", "content": answer or ""}
    if thinking:
        message |= {"reasoning": thinking, "reasoning_content": thinking}
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return message


class Server:
    """One endpoint and the session that talks to it."""

    def __init__(self, endpoint: Endpoint, session: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self._session = session

    async def chat(self, messages: Sequence[Message], tools: Sequence[Message], fields: Mapping[str, Any]) -> Answer:
        """The server's next turn.

        `fields` are OpenAI's and vLLM's request fields (`max_tokens`, `temperature`, `seed`, `top_k`, …).  Raises
        Refused on a permanent 4xx; Overloaded, Unreachable or TransientError on what another attempt may not meet.
        """
        body = {"model": self.endpoint.model, "messages": list(messages), **fields, "return_token_ids": True}
        if tools:
            body["tools"] = list(tools)
        return to_answer(await self._post(f"{self.endpoint.url}/chat/completions", body))

    async def tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        template: Mapping[str, Any],
        generation_prompt: bool = True,
    ) -> list[int] | None:
        """Token ids of a conversation as the server renders it; None when it has no /tokenize for that."""
        body: dict[str, Any] = {"messages": list(messages), "add_generation_prompt": generation_prompt}
        if tools:
            body["tools"] = list(tools)
        if template:
            body["chat_template_kwargs"] = dict(template)
        return await self._tokenize(body)

    async def tokenize_text(self, text: str) -> list[int] | None:
        """Token ids of `text` without anything added; None when the server has no /tokenize."""
        return await self._tokenize({"prompt": text, "add_special_tokens": False})

    async def _tokenize(self, body: dict[str, Any]) -> list[int] | None:
        try:
            page = self.endpoint.url.removesuffix("/v1") + "/tokenize"
            answer = await self._post(page, {"model": self.endpoint.model, **body}, ASIDE)
        except _NoSuchPage:
            return None
        tokens = answer.get("tokens")
        return list(_ids(tokens)) if isinstance(tokens, list) else None

    async def context(self) -> int | None:
        """Tokens of prompt and answer together that the server takes; None when it does not say.

        Raises Refused when it serves another model, TransientError when it does not list its models.
        """
        try:
            async with self._session.get(f"{self.endpoint.url}/models", timeout=ASIDE) as response:
                listed = {entry["id"]: entry for entry in (await response.json())["data"]}
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
            raise TransientError(f"does not list its models ({error!r})") from error
        if self.endpoint.model not in listed:
            raise Refused(f"serves {', '.join(map(str, listed))}, not {self.endpoint.model}")
        limit = listed[self.endpoint.model].get("max_model_len")
        return limit if isinstance(limit, int) and limit > 0 else None

    async def alive(self) -> bool | None:
        """Whether the server answers: False when nobody takes the connection, None when one cannot tell.

        One cannot tell without an answer in time, from a refusal (429, 503), and when this process is out of files.
        """
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_S)
            async with self._session.get(f"{self.endpoint.url}/models", timeout=timeout) as response:
                return None if response.status in OVERLOADED else response.status < 500
        except TimeoutError:
            return None
        except (aiohttp.ClientError, OSError) as error:
            return None if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) else False

    async def _post(
        self, url: str, body: dict[str, Any], timeout: aiohttp.ClientTimeout | None = None
    ) -> dict[str, Any]:
        timeout = timeout or self._session.timeout
        try:
            async with self._session.post(url, data=encode(body), headers=_JSON, timeout=timeout) as response:
                data = await response.read()
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientPayloadError) as error:
            raise Unreachable(f"connection: {type(error).__name__}") from error
        except TimeoutError as error:  # before ClientError: aiohttp's timeouts are both
            raise TransientError("timeout: no answer within request_timeout_s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"connection: {type(error).__name__}") from error
        if response.status != 200:
            raise _failure(response, data)
        try:
            answer = decode(data)
        except ValueError as error:
            raise TransientError(f"malformed: the answer is not JSON ({data[:60]!r})") from error
        if not isinstance(answer, dict):
            raise TransientError(f"malformed: the answer is not a JSON object ({data[:60]!r})")
        return answer


_JSON = {"Content-Type": "application/json"}


class _NoSuchPage(Refused):
    """The address does not exist on this server."""


def _failure(response: aiohttp.ClientResponse, data: bytes) -> SlipstreamError:
    text = data[:500].decode("utf-8", "replace")
    try:
        error = json.loads(data)
        text = str((error.get("error") or error)["message"])
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    reason = f"HTTP {response.status}: {' '.join(text.split())[:300]}"
    if response.status in OVERLOADED:
        wish = response.headers.get("Retry-After", "")
        return Overloaded(reason, float(wish) if wish.replace(".", "", 1).isdecimal() else None)
    if response.status >= 500:
        return Unreachable(reason)
    if is_transient_status(response.status):
        return TransientError(reason)
    return _NoSuchPage(reason) if response.status in NO_SUCH_PAGE else Refused(reason)


def session(timeout_s: float) -> aiohttp.ClientSession:
    """A session for the running event loop, to be closed with it; `timeout_s` bounds one request, answer included.

    A key for servers that want one is taken from OPENAI_API_KEY.
    """
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s)),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=authorization(),
    )


Reach = Callable[[Endpoint, aiohttp.ClientSession], Server]


@asynccontextmanager
async def connect(
    endpoints: Sequence[Endpoint], timeout_s: float, reach: Reach = Server
) -> AsyncIterator[list[Server]]:
    """The servers behind `endpoints`, on one `session`; `reach` makes one of another kind than a plain Server."""
    async with session(timeout_s) as opened:
        yield [reach(endpoint, opened) for endpoint in endpoints]


def to_answer(completion: Mapping[str, Any]) -> Answer:
    """A chat completion as an answer; raises TransientError when it is none, or the engine gave up on it.

    Reads both spellings of the thinking text, `reasoning` (new servers) and `reasoning_content` (old ones), and
    splits it off the content where a server without a reasoning parser left it there.
    """
    try:
        choice = completion["choices"][0]
        message = choice["message"]
        finish_reason = str(choice.get("finish_reason"))
        prompt_ids, output_ids = completion.get("prompt_token_ids"), choice.get("token_ids")
        thinking, answer = _text(message.get("reasoning")), _text(message.get("content"))
        if thinking is None:
            thinking = _text(message.get("reasoning_content"))
        tool_calls = tuple({**call, "function": dict(call["function"])} for call in message.get("tool_calls") or ())
        usage = completion.get("usage") or {}
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens")
        made = Answer(
            prompt_ids=_ids(prompt_ids) if prompt_ids else None,
            output_ids=None if output_ids is None else _ids(output_ids),
            finish_reason=finish_reason,
            thinking=thinking,
            answer=answer,
            tool_calls=tool_calls,
            usage=None if counts[0] is None or counts[1] is None else (int(counts[0]), int(counts[1])),
            states_file=_text((completion.get("kv_transfer_params") or {}).get("hidden_states_path")),
        )
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise TransientError(f"malformed: the answer is not a chat completion ({error})") from error
    if finish_reason in UNFINISHED:
        raise TransientError(f"unfinished: the server ended the answer with finish_reason {finish_reason}")
    if made.thinking is None and made.answer is not None and THINK_CLOSE in made.answer:
        thinking, _, answer = made.answer.partition(THINK_CLOSE)
        return replace(made, thinking=thinking, answer=answer)
    return made


def _ids(values: Any) -> tuple[int, ...]:
    """Token ids as they came; raises TypeError or OverflowError unless all are integers of 32 bits."""
    return tuple(array("i", values))


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError("a text that is none")
