"""What an import makes of a store: every row's tensors, the traces, what a run then finds without a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from safetensors.torch import load_file, save_file
from stub_server import Capture, StubServer

from slipstream.artifact import Artifact, quarantine
from slipstream.config import RunConfig
from slipstream.digest import digest_tokens
from slipstream.errors import InputError, StageFailed
from slipstream.features import reference, shard_stage, vouched
from slipstream.features import store as features_store
from slipstream.features.lease import Lease
from slipstream.features.recipe import open_pool
from slipstream.features.rows import plan_shards
from slipstream.imports import stage
from slipstream.imports.measure import Said
from slipstream.imports.stage import Imported
from slipstream.plan import plan
from slipstream.progress import Progress, silent
from slipstream.serving import Endpoint
from slipstream.traces import stage as traces_stage
from tests.unit.imports.conftest import FINAL, WANTED, Made, write_current, write_v1

OFFLINE = Said(convention="output", probe=False)
TODAY = Said(layer_ids=WANTED, convention="vllm", probe=False)
Make = Callable[..., RunConfig]


def by_tokens(features: Path) -> dict[tuple[int, ...], tuple[dict[str, torch.Tensor], list[int]]]:
    """Tensors and mask of every row of a features folder, by its tokens."""
    found = {}
    for number, row in enumerate(datasets.load_from_disk(str(features))):
        held = load_file(features / "hidden_states" / f"hs_{number}.safetensors")
        assert held["token_ids"].tolist() == row["input_ids"].tolist()
        found[tuple(row["input_ids"].tolist())] = (held, row["loss_mask"].tolist())
    return found


def run(config: RunConfig, store: Path, said: Said) -> Imported:
    return stage.run(config.root, config, store, said)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_v1_store_row_by_row(
    tmp_path: Path, rows: list[Made], make_config: Make, contents: Callable[..., object], stacked: bool
) -> None:
    store = write_v1(tmp_path / "v1", rows, stacked=stacked)
    before, config = contents(store), make_config()
    made = run(config, store, OFFLINE)
    found = by_tokens(made.features.folder)
    assert len(found) == len(rows)
    for row in rows:
        held, mask = found[tuple(row.ids)]
        assert torch.equal(held["hidden_states"], row.layers(WANTED))
        assert mask == row.mask
    assert contents(store) == before
    assert made.features.verify(deep=True) == made.traces.verify(deep=True) == []
    recipe = made.features.manifest().recipe
    assert (recipe["final_state"], recipe["layer_ids"]) == ("before the final norm", WANTED)
    assert not list((config.root / "pool" / "features" / "incoming").iterdir())


def test_the_traces_of_a_store(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    odd = replace(rows[0], mask=[0] * 20 + [1] * 3 + [0] * 4 + [1] * (len(rows[0].ids) - 27))  # two turns in one row
    config = make_config()
    made = run(config, write_v1(tmp_path / "v1", [odd, *rows[1:]]), OFFLINE)
    table = pq.read_table(made.traces.folder / "traces.parquet").to_pylist()
    assert [row["split"] for row in table] == sorted(row["split"] for row in table)
    assert {row["ids"] for row in table} == {"imported"}
    assert {row["split"] for row in table} == {"train", "validation"}
    for row in table:
        (source,) = [one for one in [odd, *rows[1:]] if one.ids == row["input_ids"]]
        assert row["loss_mask"] == source.mask
        assert row["prompt_tokens"] == source.mask.index(1)
    manifest = made.traces.manifest()
    assert manifest.counts["supervised_tokens"] == sum(odd.mask) + sum(sum(row.mask) for row in rows[1:])
    assert manifest.origin["store"] == str(tmp_path / "v1")
    assert (manifest.origin["convention"], manifest.origin["measured_by"]) == ("output", "own text")


def test_a_row_stays_in_its_split_when_others_come(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    def splits(made: Imported) -> dict[str, str]:
        table = pq.read_table(made.traces.folder / "traces.parquet", columns=["key", "split"]).to_pylist()
        return {row["key"]: row["split"] for row in table}

    config = make_config(prompts={"val_ratio": 0.5})
    few = splits(run(config, write_v1(tmp_path / "few", rows[:6]), OFFLINE))
    many = splits(run(config, write_v1(tmp_path / "many", rows), OFFLINE))
    assert many.items() >= few.items()


def test_two_answers_to_one_prompt_share_a_split(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    cut = [replace(row, ids=row.ids[:-n], mask=row.mask[:-n], states=row.states[:-n]) for row in rows for n in (1, 2)]
    config = make_config(prompts={"val_ratio": 0.5})
    made = run(config, write_v1(tmp_path / "v1", [*rows, *cut]), OFFLINE)
    places: dict[tuple[int, ...], set[str]] = {}
    for row in pq.read_table(made.traces.folder / "traces.parquet").to_pylist():
        places.setdefault(tuple(row["input_ids"][: row["prompt_tokens"]]), set()).add(row["split"])
    assert len(places) == len(rows)
    assert all(len(found) == 1 for found in places.values())
    assert made.features.manifest().counts["rows"] == 36


def test_todays_store_stays_whole_whatever_becomes_of_the_pool(
    tmp_path: Path, rows: list[Made], make_config: Make, contents: Callable[..., object]
) -> None:
    """The work directory's files are its own: a damaged one is emptied under every name that it has."""
    store = write_current(tmp_path / "work" / "theirs", rows)  # beside the pool, where a hard link would be possible
    before, config = contents(store), make_config(workdir=str(tmp_path / "work"))
    made = run(config, store, TODAY)
    found = by_tokens(made.features.folder)
    assert all(torch.equal(found[tuple(row.ids)][0]["hidden_states"], row.layers(WANTED)) for row in rows)
    sample = made.features.folder / "hidden_states" / "hs_0.safetensors"
    spoiled = bytearray(sample.read_bytes())
    spoiled[-1] ^= 1
    sample.write_bytes(spoiled)
    quarantine(made.features.folder, made.features.verify(deep=True))
    assert sample.stat().st_size == 0
    assert contents(store) == before


def test_a_flipped_byte_in_a_store_of_ours_is_found(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    ours = run(make_config(), write_v1(tmp_path / "v1", rows), OFFLINE).features.folder
    sample = ours / "hidden_states" / "hs_3.safetensors"
    spoiled = bytearray(sample.read_bytes())
    spoiled[-1] ^= 1
    sample.write_bytes(spoiled)
    config = make_config(workdir=str(tmp_path / "other"), features={"max_lost_share": 0.2})
    made = run(config, ours, Said(probe=False))
    (reject,) = [json.loads(line) for line in (made.traces.folder / "rejects.jsonl").read_text().splitlines()]
    assert reject["file"] == str(sample)
    assert reject["reason"].startswith("checksum ")
    assert made.features.manifest().counts["rows"] == len(rows) - 1
    (dataset,) = ours.glob("*.arrow")
    spoiled = bytearray(dataset.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    dataset.write_bytes(spoiled)
    with pytest.raises(InputError, match=r"\.arrow: checksum .* instead of "):
        run(config, ours, Said(probe=False))


def test_what_a_failed_probe_left_is_replaced(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    """Its tokens are those of the store, its states nobody's."""
    config = make_config()
    bad, written = rows[0], tmp_path / "bad.safetensors"
    save_file({"hidden_states": bad.layers([2, 3, 5, 5]), "token_ids": torch.tensor(bad.ids)}, written)
    with closing(open_pool(config.root, config)) as pool:
        pool.add(bad.ids, written)
        vouched.doubt(pool.folder, [digest_tokens(bad.ids)])
    made = run(config, write_current(tmp_path / "store", rows), TODAY)
    held, _ = by_tokens(made.features.folder)[tuple(bad.ids)]
    assert torch.equal(held["hidden_states"], bad.layers(WANTED))
    assert made.adopted == len(rows)


def test_no_room_for_the_copies(
    tmp_path: Path, rows: list[Made], make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, store = make_config(), write_current(tmp_path / "store", rows)
    needed = sum(len(row.ids) for row in rows) * 4 * 128 * 4
    monkeypatch.setattr(stage, "free_bytes", lambda path: needed - 1)
    with pytest.raises(InputError, match="are copied into"):
        run(config, store, TODAY)
    assert not list(config.root.rglob("*.safetensors"))
    monkeypatch.setattr(stage, "free_bytes", lambda path: needed)
    assert run(config, store, TODAY).adopted == len(rows)


def test_a_store_of_more_layers(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    every = list(range(FINAL + 1))
    config = make_config()
    made = run(config, write_current(tmp_path / "store", rows, every), replace(TODAY, layer_ids=every))
    found = by_tokens(made.features.folder)
    assert all(torch.equal(found[tuple(row.ids)][0]["hidden_states"], row.layers(WANTED)) for row in rows)


def test_a_float8_store(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    store = write_current(tmp_path / "store", rows)
    for i, row in enumerate(rows):
        codes, scales = quantize_tensor_to_fp8(row.layers(WANTED))
        held = {"hidden_states": codes, "hidden_states_scales": scales, "token_ids": torch.tensor(row.ids)}
        save_file(held, store / "hidden_states" / f"hs_{i}.safetensors")
    made = run(make_config(features={"store": "fp8"}), store, TODAY)
    found = by_tokens(made.features.folder)
    for row in rows:
        codes, scales = quantize_tensor_to_fp8(row.layers(WANTED))
        held, _ = found[tuple(row.ids)]
        assert torch.equal(held["hidden_states"].float(), codes.float())
        assert torch.equal(held["hidden_states_scales"], scales)
    with pytest.raises(InputError, match=r"type float8_e4m3fn, .* want float32"):
        run(make_config(), store, TODAY)


@pytest.mark.parametrize("said", [None, "after"])
def test_a_store_after_the_final_norm(tmp_path: Path, rows: list[Made], make_config: Make, said: str | None) -> None:
    config = make_config()
    made = run(config, write_v1(tmp_path / "v1", rows, normed=True), replace(OFFLINE, final_state=said))
    assert made.features.manifest().recipe["final_state"] == "after the final norm"
    found = by_tokens(made.features.folder)
    assert all(torch.equal(found[tuple(row.ids)][0]["hidden_states"][:, -1], row.normed) for row in rows)
    before = run(config, write_v1(tmp_path / "before", rows), OFFLINE)
    assert before.features.key != made.features.key


def continued(config: RunConfig, made: Imported) -> Artifact:
    """The stages of a run up to the features, with a server that must not be asked for."""
    taking = config.model_copy(update={"traces": config.traces.model_copy(update={"imported": made.traces.path})})
    prompts = Artifact(path="", stage="prompts", key="", content="", parts={"traced": "x"})

    @contextmanager
    def lend() -> Iterator[Lease]:
        pytest.fail("a server was started")
        yield

    traces = traces_stage.run(config.root, taking, prompts, lambda logs: pytest.fail("asked"), silent)
    planned = plan_shards(taking, traces)
    shards = [shard_stage.capture_shard(config.root, taking, traces, shard, lend, silent) for shard in planned]
    return features_store.assemble(config.root, taking, traces, shards)


@pytest.mark.parametrize("normed", [False, True])
def test_a_run_goes_on_without_a_server(tmp_path: Path, rows: list[Made], make_config: Make, normed: bool) -> None:
    config = make_config(features={"shards": 3})
    made = run(config, write_v1(tmp_path / "v1", rows, normed=normed), OFFLINE)
    assert continued(config, made) == made.features
    assert continued(make_config(features={"shards": 2}), made).content == made.features.content


def test_a_run_of_imported_rows_is_planned_with_their_tokens(
    tmp_path: Path, rows: list[Made], make_config: Make, write_prompts: Callable[..., str]
) -> None:
    prompts = {"sources": [{"path": write_prompts([f"p {i}" for i in range(40)])}]}
    config = make_config(prompts=prompts)
    made = run(config, write_v1(tmp_path / "v1", rows), OFFLINE)
    planned = plan(make_config(prompts=prompts, traces={"imported": made.traces.path}))
    assert planned["tokens"] == sum(len(row.ids) for row in rows)
    assert (planned["hours"]["traces"], planned["hours"]["features"]) == (0, 0)
    assert not reference.wanted(make_config(traces={"imported": made.traces.path}))


def test_a_damaged_sample_after_the_norm_is_not_captured(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    config = make_config()
    made = run(config, write_v1(tmp_path / "v1", rows, normed=True), OFFLINE)
    (made.features.folder / "hidden_states" / "hs_3.safetensors").write_bytes(b"")
    with pytest.raises(StageFailed, match=f"1 of 12 samples .* import the store {tmp_path / 'v1'} again"):
        continued(config, made)
    again = run(config, tmp_path / "v1", OFFLINE)
    assert (again.adopted, again.features) == (1, made.features)
    assert again.features.verify(deep=True) == []


def test_again_it_does_nothing(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    config, store = make_config(), write_v1(tmp_path / "v1", rows)
    first = run(config, store, OFFLINE)
    again = run(config, store, OFFLINE)
    assert (again.traces, again.features) == (first.traces, first.features)
    assert (first.adopted, again.adopted) == (12, 0)


def test_repeated_samples_and_second_masks(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    other = replace(rows[0], mask=[0] * (len(rows[0].ids) - 2) + [1, 1])
    silent_row = replace(rows[1], ids=rows[1].ids[:-1], mask=[0] * (len(rows[1].ids) - 1), states=rows[1].states[:-1])
    store = write_v1(tmp_path / "v1", [*rows, rows[3], other, silent_row])
    made = run(make_config(), store, OFFLINE)
    table = pq.read_table(made.traces.folder / "traces.parquet").to_pylist()
    assert sorted(row["turn"] for row in table) == [0] * 12 + [1]
    twice = [row["loss_mask"] for row in table if row["input_ids"] == rows[0].ids]
    assert sorted(twice) == sorted([rows[0].mask, other.mask])
    rejects = [json.loads(line) for line in (made.traces.folder / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["file"], reject["reason"]) for reject in rejects] == [
        (str(store / "data_12.pt"), "repeats an earlier sample"),
        (str(store / "data_14.pt"), "no supervised token"),
    ]
    assert (made.traces.manifest().counts["rejected"], made.traces.manifest().counts["left_out"]) == (0, 2)


def spoil(store: Path, row: Made) -> None:
    """Four bad samples: cut short, NaN in one layer, zeros, another width."""
    (store / "data_1.pt").write_bytes((store / "data_1.pt").read_bytes()[:500])
    for number, fault in ((4, "nan"), (6, "zeros"), (8, "width")):
        held = torch.load(store / f"data_{number}.pt")
        if fault == "nan":
            held["hidden_states"][1][3, 7] = float("nan")
        elif fault == "zeros":
            held["hidden_states"][2][0] = 0
        else:
            held["hidden_states"] = [layer[:, :64].contiguous() for layer in held["hidden_states"]]
        torch.save(held, store / f"data_{number}.pt")


def test_bad_samples_are_set_aside_with_file_and_reason(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    store = write_v1(tmp_path / "v1", rows)
    spoil(store, rows[0])
    made = run(make_config(features={"max_lost_share": 0.4}), store, OFFLINE)
    rejects = [json.loads(line) for line in (made.traces.folder / "rejects.jsonl").read_text().splitlines()]
    assert [Path(reject["file"]).name for reject in rejects] == [f"data_{i}.pt" for i in (1, 4, 6, 8)]
    for reject, words in zip(
        rejects,
        ("weights_only", "NaN or infinity at token 3, layer position 1", "only zeros at token 0", "64"),
        strict=True,
    ):
        assert words in reject["reason"]
    assert len(by_tokens(made.features.folder)) == 8


def test_too_many_bad_samples(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    store = write_v1(tmp_path / "v1", rows)
    spoil(store, rows[0])
    with pytest.raises(StageFailed, match=r"4 of 12 .*max_lost_share 0\.3; the first is data_1\.pt"):
        run(make_config(features={"max_lost_share": 0.3}), store, OFFLINE)


def test_progress_is_told_sample_by_sample(tmp_path: Path, rows: list[Made], make_config: Make) -> None:
    told: list[Progress] = []
    config = make_config()
    stage.run(config.root, config, write_v1(tmp_path / "v1", rows), OFFLINE, told.append)
    assert [(now.unit, now.done, now.total) for now in told] == [
        (unit, done, 12) for unit in ("samples read", "samples adopted") for done in range(1, 13)
    ]


class Reference:
    """A server that knows the states of the rows, at the layers it was started with."""

    def __init__(self, stub: StubServer, rows: list[Made], layer_ids: list[int]) -> None:
        self.stub, self.rows, self.layer_ids = stub, rows, layer_ids
        stub.on_capture(self.capture)

    def capture(self, tokens: list[int], number: int) -> Capture:
        found = [row for row in self.rows if row.ids[: len(tokens)] == tokens]
        return Capture(states=found[0].layers(self.layer_ids)[: len(tokens)].numpy()) if found else Capture()

    @contextmanager
    def serve(self, workdir: Path, config: RunConfig) -> Iterator[Lease]:
        yield Lease(Endpoint(self.stub.url, "stub"), self.stub.storage)


@pytest.fixture
def server(stub: StubServer, rows: list[Made], monkeypatch: pytest.MonkeyPatch) -> StubServer:
    """The reference's server of all layers, answered by the stub."""
    monkeypatch.setattr(reference, "serve", Reference(stub, rows, list(range(1, FINAL + 1))).serve)
    monkeypatch.setattr("slipstream.serving.require_environment", lambda servers: None)
    return stub


@pytest.mark.parametrize("normed", [False, True])
def test_a_server_names_the_layers(
    tmp_path: Path, rows: list[Made], make_config: Make, server: StubServer, normed: bool
) -> None:
    store = write_v1(tmp_path / "v1", rows, normed=normed)
    (store / "data_config.json").unlink()
    made = run(make_config(), store, Said())
    assert made.measured.figures["layer_ids"] == WANTED
    assert (made.measured.by, made.measured.final_state) == ("server", "after" if normed else "before")
    origin = made.traces.manifest().origin
    assert origin["measured"]["layer_ids"] == WANTED
    assert max(origin["measured"]["distances"]) < 1e-6
    assert len(by_tokens(made.features.folder)) == 12
    assert len(server.asked("/v1/completions")) == 3


def test_a_bad_sample_is_not_one_to_measure_with(
    tmp_path: Path, rows: list[Made], make_config: Make, server: StubServer
) -> None:
    first = min(range(len(rows)), key=lambda i: digest_tokens(rows[i].ids))
    states = rows[first].states.clone()
    states[0, 3, 7] = float("nan")
    spoiled = [replace(row, states=states) if i == first else row for i, row in enumerate(rows)]
    config = make_config(features={"max_lost_share": 0.2})
    made = run(config, write_current(tmp_path / "store", spoiled), Said(layer_ids=WANTED))
    assert (made.measured.by, made.adopted) == ("server", len(rows) - 1)


def test_a_server_tells_the_convention(tmp_path: Path, rows: list[Made], make_config: Make, server: StubServer) -> None:
    store = write_current(tmp_path / "store", rows)
    assert run(make_config(), store, Said(layer_ids=[1, 2, 4, 5])).measured.convention == "output"
    assert run(make_config(), store, Said(layer_ids=WANTED)).measured.convention == "vllm"


@pytest.mark.parametrize(
    ("layer_ids", "said", "words"),
    [
        ([2, 3, 5], {}, ["last state is id 5, the input of the last layer", "final state is id 6", "[2, 3, 5, 6]"]),
        ([1, 2, 4, 5], {"layer_ids": [1, 2, 4, 5]}, ["last state is id 5", "final state is id 6"]),
        # what v1's data_config.json says of a store that was made under vLLM's convention
        ([1, 2, 4, 5], {"layer_ids": [1, 2, 4, 5], "convention": "output"},
         ["convention 'output'", "position 0 is id 2", "states are those of id 1", "another convention",
          "say --convention vllm"]),
        (WANTED, {"layer_ids": [1, 2, 4, 5], "convention": "vllm"},
         ["convention 'vllm'", "position 0 is id 1", "those of id 2", "say --convention output"]),
        (WANTED, {"layer_ids": [2, 4, 5, 6], "convention": "vllm"},
         ["position 1 is id 4", "those of id 3", "its layers are [2, 3, 5, 6]"]),
        (WANTED, {"final_state": "after"}, ["final state after the final norm", "values are those before it"]),
        ([2, 6, 5, 6], {}, ["layer id 6 is the final state", "auxiliary ones [2, 6, 5]"]),
        ([1, 2, 5, 6], {}, ["[1, 2, 5, 6]", "wants [2, 3, 5]", "[3] are not there"]),
    ],
)  # fmt: skip
def test_a_server_refuses(
    tmp_path: Path,
    rows: list[Made],
    make_config: Make,
    server: StubServer,
    layer_ids: list[int],
    said: dict[str, Any],
    words: list[str],
) -> None:
    config = make_config()
    with pytest.raises(InputError) as caught:
        run(config, write_current(tmp_path / "store", rows, layer_ids), Said(**said))
    assert all(word in str(caught.value) for word in words), caught.value
    assert not list(config.root.rglob("*.safetensors"))
    assert not (config.root / "traces").exists()


def test_a_running_server_is_asked_at_its_own_layers(
    tmp_path: Path, rows: list[Made], make_config: Make, stub: StubServer
) -> None:
    Reference(stub, rows, WANTED)
    config = make_config(servers={"features_endpoints": [stub.url], "features_storage": str(stub.storage)})
    made = run(config, write_current(tmp_path / "store", rows), Said(layer_ids=WANTED))
    assert (made.measured.by, made.measured.figures["layer_ids"]) == ("server", WANTED)
    with pytest.raises(InputError, match="position 0 is none of the states"):
        run(config, write_current(tmp_path / "other", rows, [1, 3, 5, 6]), Said(layer_ids=WANTED))


def test_a_server_of_another_verifier(tmp_path: Path, rows: list[Made], make_config: Make, server: StubServer) -> None:
    generator = np.random.default_rng(0)
    noise = [replace(row, states=torch.from_numpy(generator.normal(size=row.states.shape)).float()) for row in rows]
    with pytest.raises(InputError, match="another verifier"):
        run(make_config(), write_current(tmp_path / "store", noise), Said(layer_ids=WANTED))
