"""One pass over the prompts, against a stub that counts like vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from stub_server import Reply, StubServer, ids_of

from slipstream.acceptance.served import WARM_UP, Measurement, measure
from slipstream.config import AcceptanceConfig, VerifierConfig
from slipstream.errors import ServerError, SlipstreamError
from slipstream.serving import Endpoint
from slipstream.traces.prompts import parse

VERIFIER = VerifierConfig(path="slipstream/pocket/verifier")
TEXTS = [f"prompt {i}" for i in range(12)]


def run(stub: StubServer, **more: Any) -> tuple[Measurement, int]:
    """Measures; also how often progress was told."""
    told: list[None] = []
    config = AcceptanceConfig(**({"max_tokens": 9, "concurrency": 4, "request_timeout_s": 5} | more))
    prompts = [parse({"prompt": text}) for text in TEXTS]
    return measure(Endpoint(stub.url, "stub"), prompts, config, VERIFIER, lambda: told.append(None)), len(told)


def test_counters_are_those_of_this_pass_without_the_warm_up(stub: StubServer) -> None:
    for _ in range(2):
        measured, _ = run(stub)
        assert (measured.counters.drafts, measured.counters.draft_tokens) == (120, 360)
        assert measured.counters.mean_accepted_length == 3.0
    assert stub.drafts == 2 * (12 + WARM_UP)


def test_answers_are_in_prompt_order(stub: StubServer) -> None:
    for i, text in enumerate(TEXTS):
        stub.on(text, Reply(delay_s=0.01 * (i % 3)))
    measured, told = run(stub)
    outputs = [[list(trace.output_ids) for trace in turns] for turns in measured.conversations]
    assert outputs == [[ids_of(text)[1]] for text in TEXTS]
    assert measured.output_tokens == sum(len(ids_of(text)[1]) for text in TEXTS)
    assert told == 12
    assert 0 < measured.seconds < 5


def test_every_request_is_greedy(stub: StubServer) -> None:
    run(stub)
    assert {(body["temperature"], body["max_tokens"]) for body in stub.asked()} == {(0, 9)}


def test_a_server_that_restarted_is_an_error(stub: StubServer) -> None:
    def page() -> str:
        value = 100 - len(stub.asked("/metrics"))
        return f"# TYPE vllm:spec_decode_num_drafts counter\nvllm:spec_decode_num_drafts_total {value}\n"

    stub.metrics_page = page  # type: ignore[method-assign]
    with pytest.raises(ServerError, match="restarted"):
        run(stub)


@pytest.mark.parametrize("reply", [Reply(status=400), Reply(status=503), Reply(drop=True), Reply(with_ids=False)])
@pytest.mark.parametrize("which", [0, 7], ids=["warm-up", "measured"])
def test_a_failed_answer_is_one_error_of_ours(stub: StubServer, reply: Reply, which: int) -> None:
    stub.on(TEXTS[which], reply)
    with pytest.raises(SlipstreamError):
        run(stub)


def test_a_conversation_is_had_turn_by_turn(stub: StubServer) -> None:
    stub.on("u1", Reply(answer="fresh"))
    turns = [
        {"role": "user", "content": "u1"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "u2"},
    ]
    config = AcceptanceConfig(max_tokens=9, concurrency=4, request_timeout_s=5)
    measured = measure(Endpoint(stub.url, "stub"), [parse({"messages": turns})], config, VERIFIER, lambda: None)
    assert [list(trace.output_ids) for trace in measured.conversations[0]] == [ids_of("u1")[1], ids_of("u2")[1]]
    assert [turn["content"] for turn in stub.asked()[-1]["messages"]] == ["u1", "fresh", "u2"]


def test_tools_without_a_parser_are_not_called(stub: StubServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    config = AcceptanceConfig(max_tokens=9, concurrency=4, request_timeout_s=5)
    for parser in (None, "kimi_k2"):
        verifier = VERIFIER.model_copy(update={"tool_call_parser": parser})
        prompts = [parse({"prompt": "x", "tools": [tool]})]
        measure(Endpoint(stub.url, "stub"), prompts, config, verifier, lambda: None)
    assert [body.get("tool_choice") for body in stub.asked()] == ["none", "none", None, None]


def test_a_conversation_ends_where_the_context_does(stub: StubServer) -> None:
    """Context 64: 50 tokens leave room for 14 of the 40 wanted, 64 for none."""
    stub.max_model_len, stub.strict_context = 64, True
    lengths = {"u1": 50, "u2": 64}
    stub.on_tokenize(lambda body: [5] * lengths.get(body["messages"][-1]["content"], 3))
    stub.on_chat(lambda body, number: Reply(prompt_ids=[5] * 50, output_ids=[7] * 4))
    turns = [{"role": "user", "content": "u1"}, {"role": "assistant"}, {"role": "user", "content": "u2"}]
    config = AcceptanceConfig(max_tokens=40, concurrency=4, request_timeout_s=5)
    measured = measure(
        Endpoint(stub.url, "stub"),
        [parse({"messages": turns}), parse({"prompt": "u2"})],
        config,
        VERIFIER,
        lambda: None,
    )
    assert [len(turns) for turns in measured.conversations] == [1, 0]
    assert {body["max_tokens"] for body in stub.asked()} == {14}
