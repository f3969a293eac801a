"""One chat request: token ids as the server gave them, and what each failure is called."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from stub_server import CUT, Reply, StubServer, completion, ids_of

from slipstream import chat
from slipstream.chat import Answer
from slipstream.errors import TransientError
from slipstream.serving import Endpoint

ASKED = [{"role": "user", "content": "2+2"}]


def answer(**changes: Any) -> dict[str, Any]:
    """A completion of the toy vocabulary: the model wrote `he` and `llo`, which would merge into `hello`."""
    given = {"prompt_ids": [1, 2], "output_ids": [4, 6], "thinking": "2+2", "answer": "hello"} | changes
    return completion(Reply(**given))


def on(stub: StubServer, use: Callable[[chat.Server], Coroutine[Any, Any, Any]], timeout_s: float = 20) -> Any:
    """What `use` gives, on a loop and a client of its own."""

    async def one() -> Any:
        async with chat.connect([Endpoint(stub.url, "stub")], timeout_s) as (server,):
            return await use(server)

    return asyncio.run(one())


def ask(stub: StubServer, text: str, timeout_s: float = 20, **fields: Any) -> Answer:
    """Asks the stub once."""
    messages = [{"role": "user", "content": text}]
    made: Answer = on(stub, lambda server: server.chat(messages, [], fields), timeout_s)
    return made


def test_both_spellings_make_the_same_answer() -> None:
    new, old = answer(spelling="reasoning"), answer(spelling="reasoning_content")
    assert new != old
    assert chat.to_answer(new) == chat.to_answer(old)
    assert chat.to_answer(new).thinking == "2+2"


def test_ids_are_the_servers_own() -> None:
    assert chat.to_answer(answer()) == Answer((1, 2), (4, 6), "stop", "2+2", "hello", usage=(2, 2))


def test_an_answer_cut_inside_the_thinking_has_no_text() -> None:
    got = chat.to_answer(answer(answer=None, thinking="half", finish_reason="length"))
    assert (got.thinking, got.answer, got.finish_reason) == ("half", None, "length")


def test_a_null_beside_the_old_spelling() -> None:
    both = answer(spelling="reasoning_content")
    both["choices"][0]["message"]["reasoning"] = None
    assert chat.to_answer(both).thinking == "2+2"


def test_no_thinking_at_all_is_none() -> None:
    assert chat.to_answer(answer(spelling=None)).thinking is None


def test_thinking_left_in_the_content_is_split_off() -> None:
    got = chat.to_answer(answer(spelling=None, answer="so</think>4"))
    assert (got.thinking, got.answer) == ("so", "4")


def test_an_answer_without_ids_says_so() -> None:
    got = chat.to_answer(answer(with_ids=False))
    assert (got.prompt_ids, got.output_ids, got.usage) == (None, None, (2, 2))


@pytest.mark.parametrize("broken", [{}, {"choices": []}, {"choices": [None]}, {"choices": [{"message": None}]}])
def test_what_is_no_completion_is_malformed(broken: dict[str, Any]) -> None:
    with pytest.raises(TransientError, match="malformed"):
        chat.to_answer(broken)


@pytest.mark.parametrize(
    "field",
    [
        {"token_ids": ["token_id:5"]},
        {"token_ids": [2**40]},
        {"token_ids": [1.5]},
        {"message": {"content": [{"type": "text"}]}},
        {"message": {"content": "a", "tool_calls": ["x"]}},
        {"message": {"content": "a", "tool_calls": [{"function": None}]}},
    ],
)
def test_fields_of_another_type_are_malformed(field: dict[str, Any]) -> None:
    broken = answer()
    broken["choices"][0] |= field
    with pytest.raises(TransientError, match="malformed"):
        chat.to_answer(broken)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_gave_up_is_asked_again(reason: str) -> None:
    with pytest.raises(TransientError, match=reason):
        chat.to_answer(answer(finish_reason=reason))


def test_the_request(stub: StubServer) -> None:
    got = ask(stub, "2+2", max_tokens=5, temperature=0.5, top_p=0.9, top_k=7, seed=3)
    prompt, output = ids_of("2+2")
    assert (list(got.prompt_ids or ()), list(got.output_ids or ())) == (prompt, output)
    assert stub.asked() == [
        {
            "model": "stub",
            "messages": ASKED,
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
    on(stub, lambda server: server.chat(ASKED, [tool], {}))
    assert stub.asked()[0]["tools"] == [tool]


def test_a_key_comes_from_the_environment(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str | None] = []
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    make = chat.aiohttp.ClientSession
    monkeypatch.setattr(
        chat.aiohttp, "ClientSession", lambda **more: sent.append(more["headers"].get("Authorization")) or make(**more)
    )
    ask(stub, "2+2")
    assert sent == ["Bearer secret"]


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_permanent_refusal(stub: StubServer, status: int) -> None:
    stub.on("A", Reply(status=status))
    with pytest.raises(chat.Refused, match=f"HTTP {status}: .*stub says {status}"):
        ask(stub, "A")
    assert stub.hits("A") == 1


@pytest.mark.parametrize("status", [408, 409, 425, 500, 502])
def test_a_transient_status_is_one_attempt(stub: StubServer, status: int) -> None:
    stub.on("B", Reply(status=status))
    with pytest.raises(TransientError, match=f"HTTP {status}"):
        ask(stub, "B")
    assert stub.hits("B") == 1


@pytest.mark.parametrize(("status", "wish"), [(429, 7.0), (503, None)])
def test_a_server_that_asks_for_less(stub: StubServer, status: int, wish: float | None) -> None:
    stub.on("B", Reply(status=status, retry_after=wish))
    with pytest.raises(chat.Overloaded) as caught:
        ask(stub, "B")
    assert caught.value.retry_after_s == wish


def test_a_dropped_connection_is_one_attempt(stub: StubServer) -> None:
    stub.on("C", Reply(drop=True))
    with pytest.raises(chat.Unreachable):
        ask(stub, "C")
    assert stub.hits("C") == 1


def test_a_timeout_is_one_attempt(stub: StubServer) -> None:
    stub.on("D", Reply(delay_s=1))
    with pytest.raises(TransientError, match="timeout"):
        ask(stub, "D", timeout_s=0.2)
    assert stub.hits("D") == 1


@pytest.mark.parametrize(
    "raw", [("text/html", b"<html>proxy</html>"), ("application/json", b'{"choices": ['), ("application/json", b"[]")]
)
def test_an_answer_that_is_no_completion(stub: StubServer, raw: tuple[str, bytes]) -> None:
    stub.on("F", Reply(raw=raw))
    with pytest.raises(TransientError, match="malformed"):
        ask(stub, "F")


def test_a_null_content_from_the_wire(stub: StubServer) -> None:
    stub.on("G", CUT)
    got = ask(stub, "G")
    assert (got.answer, got.thinking, got.output_ids) == (None, "half", (30, 31, 32))


def test_several_loops_in_one_process_and_no_open_client(stub: StubServer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [ask(stub, "H").finish_reason for _ in range(3)] == ["stop"] * 3


def test_the_context_is_the_servers(stub: StubServer) -> None:
    assert on(stub, lambda server: server.context()) == stub.max_model_len


def test_tokenizing_as_the_server_does(stub: StubServer) -> None:
    assert on(stub, lambda server: server.tokenize_chat(ASKED, [], {})) == ids_of("2+2")[0]
    assert on(stub, lambda server: server.tokenize_text("</think><|im_end|>")) == [505, 490]


def test_a_server_without_tokenize_is_none(stub: StubServer) -> None:
    stub.on_tokenize(lambda body: 404)
    assert on(stub, lambda server: server.tokenize_text("a")) is None


def test_alive(stub: StubServer) -> None:
    assert on(stub, lambda server: server.alive())
    stub.away()
    assert not on(stub, lambda server: server.alive())
