"""Traces from a real vLLM server: the main field reports of stages S1 to S3 again, on the pocket verifier."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from slipstream import chat, serving
from slipstream.artifact import Artifact
from slipstream.config import RunConfig, load_config
from slipstream.features import servers, shard_stage, while_generating
from slipstream.features.lease import Lease
from slipstream.features.recipe import open_pool
from slipstream.features.rows import read_rows
from slipstream.features.shards import Shard
from slipstream.pocket import curriculum
from slipstream.progress import silent
from slipstream.serving import Endpoint
from slipstream.traces import prompt_set, stage
from slipstream.traces.prompts import parse
from slipstream.traces.rebuild import rebuild
from slipstream.traces.trace import REBUILT
from tests.conftest import ROOT

pytestmark = [pytest.mark.serve, pytest.mark.timeout(900)]
VERIFIER = ROOT / "slipstream" / "pocket" / "verifier"
THINK_OPEN, THINK_CLOSE, END = 504, 505, 490
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def tasks(count: int, seed: int = 5) -> list[str]:
    """Prompts of the pocket curriculum."""
    return [task.prompt for task in curriculum.generate(count, seed)]


@pytest.fixture(scope="module")
def base() -> RunConfig:
    """The smoke configuration with a tool-call parser."""
    config = load_config(ROOT / "deployments" / "smoke.yaml")
    verifier = config.verifier.model_copy(update={"path": str(VERIFIER), "tool_call_parser": "kimi_k2"})
    python = str(ROOT / config.servers.python)
    servers = config.servers.model_copy(update={"python": python, "start_ahead": False})
    return config.model_copy(update={"verifier": verifier, "servers": servers})


@pytest.fixture(scope="module")
def endpoint(base: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A vLLM server."""
    log = tmp_path_factory.mktemp("traces") / "server.log"
    cache = serving.cache_folder(base.servers, log.parent)
    with serving.serve(base.verifier, base.servers, serving.generation_server(), log, cache) as found:
        yield found


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """transformers' view of the verifier's tokenizer and chat template."""
    return AutoTokenizer.from_pretrained(VERIFIER)


def configured(base: RunConfig, folder: Path, lines: Sequence[bytes | dict[str, Any]], **traces: Any) -> RunConfig:
    """A configuration for these rows; a held-out prompt stands apart, so all rows are traced."""
    folder.mkdir(exist_ok=True)
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (folder / "prompts.jsonl").write_bytes(b"".join(line + b"\n" for line in encoded))
    (folder / "held-out.jsonl").write_text(json.dumps({"prompt": "held out"}) + "\n")
    values = base.model_dump()
    values["workdir"] = str(folder / "work")
    values["prompts"] = {
        "sources": [{"path": str(folder / "prompts.jsonl")}],
        "held_out_sources": [{"path": str(folder / "held-out.jsonl")}],
        "held_out_ratio": 0,
        "val_ratio": 0.3,
        "max_rejected_share": 0.5,
    }
    values["traces"] |= {"max_rejected_share": 0.5, **traces}
    return RunConfig.model_validate(values)


def make(
    base: RunConfig, endpoint: Endpoint, folder: Path, lines: Sequence[bytes | dict[str, Any]], **traces: Any
) -> tuple[Artifact, Artifact]:
    """Both stages on these rows."""
    config = configured(base, folder, lines, **traces)

    @contextmanager
    def servers(logs: Path) -> Iterator[list[Endpoint]]:
        yield [endpoint]

    prompts = prompt_set.run(config.root, config.prompts)
    return prompts, stage.run(config.root, config, prompts, servers, silent)


def rows_of(artifact: Artifact) -> list[dict[str, Any]]:
    """All rows of traces.parquet."""
    rows: list[dict[str, Any]] = pq.read_table(artifact.folder / "traces.parquet").to_pylist()
    return rows


def test_awkward_rows_on_a_real_server(base: RunConfig, endpoint: Endpoint, tokenizer: Any, tmp_path: Path) -> None:
    first, second = tasks(2, seed=9)
    system = {"role": "system", "content": "Be brief."}
    talk = {
        "id": "talk",
        "messages": [
            system,
            {"role": "user", "content": first},
            {"role": "assistant", "content": "OLD ANSWER"},
            {"role": "user", "content": second},
        ],
    }
    too_long = {"id": "long", "prompt": "1 + 2 = 3, " * 200}
    with_tool = {"id": "tool", "prompt": first, "tools": [TOOL]}
    surrogate = rb'{"id":"s2","messages":[{"role":"user","content":"ok \ud800 end"}]}'
    rows = [{"prompt": text} for text in tasks(10)]
    prompts, made = make(base, endpoint, tmp_path, [*rows, talk, too_long, with_tool, surrogate])

    assert [json.loads(line)["id"] for line in (prompts.folder / "rejects.jsonl").open()] == ["s2"]
    rejects = {entry["id"]: entry["reason"] for entry in map(json.loads, (made.folder / "rejects.jsonl").open())}
    count = len(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": too_long["prompt"]}], add_generation_prompt=True, return_dict=False
        )
    )
    assert count > 512
    assert rejects["long"] == f"prompt_too_long: {count} tokens, the server takes 512"

    found = rows_of(made)
    for row in found:
        prompt, output = row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(output)
        assert prompt[-1] == THINK_OPEN
        if row["finish_reason"] == "stop":
            assert row["input_ids"][row["think_end"]] == THINK_CLOSE
            said = tokenizer.decode(output)
            assert said == f"{row['thinking']}</think>{row['answer']}<|im_end|>"
    turns = {row["turn"]: row for row in found if row["key"] == parse(talk).key}
    history = [
        system,
        {"role": "user", "content": first},
        {"role": "assistant", "content": turns[0]["answer"]},
        {"role": "user", "content": second},
    ]
    rendered = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
    assert turns[1]["input_ids"][: turns[1]["prompt_tokens"]] == rendered
    assert "OLD ANSWER" not in tokenizer.decode(turns[1]["input_ids"])
    assert any("add" in tokenizer.decode(row["input_ids"]) for row in found if row["key"] == parse(with_tool).key)
    summary = json.loads((made.folder / "summary.json").read_text())
    assert summary["execution"]["special_tokens"] == "equal"
    assert summary["token_ids"] == {
        "server": len(found) + sum(reason != rejects["long"] for reason in rejects.values())
    }


def test_cut_thinking_stays_open(base: RunConfig, endpoint: Endpoint, tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in tasks(8)]
    _, made = make(base, endpoint, tmp_path, rows, max_tokens=6, max_truncated_share=1.0)
    cut = [row for row in rows_of(made) if row["finish_reason"] == "length"]
    assert len(cut) == 8
    for row in cut:
        output = row["input_ids"][row["prompt_tokens"] :]
        assert len(output) == 6
        assert not {THINK_CLOSE, END} & set(output)
        assert (row["answer"], row["think_end"]) == (None, -1)


def test_a_repeated_sampled_request_is_the_same_request(base: RunConfig, endpoint: Endpoint, tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in tasks(6)]
    hot = {"sampling": [{"temperature": 1.5}], "concurrency": 1, "reasoning": False, "max_truncated_share": 1.0}
    made = [make(base, endpoint, tmp_path / name, rows, max_tokens=48, **hot)[1] for name in ("a", "b")]
    other = make(base, endpoint, tmp_path / "c", rows, max_tokens=48, seed=1, **hot)[1]
    outputs = [[row["input_ids"] for row in rows_of(artifact)] for artifact in (*made, other)]
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]


def test_rows_rebuilt_from_text_are_the_servers(base: RunConfig, endpoint: Endpoint) -> None:
    """Real answers with the ids taken away: rendered again by the server's tokenizer, they are the same ids."""

    async def compare() -> list[bool]:
        same = []
        async with chat.connect([endpoint], 60) as (server,):
            for text in tasks(6):
                messages = [{"role": "user", "content": text}]
                for limit in (128, 5):
                    answer = await server.chat(messages, [], {"max_tokens": limit, "temperature": 0})
                    prompt, output, ids = await rebuild(server, messages, [], {}, answer)
                    same.append((prompt, output, ids) == (answer.prompt_ids, answer.output_ids, REBUILT))
        return same

    assert asyncio.run(compare()) == [True] * 12


def filling(tokenizer: Any, count: int) -> tuple[int, str]:
    """A prompt that repeats itself `count` times, after its length in tokens."""
    text = "1 + 2 = 3, " * count
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    return len(ids), text


def answers_of(workdir: Path) -> list[tuple[Any, ...]]:
    """All answers of a work directory, also rejected ones: key, turn, token ids, whether they were not to think."""
    [ledger] = (workdir / "pool" / "traces").glob("*/rows.sqlite3")
    columns = "key, turn, prompt_ids, output_ids, rest LIKE '%\"thinking\":false%'"
    with closing(sqlite3.connect(ledger)) as db:
        return db.execute(f"SELECT {columns} FROM rows ORDER BY key, turn").fetchall()


def test_states_taken_while_generating_are_those_of_a_prefill(
    base: RunConfig, endpoint: Endpoint, tokenizer: Any, tmp_path: Path
) -> None:
    """An extraction server gives the traces of a plain one, token for token, and with them the states of a prefill."""
    first, second, *plain = tasks(28, seed=11)
    talk = {
        "messages": [{"role": "user", "content": first}, {"role": "assistant"}, {"role": "user", "content": second}]
    }
    full = max((filling(tokenizer, count) for count in range(100)), key=lambda entry: entry[0] * (entry[0] < 508))
    assert 480 < full[0] < 508  # the answer ends with the context of 512
    rows = [{"prompt": text} for text in [*plain, full[1]]] + [talk, {"prompt": second, "tools": [TOOL]}]
    asked = {"sampling": [{"weight": 0.8}, {"weight": 0.2, "thinking": False}], "max_truncated_share": 1.0}
    _, reference = make(base, endpoint, tmp_path / "two", rows, **asked)

    given = configured(base, tmp_path / "one", rows, **asked)
    mode = given.features.model_copy(update={"capture_while_generating": True, "probe_samples": 0})
    config = given.model_copy(update={"features": mode})
    prompts = prompt_set.run(config.root, config.prompts)
    everything, prefilled = Shard(index=0, start=0, stop=1000), tmp_path / "prefilled"
    with while_generating.answering(config.root, config, tmp_path / "logs") as endpoints:
        with while_generating.taking(config.root, config) as states:
            traces = stage.run(config.root, config, prompts, lambda logs: nullcontext(endpoints), silent, states=states)
        storage = servers.storage_folder(config.root, while_generating.LANE)
        left = [path.name for path in storage.iterdir() if "slipstream" in path.name]
        lease = Lease(endpoints[0], storage)
        shard_stage.capture_shard(prefilled, config, traces, everything, lambda: nullcontext(lease), silent)
    assert left == []
    assert not storage.exists()

    assert traces.key == reference.key
    assert (traces.folder / "traces.parquet").read_bytes() == (reference.folder / "traces.parquet").read_bytes()
    answers = answers_of(tmp_path / "one" / "work")
    assert answers == answers_of(tmp_path / "two" / "work")
    assert {bool(no_thinking) for *_, no_thinking in answers} == {True, False}
    assert {turn for _, turn, *_ in answers} == {0, 1}
    found = rows_of(traces)
    assert len(found) >= 20
    assert max(len(row["input_ids"]) for row in found) == 512

    told = traces.manifest().work["states"]
    wanted = {row.key: row.token_ids for row in read_rows(config, traces)}
    assert (told["captured"], told["missing"]) == (len(wanted), 0)
    assert told["rejected"] == traces.manifest().counts["rejected"]

    def no_server() -> Any:
        raise AssertionError("a server was asked for")

    made = shard_stage.capture_shard(config.root, config, traces, everything, no_server, silent)
    assert (made.manifest().counts["samples"], made.manifest().work["captured"]) == (len(found), 0)
    worst = 0.0
    with closing(open_pool(config.root, config)) as one, closing(open_pool(prefilled, config)) as two:
        for key, token_ids in wanted.items():
            ours, theirs = load_file(one.path(key)), load_file(two.path(key))
            assert ours["token_ids"].tolist() == theirs["token_ids"].tolist() == token_ids
            difference = (ours["hidden_states"] - theirs["hidden_states"]).norm(dim=-1)
            worst = max(worst, float((difference / theirs["hidden_states"].norm(dim=-1)).max()))
    assert torch.isfinite(torch.tensor(worst))
    assert worst < 1e-5, worst
