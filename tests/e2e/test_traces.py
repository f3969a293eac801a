"""Traces from a real vLLM server: the main field reports of stages S1 to S3 again, on the pocket verifier."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from slipstream import chat, serving
from slipstream.artifact import Artifact
from slipstream.config import RunConfig, load_config
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


def make(
    base: RunConfig, endpoint: Endpoint, folder: Path, lines: Sequence[bytes | dict[str, Any]], **traces: Any
) -> tuple[Artifact, Artifact]:
    """Both stages on these rows; a held-out prompt stands apart, so all rows are traced."""
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
    config = RunConfig.model_validate(values)

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
