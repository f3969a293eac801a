"""States taken while traces are generated, against a stub: every row once, and nothing lost when a file is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file
from stub_server import Capture, Reply, StubServer, ids_of, states_of

from slipstream.artifact import Artifact
from slipstream.config import RunConfig
from slipstream.digest import digest_tokens
from slipstream.errors import InputError
from slipstream.features import extraction, servers, shard_stage, vouched, while_generating
from slipstream.features.lease import Lease
from slipstream.features.pool import FeaturePool
from slipstream.features.recipe import open_pool
from slipstream.features.rows import read_rows
from slipstream.features.shards import Shard
from slipstream.progress import silent
from slipstream.serving import Endpoint
from slipstream.traces import prompt_set, stage

TEXTS = [f"prompt {i}" for i in range(30)]
HIDDEN = 128  # of the pocket verifier
ALL = Shard(index=0, start=0, stop=1000)
NOTHING = {"captured": 0, "captured_tokens": 0, "known": 0, "rejected": 0, "missing": 0, "first_missing": None}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.fixture
def stub() -> Iterator[StubServer]:
    """A stub that writes states as wide as the pocket verifier's."""
    with StubServer(hidden=HIDDEN) as server:
        yield server


def row_of(text: str) -> list[int]:
    """The row of the stub's answer to a prompt: all but the last token."""
    prompt, output = ids_of(text)
    return [*prompt, *output[:-1]]


class Runner:
    """Both stages in one work directory; the stub is an endpoint that the user named for both."""

    def __init__(self, stub: StubServer, make: Callable[..., RunConfig], write: Callable[..., str], root: Path) -> None:
        self.stub, self._make, self._write, self.root = stub, make, write, root
        self.lent = 0

    def config(self, rows: list[Any], features: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
        """A configuration for these rows, in the mode unless `features` says otherwise."""
        named = {
            "traces_endpoints": [self.stub.url],
            "features_endpoints": [self.stub.url],
            "features_storage": str(self.stub.storage),
        }
        mode = {"capture_while_generating": True, "disk_reserve_gib": 0, "probe_samples": 0, **(features or {})}
        prompts = {"sources": [{"path": self._write(rows)}]}
        return self._make(prompts=prompts, servers=named, features=mode, **sections)

    def traces(self, config: RunConfig) -> Artifact:
        """The traces stage as its task runs it."""
        prompts = prompt_set.run(self.root, config.prompts)

        @contextmanager
        def answering(logs: Path) -> Iterator[list[Endpoint]]:
            with while_generating.answering(self.root, config, logs) as endpoints:
                yield endpoints

        with while_generating.taking(self.root, config) as states:
            return stage.run(self.root, config, prompts, answering, silent, states=states)

    @contextmanager
    def lend(self) -> Iterator[Lease]:
        self.lent += 1
        yield Lease(Endpoint(self.stub.url, "stub"), self.stub.storage)

    def features(self, config: RunConfig, traces: Artifact) -> Artifact:
        """The shard of all rows."""
        return shard_stage.capture_shard(self.root, config, traces, ALL, self.lend, silent)

    def pool(self, config: RunConfig) -> FeaturePool:
        """The row pool."""
        return open_pool(self.root, config)

    def files(self) -> list[str]:
        """What is left in the server's folder of what was asked for by name (the question for a first token is not)."""
        return sorted(path.name for path in self.stub.storage.iterdir() if "slipstream" in path.name)


@pytest.fixture
def run(
    stub: StubServer,
    make_config: Callable[..., RunConfig],
    write_prompts: Callable[..., str],
    tmp_path: Path,
    no_pictures: None,
) -> Runner:
    """A runner in the test's own work directory."""
    return Runner(stub, make_config, write_prompts, tmp_path / "work")


def states(traces: Artifact) -> dict[str, Any]:
    """What the manifest says about the answers' states."""
    told: dict[str, Any] = traces.manifest().work["states"]
    return told


def test_each_row_is_taken_with_its_answer_and_the_features_stage_needs_no_server(run: Runner) -> None:
    config = run.config(TEXTS)
    made = run.traces(config)
    rows = list(read_rows(config, made))
    assert states(made) == NOTHING | {"captured": len(rows), "captured_tokens": sum(len(r.token_ids) for r in rows)}
    with closing(run.pool(config)) as pool:
        for row in rows:
            sample = load_file(pool.path(row.key))
            assert sample["token_ids"].tolist() == row.token_ids
            assert np.array_equal(sample["hidden_states"], states_of(row.token_ids, 4, HIDDEN))
    asked = {tuple(row_of(body["messages"][-1]["content"])) for body in run.stub.asked()}
    assert asked == {tuple(row.token_ids) for row in rows}
    shard = run.features(config, made)
    assert run.lent == 0
    assert shard.manifest().counts["samples"] == len(rows)
    assert (shard.manifest().work["captured"], shard.manifest().work["reused"]) == (0, len(rows))
    assert run.files() == []


def test_the_mode_changes_no_trace_and_no_key(
    run: Runner, make_config: Any, write_prompts: Any, tmp_path: Path
) -> None:
    both = {}
    for name, mode in (("with", True), ("without", False)):
        each = Runner(run.stub, make_config, write_prompts, tmp_path / name)
        config = each.config(TEXTS, features={"capture_while_generating": mode})
        made = each.traces(config)
        both[name] = (made.key, made.content, (made.folder / "traces.parquet").read_bytes())
    assert both["with"] == both["without"]
    assert [body for body in run.stub.asked() if "kv_transfer_params" in body]
    sent = [
        {k: v for k, v in body.items() if k not in ("kv_transfer_params", "request_id")} for body in run.stub.asked()
    ]
    half = len(sent) // 2
    assert sorted(map(repr, sent[:half])) == sorted(map(repr, sent[half:]))


def test_traces_made_without_the_mode_are_kept_and_captured_by_prefill(run: Runner) -> None:
    plain = run.traces(run.config(TEXTS, features={"capture_while_generating": False}))
    config = run.config(TEXTS)
    asked = len(run.stub.asked())
    made = run.traces(config)
    assert (made.key, len(run.stub.asked())) == (plain.key, asked)
    shard = run.features(config, made)
    assert shard.manifest().work["captured"] == shard.manifest().counts["samples"] > 0
    assert run.lent == 1


FAULTS: dict[str, tuple[Callable[[list[int]], Capture], str]] = {
    "other tokens": (lambda tokens: Capture(tokens=[7, *tokens[1:]]), "other tokens"),
    "one token more": (lambda tokens: Capture(tokens=[*tokens, 1]), "other tokens"),
    "states of the prompt alone": (
        lambda tokens: Capture(states=states_of(tokens[:3], 4, HIDDEN)),
        "shape [3, 4, 128]",
    ),
    "not a number": (lambda tokens: Capture(states=np.full((len(tokens), 4, HIDDEN), np.nan, "f4")), "NaN"),
    "half a file": (lambda tokens: Capture(data=b"\x10\x00\x00"), "not a hidden-state file"),
    "no file": (lambda tokens: Capture(failed=True), "its writer ended without the file"),
    "no name": (lambda tokens: Capture(named="", write=False), "it is not an extraction server"),
    "a foreign name": (lambda tokens: Capture(named="/etc/passwd", write=False), "outside its storage folder"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_whose_file_is_bad_is_captured_by_prefill(run: Runner, fault: str) -> None:
    capture, reason = FAULTS[fault]
    config = run.config(TEXTS)
    texts = {tuple(row_of(text)): text for text in TEXTS}
    struck: list[list[int]] = []

    def decide(tokens: list[int], number: int) -> Capture:
        if not struck and tuple(tokens) in texts:
            struck.append(tokens)
            return capture(tokens)
        return Capture()

    run.stub.on_capture(decide)
    made = run.traces(config)
    rows = list(read_rows(config, made))
    told = states(made)
    assert (told["captured"], told["missing"], told["rejected"]) == (len(rows) - 1, 1, 0)
    assert reason in told["first_missing"]
    assert made.manifest().work["failed"] == 0
    with closing(run.pool(config)) as pool:
        assert pool.find(struck[0]) is None
        shard = run.features(config, made)
        assert (shard.manifest().work["captured"], shard.manifest().counts["samples"]) == (1, len(rows))
        assert np.array_equal(
            load_file(pool.path(digest_tokens(struck[0])))["hidden_states"], states_of(struck[0], 4, HIDDEN)
        )
    assert run.files() == []


def test_rejected_answers_leave_no_file_and_no_sample(run: Runner) -> None:
    config = run.config(TEXTS, traces={"max_rejected_share": 0.9})
    for text in TEXTS[::2]:
        run.stub.on(text, Reply(thinking=None))  # no_reasoning
    made = run.traces(config)
    rows = list(read_rows(config, made))
    told = states(made)
    assert told["rejected"] == made.manifest().counts["rejected"] > 0
    assert (told["captured"], told["missing"]) == (len(rows), 0)
    with closing(run.pool(config)) as pool:
        for body in run.stub.asked():
            text = body["messages"][-1]["content"]
            known = pool.find(row_of(text))
            assert (known is None) == (text in TEXTS[::2])
    assert run.files() == []


def test_every_turn_of_a_conversation_with_a_tool_call_is_taken(run: Runner) -> None:
    user = {"role": "user", "content": "first"}
    result = {"role": "tool", "name": "add", "content": "5"}
    talk = [user, {"role": "assistant"}, result, {"role": "assistant"}, {"role": "user", "content": "second"}]
    lengths = {1: 4, 3: 6, 5: 8}

    def decide(body: dict[str, Any], number: int) -> Reply:
        turn = len(body["messages"])
        if turn not in lengths:
            return Reply()
        ids = [100 + turn] * lengths[turn]
        called = {"answer": None, "tool_calls": [CALL], "finish_reason": "tool_calls"} if turn == 1 else {}
        return Reply(prompt_ids=ids, output_ids=[20 + turn, 505, 30, 490], **called)

    run.stub.on_chat(decide)
    rows = [
        {"messages": talk, "tools": [TOOL]},
        *({"messages": [*talk[:-1], {**user, "content": text}], "tools": [TOOL]} for text in TEXTS),
    ]
    config = run.config(rows, verifier={"tool_call_parser": "kimi_k2"})
    made = run.traces(config)
    found = list(read_rows(config, made))
    distinct = {row.key for row in found}
    assert len(distinct) == 3
    told = states(made)
    assert (told["captured"] + told["known"], told["missing"]) == (len(found), 0)
    assert {tuple(row.token_ids) for row in found} == {
        (*[100 + turn] * length, 20 + turn, 505, 30) for turn, length in lengths.items()
    }
    with closing(run.pool(config)) as pool:
        assert all(pool.find(row.token_ids) for row in found)
    assert run.files() == []


def test_a_turn_after_a_rejected_one_is_not_taken(run: Runner) -> None:
    talk = [{"role": "user", "content": "first"}, {"role": "assistant"}]
    run.stub.on("first", Reply(thinking=None))
    texts = [f"other {i}" for i in range(20)]
    talks = [{"id": str(i), "messages": [*talk, {"role": "user", "content": f"second {i}"}]} for i in range(5)]
    config = run.config([*talks, *texts], traces={"max_rejected_share": 0.9})
    made = run.traces(config)
    told = states(made)
    assert told["rejected"] == made.manifest().counts["rejected"] >= 2
    assert told["captured"] == made.manifest().counts["train"] + made.manifest().counts["validation"]
    assert run.files() == []


def test_slow_files_do_not_slow_the_generation(run: Runner) -> None:
    """With two requests in flight and a second for each file, waiting for files would take over ten seconds."""
    run.stub.on_capture(lambda tokens, number: Capture(write_delay_s=1.0))
    config = run.config(TEXTS, traces={"concurrency": 2})
    made = run.traces(config)
    chats = [request.at for request in run.stub.requests if request.path == "/v1/chat/completions"]
    assert len(chats) > 18
    assert chats[-1] - chats[0] < 2
    assert states(made)["captured"] == len(chats)


def test_a_row_that_the_pool_has_keeps_its_file(run: Runner) -> None:
    """Manifests vouch for the bytes that are there; another capture of the row may differ in its last bits."""
    config = run.config(TEXTS)
    made = run.traces(config)
    rows = list(read_rows(config, made))
    with closing(run.pool(config)) as pool:
        before = {row.key: pool.path(row.key).stat().st_ino for row in rows}
        for ledger in (run.root / "pool" / "traces").glob("*/rows.sqlite3"):
            with closing(sqlite3.connect(ledger)) as db, db:
                db.execute("DELETE FROM rows")
        (made.folder / "manifest.json").unlink()
        again = run.traces(config)
        assert states(again) == NOTHING | {"known": len(rows)}
        assert before == {row.key: pool.path(row.key).stat().st_ino for row in rows}
    assert run.files() == []


def test_no_probe_has_vouched_for_states_that_come_again(run: Runner) -> None:
    """A sample that was probed is damaged, and its answer is generated once more."""
    config = run.config(TEXTS)
    made = run.traces(config)
    keys = [row.key for row in read_rows(config, made)]
    with closing(run.pool(config)) as pool:
        vouched.vouch(pool.folder, keys)
        pool.path(keys[0]).write_bytes(b"")
        for ledger in (run.root / "pool" / "traces").glob("*/rows.sqlite3"):
            with closing(sqlite3.connect(ledger)) as db, db:
                db.execute("DELETE FROM rows")
        (made.folder / "manifest.json").unlink()
        assert states(run.traces(config))["captured"] == 1
        assert vouched.unprobed(pool.folder, keys) == {keys[0]}


def test_without_room_above_the_reserve_nothing_is_kept(run: Runner) -> None:
    config = run.config(TEXTS, features={"disk_reserve_gib": 1e9})
    made = run.traces(config)
    told = states(made)
    assert (told["captured"], told["missing"]) == (
        0,
        made.manifest().counts["train"] + made.manifest().counts["validation"],
    )
    assert "GiB free" in told["first_missing"]
    assert run.files() == []


def test_endpoints_that_only_generate_are_refused(run: Runner) -> None:
    with pytest.raises(ValidationError, match=r"http://elsewhere/v1 of servers\.traces_endpoints is not among"):
        run._make(
            servers={
                "traces_endpoints": [run.stub.url, "http://elsewhere/v1"],
                "features_endpoints": [run.stub.url],
                "features_storage": "/s",
            },
            features={"capture_while_generating": True},
        )
    run._make(servers={"traces_endpoints": ["http://elsewhere/v1"]})


def test_the_folder_of_named_endpoints_must_be_there(run: Runner, tmp_path: Path) -> None:
    config = run.config(TEXTS)
    moved = config.servers.model_copy(update={"features_storage": str(tmp_path / "nowhere")})
    with pytest.raises(InputError, match="nowhere is no folder here"):
        run.traces(config.model_copy(update={"servers": moved}))


def test_servers_that_also_generate_end_where_a_plain_one_does(run: Runner, tmp_path: Path) -> None:
    """Else an answer that fills the context would be a token longer in this mode."""
    spare = {
        mode: servers.spec(run.config(TEXTS, features={"capture_while_generating": mode}), tmp_path)
        for mode in (True, False)
    }
    assert (spare[True].spare_tokens, spare[False].spare_tokens) == (0, 1)


def test_what_a_killed_run_never_fetched_is_swept_alone(tmp_path: Path) -> None:
    """vLLM names files after the request: `chatcmpl-<request_id>`, newer ones with an index and a suffix."""
    alive, host = extraction.request_name(), extraction.process_name().rpartition("-")[0]
    dead = f"slipstream-{host}-{2**22 + 1}-7"  # above the kernel's largest process id
    swept = [
        f"chatcmpl-{dead}.safetensors",
        f"chatcmpl-{dead}-a2d827a6.safetensors",
        f"cmpl-{dead}-0-a2d827a6.safetensors",
    ]
    kept = [
        f"chatcmpl-{alive}.safetensors",
        "chatcmpl-8c80-a2d827a6.safetensors",
        f"chatcmpl-slipstream-elsewhere-{2**22 + 1}-7.safetensors",
    ]
    for name in (*swept, *kept):
        (tmp_path / name).touch()
        (tmp_path / f"{name}.lock").touch()
    extraction.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, *(f"{name}.lock" for name in kept)])
