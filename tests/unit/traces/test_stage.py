"""The traces stage against a stub server: bytes, requests, losses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from stub_server import CUT, END, THINK_CLOSE, Reply, StubServer, ids_of

from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.errors import ServerError, StageFailed
from slipstream.progress import Progress, silent
from slipstream.serving import Endpoint
from slipstream.traces import prompt_set, stage
from slipstream.traces.pool import TracePool
from slipstream.traces.prompts import parse

TEXTS = [f"prompt {i}" for i in range(30)]
pytestmark = pytest.mark.usefixtures("no_backoff")


class Runner:
    """Runs prompts and traces in one work directory against one stub."""

    def __init__(self, stub: StubServer, make: Callable[..., RunConfig], write: Callable[..., str], root: Path) -> None:
        self.stub, self._make, self._write, self.root = stub, make, write, root
        self.entered = 0
        self.replicas: list[StubServer] = []

    @contextmanager
    def servers(self, logs: Path) -> Iterator[Sequence[Endpoint]]:
        """The stub and its further replicas."""
        self.entered += 1
        yield [Endpoint(server.url, "stub") for server in (self.stub, *self.replicas)]

    def config(self, rows: list[Any], **traces: Any) -> RunConfig:
        """A configuration for these rows."""
        return self._make(prompts={"sources": [self._write(rows)]}, traces=traces)

    def prompts(self, rows: list[Any]) -> Artifact:
        """The prompt set of these rows."""
        return prompt_set.run(self.root, self.config(rows).prompts)

    def __call__(self, rows: list[Any], report: Callable[[Progress], None] = silent, **traces: Any) -> Artifact:
        config = self.config(rows, **traces)
        return stage.run(self.root, config, prompt_set.run(self.root, config.prompts), self.servers, report)

    def at(self, root: Path) -> Runner:
        """The same in another work directory."""
        return Runner(self.stub, self._make, self._write, root)


@pytest.fixture
def run(
    stub: StubServer, make_config: Callable[..., RunConfig], write_prompts: Callable[..., str], tmp_path: Path
) -> Runner:
    """A runner in the test's own work directory."""
    return Runner(stub, make_config, write_prompts, tmp_path / "work")


def traced(run: Runner, rows: list[Any]) -> list[str]:
    """The texts that are traced (train and validation), in the artifact's order."""
    made = run.prompts(rows)
    parts = [prompt_set.load(made, part) for part in ("train", "validation")]
    return [prompt.messages[-1]["content"] for part in parts for prompt in part]


def rows_of(artifact: Artifact) -> list[dict[str, Any]]:
    """All rows of traces.parquet."""
    return pq.read_table(artifact.folder / "traces.parquet").to_pylist()


def rejects_of(folder: Path) -> list[dict[str, Any]]:
    """All rows of rejects.jsonl."""
    return [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]


def test_rows_are_what_the_server_said(run: Runner) -> None:
    made = run(TEXTS)
    expected = []
    for text in traced(run, TEXTS):
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
    assert asked == set(traced(run, TEXTS))
    assert len(run.stub.asked()) == len(asked) < len(TEXTS)


def test_bytes_do_not_depend_on_the_order_of_arrival(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, arrived = [], []
    add = TracePool.add
    for seed in (1, 2):
        order: list[str] = []
        monkeypatch.setattr(TracePool, "add", lambda pool, trace, o=order: (o.append(trace.key), add(pool, trace)))
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
    more = next(text for text in map("extra {}".format, range(99)) if text in traced(run, [*TEXTS, text]))
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
    refused = traced(run, TEXTS)[5]
    run.stub.on(refused, Reply(status=400))
    made = run(TEXTS)
    rejects = rejects_of(made.folder)
    assert [row["key"] for row in rejects] == [parse({"prompt": refused}).key]
    assert "HTTP 400" in rejects[0]["reason"]
    assert run.stub.hits(refused) == 1
    assert len(rows_of(made)) == len(traced(run, TEXTS)) - 1


def test_losses_above_the_limit_fail_and_lose_nothing(run: Runner) -> None:
    every = traced(run, TEXTS)
    refused = every[:4]
    for text in refused:
        run.stub.on(text, Reply(status=400), Reply())
    first = min(parse({"prompt": text}).key for text in refused)
    with pytest.raises(StageFailed, match=rf"4 of {len(every)} prompts .* first is {first} \(.*HTTP 400") as caught:
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
    with pytest.raises(StageFailed, match="no_reasoning"):
        run(TEXTS)
    assert len(rows_of(run(TEXTS, reasoning=False))) == len(traced(run, TEXTS))


def test_cut_answers_stay_open_and_are_counted(run: Runner) -> None:
    cut = traced(run, TEXTS)[:3]
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
    every = traced(run, TEXTS)
    run.stub.on(every[0], Reply(answer="half \ud83d"))
    kept = [row["key"] for row in rows_of(run(TEXTS))]
    assert set(kept) >= {parse({"prompt": text}).key for text in every[1:]}


@pytest.mark.parametrize("reply", [Reply(with_ids=False), Reply(raw=("text/html", b"<p>proxy</p>"))])
def test_a_server_that_breaks_the_contract_is_one_error(run: Runner, reply: Reply) -> None:
    run.stub.default = reply
    with pytest.raises(ServerError):
        run(TEXTS)


def test_progress_counts_every_prompt(run: Runner) -> None:
    seen: list[Progress] = []
    run(TEXTS, report=seen.append)
    total = len(traced(run, TEXTS))
    assert [(p.done, p.total) for p in seen] == [(i, total) for i in range(1, total + 1)]


def test_sampled_requests_carry_a_seed_of_their_own(run: Runner, tmp_path: Path) -> None:
    run(TEXTS, temperature=0.7)
    first = {body["messages"][-1]["content"]: body["seed"] for body in run.stub.asked()}
    assert len(set(first.values())) == len(first)
    assert all(0 <= seed < 2**31 for seed in first.values())
    run.at(tmp_path / "again")(TEXTS, temperature=0.7)
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
    assert sorted(asked[0] + asked[1]) == sorted(traced(run, TEXTS))
    assert min(map(len, asked)) > len(rows_of(made)) / 4
