"""One chat request: token ids as the server gave them, and who repeats what how often."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from stub_server import CUT, Reply, StubServer, completion, ids_of

from slipstream import chat
from slipstream.errors import ServerError, TransientError
from slipstream.traces.prompts import parse
from slipstream.traces.trace import Trace


def answer(**changes: Any) -> dict[str, Any]:
    """A completion of the toy vocabulary: the model wrote `he` and `llo`, which would merge into `hello`."""
    given = {"prompt_ids": [1, 2], "output_ids": [4, 6], "thinking": "2+2", "answer": "hello"} | changes
    return completion(Reply(**given))


def ask(stub: StubServer, text: str, attempts: int = 3, timeout_s: float = 20, **sampling: Any) -> Trace:
    """Asks the stub once."""

    async def one() -> Trace:
        async with chat.client(stub.url, timeout_s) as client:
            return await chat.ask(client, "stub", parse({"prompt": text}), sampling, attempts)

    return asyncio.run(one())


def test_both_spellings_make_the_same_row() -> None:
    new, old = answer(spelling="reasoning"), answer(spelling="reasoning_content")
    assert new != old
    assert chat.to_trace("k", new) == chat.to_trace("k", old)
    assert chat.to_trace("k", new).thinking == "2+2"


def test_ids_are_the_servers_own() -> None:
    assert chat.to_trace("k", answer()) == Trace("k", (1, 2), (4, 6), "stop", "2+2", "hello")


def test_an_answer_cut_inside_the_thinking_has_no_text() -> None:
    trace = chat.to_trace("k", answer(answer=None, thinking="half", finish_reason="length"))
    assert (trace.thinking, trace.answer, trace.finish_reason) == ("half", None, "length")


def test_a_null_beside_the_old_spelling() -> None:
    both = answer(spelling="reasoning_content")
    both["choices"][0]["message"]["reasoning"] = None
    assert chat.to_trace("k", both).thinking == "2+2"


def test_no_thinking_at_all_is_none() -> None:
    assert chat.to_trace("k", answer(spelling=None)).thinking is None


def no_ids() -> dict[str, Any]:
    return answer(with_ids=False)


def no_choices() -> dict[str, Any]:
    return answer() | {"choices": []}


def null_output() -> dict[str, Any]:
    broken = answer()
    broken["choices"][0]["token_ids"] = None
    return broken


@pytest.mark.parametrize("broken", [no_ids, no_choices, null_output, dict])
def test_an_answer_without_ids_breaks_the_contract(broken: Callable[[], dict[str, Any]]) -> None:
    with pytest.raises(ServerError, match="return_token_ids"):
        chat.to_trace("k", broken())


def test_the_request(stub: StubServer) -> None:
    trace = ask(stub, "2+2", max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, seed=3)
    prompt, output = ids_of("2+2")
    assert (list(trace.prompt_ids), list(trace.output_ids)) == (prompt, output)
    assert trace.key == parse({"prompt": "2+2"}).key
    assert stub.asked() == [
        {
            "model": "stub",
            "messages": [{"role": "user", "content": "2+2"}],
            "max_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "seed": 3,
            "return_token_ids": True,
        }
    ]


def test_tools_are_sent(stub: StubServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    prompt = parse({"prompt": "x", "tools": [tool]})

    async def one() -> None:
        async with chat.client(stub.url, 20) as client:
            await chat.ask(client, "stub", prompt, {}, 1)

    asyncio.run(one())
    assert stub.asked()[0]["tools"] == [tool]


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_permanent_refusal_is_asked_once(stub: StubServer, status: int) -> None:
    stub.on("A", Reply(status=status))
    with pytest.raises(chat.Refused, match=f"HTTP {status}: .*stub says {status}"):
        ask(stub, "A", attempts=5)
    assert stub.hits("A") == 1


@pytest.mark.usefixtures("no_backoff")
@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_transient_status_is_asked_again(stub: StubServer, status: int) -> None:
    stub.on("B", Reply(status=status), Reply(status=status), Reply(answer="b"))
    assert ask(stub, "B", attempts=3).answer == "b"
    assert stub.hits("B") == 3


@pytest.mark.usefixtures("no_backoff")
def test_a_dropped_connection_is_asked_again(stub: StubServer) -> None:
    stub.on("C", Reply(drop=True), Reply(answer="c"))
    assert ask(stub, "C").answer == "c"
    assert stub.hits("C") == 2


@pytest.mark.usefixtures("no_backoff")
@pytest.mark.parametrize("attempts", [1, 2])
def test_timeouts_hit_the_server_exactly_as_often_as_documented(stub: StubServer, attempts: int) -> None:
    stub.on("D", Reply(delay_s=1))
    with pytest.raises(TransientError, match="Timeout"):
        ask(stub, "D", attempts=attempts, timeout_s=0.2)
    assert stub.hits("D") == attempts


@pytest.mark.usefixtures("no_backoff")
def test_attempts_are_a_bound(stub: StubServer) -> None:
    stub.on("E", Reply(status=503))
    with pytest.raises(TransientError, match="HTTP 503"):
        ask(stub, "E", attempts=4)
    assert stub.hits("E") == 4


@pytest.mark.parametrize(
    "raw", [("text/html", b"<html>proxy</html>"), ("application/json", b'{"choices": ['), ("application/json", b"[]")]
)
def test_an_answer_that_is_no_completion_breaks_the_contract(stub: StubServer, raw: tuple[str, bytes]) -> None:
    stub.on("F", Reply(raw=raw))
    with pytest.raises(ServerError):
        ask(stub, "F", attempts=1)


def test_a_null_content_from_the_wire(stub: StubServer) -> None:
    stub.on("G", CUT)
    trace = ask(stub, "G")
    assert (trace.answer, trace.thinking, trace.output_ids) == (None, "half", (30, 31, 32))


def test_several_loops_in_one_process_and_no_open_client(stub: StubServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [ask(stub, "H").key for _ in range(3)] == [parse({"prompt": "H"}).key] * 3
