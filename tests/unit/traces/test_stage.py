"""The traces stage against a stub server: bytes, requests, losses."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stub_server import CUT, END, THINK_CLOSE, Reply, StubServer, ids_of

from slipstream.errors import InputError, StageFailed, TransientError
from slipstream.progress import Progress
from slipstream.serving import Endpoint
from slipstream.traces.pool import TracePool
from slipstream.traces.prompts import parse
from tests.unit.traces.conftest import Runner, rejects_of, rows_of, summary_of

TEXTS = [f"prompt {i}" for i in range(30)]
pytestmark = pytest.mark.usefixtures("no_backoff")


def test_rows_are_what_the_server_said(run: Runner) -> None:
    made = run(TEXTS)
    expected = []
    for text in run.traced(TEXTS):
        prompt, output = ids_of(text)
        expected.append(
            {
                "key": parse({"prompt": text}).key,
                "input_ids": prompt + output,
                "loss_mask": [0] * len(prompt) + [1] * len(output),
                "prompt_tokens": len(prompt),
                "think_end": (prompt + output).index(THINK_CLOSE),
                "finish_reason": "stop",
                "thinking": "so",
                "answer": "yes",
                "kind": "all",
                "turn": 0,
                "tool_calls": None,
                "sampling": '{"max_tokens": 16, "temperature": 0.0}',
                "ids": "server",
            }
        )
    found = rows_of(made)
    counts = made.manifest().counts
    assert [row.pop("split") for row in found] == ["train"] * counts["train"] + ["validation"] * counts["validation"]
    assert found == expected
    assert counts["tokens"] == sum(len(row["input_ids"]) for row in expected)
    assert counts["supervised_tokens"] == sum(sum(row["loss_mask"]) for row in expected)


def test_held_out_prompts_are_not_asked(run: Runner) -> None:
    run(TEXTS)
    asked = {body["messages"][-1]["content"] for body in run.stub.asked()}
    assert asked == set(run.traced(TEXTS))
    assert len(run.stub.asked()) == len(asked) < len(TEXTS)


def test_bytes_do_not_depend_on_the_order_of_arrival(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, arrived = [], []
    add = TracePool.add
    for seed in (1, 2):
        order: list[str] = []
        monkeypatch.setattr(
            TracePool, "add", lambda pool, *row, o=order, **more: (o.append(row[1].key), add(pool, *row, **more))
        )
        lot = random.Random(seed)
        for text in TEXTS:
            run.stub.on(text, Reply(delay_s=lot.uniform(0, 0.05)))
        made = run.at(tmp_path / f"work{seed}")(TEXTS)
        files.append([(made.folder / name).read_bytes() for name in ("traces.parquet", "rejects.jsonl")])
        arrived.append(order)
    assert arrived[0] != arrived[1]
    assert sorted(arrived[0]) == sorted(arrived[1])
    assert files[0] == files[1]


def test_both_spellings_are_the_same_bytes(run: Runner, tmp_path: Path) -> None:
    files = []
    for spelling in ("reasoning", "reasoning_content"):
        run.stub.default = Reply(spelling=spelling)
        files.append((run.at(tmp_path / spelling)(TEXTS).folder / "traces.parquet").read_bytes())
    assert files[0] == files[1]


def test_a_finished_stage_starts_no_server(run: Runner) -> None:
    first = run(TEXTS)
    assert run(TEXTS) == first
    assert run.entered == 1


def test_reordered_prompts_ask_for_nothing(run: Runner) -> None:
    first = run(TEXTS)
    asked = len(run.stub.asked())
    assert run(TEXTS[::-1]).content == first.content
    assert len(run.stub.asked()) == asked
    assert run.entered == 1


def test_one_more_prompt_is_one_request(run: Runner) -> None:
    run(TEXTS)
    asked = len(run.stub.asked())
    more = next(text for text in map("extra {}".format, range(99)) if text in run.traced([*TEXTS, text]))
    made = run([*TEXTS, more])
    assert [body["messages"][-1]["content"] for body in run.stub.asked()[asked:]] == [more]
    assert made.manifest().work["requested"] == 1
    assert made.manifest().work["reused"] == asked


def test_a_policy_asks_for_nothing_and_a_sampling_asks_for_all(run: Runner) -> None:
    run(TEXTS)
    asked = len(run.stub.asked())
    assert run(TEXTS, keep_truncated=False).manifest().work["requested"] == 0
    run(TEXTS, concurrency=1, request_timeout_s=5)
    assert run.entered == 1
    assert run(TEXTS, max_tokens=17).manifest().work["requested"] == asked


def test_a_damaged_artifact_is_made_again_from_the_pool(run: Runner) -> None:
    first = run(TEXTS)
    data = (first.folder / "traces.parquet").read_bytes()
    (first.folder / "traces.parquet").write_bytes(data[:100])
    assert run(TEXTS) == first
    assert (first.folder / "traces.parquet").read_bytes() == data
    assert run.entered == 1


def test_a_prompt_that_the_server_refuses_is_listed(run: Runner) -> None:
    refused = run.traced(TEXTS)[5]
    run.stub.on(refused, Reply(status=400))
    made = run(TEXTS)
    rejects = rejects_of(made.folder)
    assert [row["key"] for row in rejects] == [parse({"prompt": refused}).key]
    assert "HTTP 400" in rejects[0]["reason"]
    assert run.stub.hits(refused) == 1
    assert len(rows_of(made)) == len(run.traced(TEXTS)) - 1


def test_losses_above_the_limit_fail_and_lose_nothing(run: Runner) -> None:
    every = run.traced(TEXTS)
    refused = every[:4]
    for text in refused:
        run.stub.on(text, Reply(status=400), Reply())
    first = min(parse({"prompt": text}).key for text in refused)
    with pytest.raises(StageFailed, match=rf"4 of {len(every)} have .* first is {first} .*\(HTTP 400") as caught:
        run(TEXTS)
    assert len(str(caught.value).splitlines()) == 1
    asked = len(run.stub.asked())
    made = run(TEXTS)
    again = [body["messages"][-1]["content"] for body in run.stub.asked()[asked:]]
    assert sorted(again) == sorted(refused)
    assert len(rows_of(made)) == len(every)


def test_nothing_accepted_is_a_failure(run: Runner) -> None:
    run.stub.default = Reply(status=400)
    with pytest.raises(StageFailed):
        run(TEXTS, max_rejected_share=0.99)


def test_a_verifier_that_never_thinks_fails(run: Runner) -> None:
    run.stub.default = Reply(spelling=None, output_ids=(7, END))
    with pytest.raises(StageFailed, match=r"no_reasoning.*verifier\.reasoning_parser"):
        run(TEXTS)
    assert len(rows_of(run(TEXTS, reasoning=False))) == len(run.traced(TEXTS))


def test_cut_answers_stay_open_and_are_counted(run: Runner) -> None:
    cut = run.traced(TEXTS)[:3]
    for text in cut:
        run.stub.on(text, CUT)
    made = run(TEXTS)
    assert made.manifest().counts["truncated"] == 3
    found = [row for row in rows_of(made) if row["finish_reason"] == "length"]
    assert [row["input_ids"][row["prompt_tokens"] :] for row in found] == [[30, 31, 32]] * 3
    assert [(row["think_end"], row["answer"], row["thinking"]) for row in found] == [(-1, None, "half")] * 3
    dropped = run(TEXTS, keep_truncated=False, max_rejected_share=0.2)
    assert [row["reason"] for row in rejects_of(dropped.folder)] == ["truncated"] * 3


def test_text_that_is_not_valid_unicode_loses_at_most_its_row(run: Runner) -> None:
    every = run.traced(TEXTS)
    run.stub.on(every[0], Reply(answer="half \ud83d"))
    kept = [row["key"] for row in rows_of(run(TEXTS))]
    assert set(kept) >= {parse({"prompt": text}).key for text in every[1:]}


def test_a_server_that_answers_nonsense_loses_its_prompts(run: Runner) -> None:
    run.stub.default = Reply(raw=("text/html", b"<p>proxy</p>"))
    with pytest.raises(StageFailed, match="malformed"):
        run(TEXTS)


def test_progress_counts_every_prompt(run: Runner) -> None:
    seen: list[Progress] = []
    run(TEXTS, report=seen.append)
    total = len(run.traced(TEXTS))
    assert [(p.done, p.total) for p in seen] == [(i, total) for i in range(1, total + 1)]
    assert seen[-1].figures["failed"] == 0


def test_sampled_requests_carry_a_seed_of_their_own(run: Runner, tmp_path: Path) -> None:
    run(TEXTS, sampling=[{"temperature": 0.7}])
    first = {body["messages"][-1]["content"]: body["seed"] for body in run.stub.asked()}
    assert len(set(first.values())) == len(first)
    assert all(0 <= seed < 2**31 for seed in first.values())
    run.at(tmp_path / "again")(TEXTS, sampling=[{"temperature": 0.7}])
    second = {body["messages"][-1]["content"]: body["seed"] for body in run.stub.asked()[len(first) :]}
    assert second == first


def test_greedy_requests_carry_no_sampling(run: Runner) -> None:
    run(TEXTS)
    assert {key for body in run.stub.asked() for key in body} == {
        "model",
        "messages",
        "max_tokens",
        "temperature",
        "return_token_ids",
    }


def test_replicas_share_the_work(run: Runner) -> None:
    run.stub.default = Reply(delay_s=0.02)
    with StubServer() as second:
        second.default = run.stub.default
        run.replicas.append(second)
        made = run(TEXTS)
        asked = [[body["messages"][-1]["content"] for body in server.asked()] for server in (run.stub, second)]
    assert sorted(asked[0] + asked[1]) == sorted(run.traced(TEXTS))
    assert min(map(len, asked)) > len(rows_of(made)) / 4


def test_changing_one_prompt_costs_one_request(run: Runner) -> None:
    run(TEXTS)
    asked = len(run.stub.asked())
    changed = run.traced(TEXTS)[3]
    made = next(text for text in map("changed {}".format, range(99)) if text in run.traced([*TEXTS, text]))
    rows = [made if text == changed else text for text in TEXTS]
    random.Random(1).shuffle(rows)
    assert run(rows).manifest().work["requested"] == 1
    assert [body["messages"][-1]["content"] for body in run.stub.asked()[asked:]] == [made]


def test_a_failure_is_asked_again_by_the_next_execution_alone(run: Runner) -> None:
    every = run.traced(TEXTS)
    run.stub.on(every[2], Reply(status=500), Reply(status=500), Reply(status=500), Reply())
    first = run(TEXTS)
    assert first.manifest().work["failed"] == 1
    assert [row["reason"] for row in rejects_of(first.folder)] == ["HTTP 500: stub says 500"]
    asked = len(run.stub.asked())
    again = run(TEXTS, keep_truncated=False)  # another artifact over the same pool
    assert [body["messages"][-1]["content"] for body in run.stub.asked()[asked:]] == [every[2]]
    assert len(rows_of(again)) == len(every)


def test_a_reject_names_file_and_row(run: Runner) -> None:
    refused = run.traced(TEXTS)[0]
    run.stub.on(refused, Reply(status=400))
    reject = rejects_of(run(TEXTS).folder)[0]
    assert (Path(reject["file"]).name, reject["row"]) == ("prompts.jsonl", TEXTS.index(refused) + 1)


def test_every_key_ends_in_exactly_one_place(run: Runner) -> None:
    every = run.traced(TEXTS)
    run.stub.on(every[1], Reply(status=400))
    run.stub.on(every[4], Reply(drop=True), Reply(status=503), Reply())
    run.stub.on(every[7], CUT)
    made = run(TEXTS, keep_truncated=False, max_rejected_share=0.2)
    kept = [row["key"] for row in rows_of(made)]
    rejected = [row["key"] for row in rejects_of(made.folder)]
    assert sorted(kept + rejected) == sorted(parse({"prompt": text}).key for text in every)
    assert sorted(rejected) == sorted(parse({"prompt": every[i]}).key for i in (1, 7))


def test_too_many_cut_answers_fail(run: Runner) -> None:
    every = run.traced(TEXTS)
    for text in every[: len(every) * 2 // 3]:
        run.stub.on(text, CUT)
    with pytest.raises(StageFailed, match=r"of the answers were cut by max_tokens 16.*raise traces\.max_tokens"):
        run(TEXTS)
    assert len(rows_of(run(TEXTS, max_truncated_share=0.7))) == len(every)


def test_mass_failure_stops_asking(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.traces.generate.MANY_FAILURES", 5)
    run.stub.default = Reply(status=400)
    with pytest.raises(StageFailed, match="no usable trace"):
        run(TEXTS, concurrency=1)
    assert len(run.stub.asked()) == 6


def test_servers_that_stay_away_are_transient_and_lose_nothing(run: Runner) -> None:
    every = run.traced(TEXTS)
    run.stub.on_chat(lambda body, number: Reply(delay_s=0 if len(run.stub.asked()) < 10 else 30))

    def leave(progress: Progress) -> None:
        if progress.done == 8:
            run.stub.away()

    with pytest.raises(TransientError, match="what was answered is kept"):
        run(TEXTS, report=leave, endpoint_patience_s=1, concurrency=4)
    run.stub.back()
    run.stub.on_chat(lambda body, number: Reply())
    asked = len(run.stub.asked())
    made = run(TEXTS)
    reused = made.manifest().work["reused"]
    assert 8 <= reused < 12
    assert len(run.stub.asked()) - asked == len(every) - reused
    assert len(rows_of(made)) == len(every)


def test_the_summary_counts(run: Runner) -> None:
    every = run.traced(TEXTS)
    run.stub.on(every[0], CUT)
    run.stub.on(every[1], Reply(status=400))
    made = run(TEXTS)
    summary = summary_of(made)
    outputs = [3 if text == every[0] else len(ids_of(text)[1]) for text in every if text != every[1]]
    assert summary["total"]["rows"] == len(every) - 1
    assert summary["total"]["output_tokens"] == sum(outputs)
    assert summary["truncated_answers"] == 1
    assert summary["reasons"] == {"HTTP 400": 1}
    assert summary["token_ids"] == {"server": len(every) - 1}
    assert summary["execution"]["special_tokens"] == "equal"
    assert 0 <= summary["execution"]["throughput"]["client_cpu_share"] <= 1.5


def test_a_mixture_of_sampling_is_recorded_by_row(run: Runner) -> None:
    modes = [
        {"weight": 1, "temperature": 0.6, "reasoning_effort": "low"},
        {"weight": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 20},
    ]
    run(TEXTS, sampling=modes)
    bodies = {body["messages"][-1]["content"]: body for body in run.stub.asked()}
    assert {(body["temperature"], body.get("reasoning_effort"), body.get("top_k")) for body in bodies.values()} == {
        (0.6, "low", -1),
        (1.0, None, 20),
    }


def test_an_answer_without_thinking_where_none_was_asked(run: Runner) -> None:
    run.stub.default = Reply(spelling=None, output_ids=(7, END))
    made = run(TEXTS, sampling=[{"thinking": False}])
    assert len(rows_of(made)) == len(run.traced(TEXTS))
    assert run.stub.asked()[0]["chat_template_kwargs"] == {"thinking": False, "enable_thinking": False}


def test_another_tokenizer_on_the_server_aborts_before_anything_is_asked(run: Runner) -> None:
    run.stub.on_tokenize(lambda body: [1, 2, 3])
    with pytest.raises(InputError, match=r"<think> is 504 in the files and"):
        run(TEXTS)
    assert not run.stub.asked()


def test_a_server_without_tokenizer_endpoint_still_works(run: Runner) -> None:
    run.stub.on_tokenize(lambda body: 404)
    made = run(TEXTS)
    assert len(rows_of(made)) == len(run.traced(TEXTS))
    assert summary_of(made)["execution"]["special_tokens"] == "not told by every server"


def test_what_was_stopped_is_never_finished(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few losses are within the limit of the whole, but most of what was left was not even asked."""
    every = run.traced(TEXTS)
    for text in every[:6]:
        run.stub.on(text, Reply(status=400))
    assert len(rows_of(run(TEXTS, max_rejected_share=0.3))) == len(every) - 6
    monkeypatch.setattr("slipstream.traces.generate.MANY_FAILURES", 0)
    asked = len(run.stub.asked())
    with pytest.raises(StageFailed, match=r"prompts failed, so the rest was not asked; the first is .*HTTP 400"):
        run(TEXTS, max_rejected_share=0.3, keep_truncated=False, concurrency=1)
    assert len(run.stub.asked()) - asked < 6


def test_an_answer_that_cannot_be_recorded_ends_the_stage(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of several answers comes from a timer, where nobody would see it fail."""

    def full(pool: TracePool) -> None:
        raise StageFailed("the ledger cannot be used (database or disk is full)")

    run.stub.default = Reply(delay_s=0.01)
    monkeypatch.setattr(TracePool, "commit", full)
    with pytest.raises(StageFailed, match="disk is full"):
        run(TEXTS, concurrency=2)


def test_turns_after_a_rejected_one_are_rejected(run: Runner) -> None:
    row = {"messages": [{"role": "user", "content": "u1"}, {"role": "assistant"}, {"role": "user", "content": "u2"}]}
    run.stub.on("u1", Reply(answer="leak <think> more"))
    made = run([row, *TEXTS], max_rejected_share=0.3)
    reasons = [(reject["turn"], reject["reason"]) for reject in rejects_of(made.folder)]
    assert reasons == [(0, "leaked_thinking"), (1, "follows_rejected_turn")]
    assert parse(row).key not in {found["key"] for found in rows_of(made)}


def test_a_cut_answer_without_a_parser_is_open_thinking(run: Runner) -> None:
    cut = Reply(answer="half a tho", thinking=None, spelling=None, finish_reason="length", output_ids=(30, 31))
    run.stub.on(run.traced(TEXTS)[0], cut)
    row = next(row for row in rows_of(run(TEXTS)) if row["finish_reason"] == "length")
    assert (row["thinking"], row["answer"]) == ("half a tho", None)


def test_an_endpoint_with_another_model_gets_nothing(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer() as other:
        servers = run.servers

        @contextmanager
        def both(logs: Path) -> Iterator[list[Endpoint]]:
            with servers(logs) as found:
                yield [*found, Endpoint(other.url, "another model")]

        run.servers = both  # type: ignore[method-assign]
        assert len(rows_of(run(TEXTS))) == len(run.traced(TEXTS))
        assert not other.asked()


def test_a_reason_with_half_a_surrogate_pair_loses_one_prompt(run: Runner) -> None:
    body = rb'{"error": {"message": "bad \ud83d here"}}'
    run.stub.on(run.traced(TEXTS)[0], Reply(status=400, raw=("application/json", body)))
    made = run(TEXTS)
    assert [reject["reason"] for reject in rejects_of(made.folder)] == ["HTTP 400: bad ? here"]


def test_a_prompt_too_long_for_a_server_that_came_late(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing could be measured before; the request itself finds that there is no room."""
    monkeypatch.setattr("slipstream.traces.fleet.LOOK_AGAIN_S", 0.05)
    long = run.traced(TEXTS)[0]
    run.stub.max_model_len = 64
    run.stub.on_tokenize(
        lambda body: 404 if "prompt" in body else [5] * (64 if body["messages"][-1]["content"] == long else 3)
    )
    run.stub.away()
    threading.Timer(0.3, run.stub.back).start()
    made = run(TEXTS, endpoint_patience_s=20, max_tokens=48)
    assert [reject["reason"] for reject in rejects_of(made.folder)] == ["prompt_too_long: the server takes 64"]
    assert run.stub.hits(long) == 0
