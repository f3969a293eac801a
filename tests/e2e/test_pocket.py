"""What the full pocket run claims, against transformers, vLLM and the curriculum; deployments/pocket.yaml as it is."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import threading
import time
from contextlib import closing, nullcontext, suppress
from itertools import islice
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from safetensors.torch import load_file

from slipstream import serving
from slipstream.artifact import open_artifact
from slipstream.config import load_config
from slipstream.features import servers, shard_stage
from slipstream.features.recipe import open_pool
from slipstream.features.rows import read_rows
from slipstream.features.shards import Shard
from slipstream.pocket import curriculum
from slipstream.pocket.model import load_text_model
from slipstream.progress import silent
from tests.conftest import ROOT, Run, run

pytestmark = [pytest.mark.serve, pytest.mark.pocket, pytest.mark.timeout(2400)]
VERIFIER = ROOT / "slipstream/pocket/verifier"
IN_MOVED_TO, IN_CREATE = 0x80, 0x100


@pytest.fixture(scope="module")
def latest(pocket_run: Run) -> Path:
    """The run's folder."""
    return pocket_run.workdir / "runs" / "latest"


def _prompts(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "prompts" / f"{split}.jsonl").read_text().splitlines()]


def test_held_out_acceptance_lies_where_a_trained_drafter_lies(pocket_run: Run) -> None:
    report = pocket_run.report
    assert 0.50 <= report["acceptance_rate"] <= 0.90
    assert report["acceptance"]["untrained"]["acceptance_rate"] < 0.10
    assert report["acceptance"]["prompts"] >= 100
    positions = report["acceptance_per_position"]
    assert len(positions) == 3
    assert positions == sorted(positions, reverse=True)
    assert report["mean_accepted_length"] == pytest.approx(1 + sum(positions), abs=1e-6)


def test_held_out_prompts_cover_every_kind_and_were_never_trained_on(latest: Path) -> None:
    held_out = _prompts(latest, "held_out")
    assert {row["kind"] for row in held_out} == set(curriculum.KINDS)
    asked = {row["messages"][0]["content"] for row in held_out}
    seen = {row["messages"][0]["content"] for split in ("train", "validation") for row in _prompts(latest, split)}
    assert not asked & seen
    measured = pq.read_table(latest / "acceptance" / "outputs.parquet").to_pylist()
    assert {row["key"] for row in measured} == {row["key"] for row in held_out}


def test_every_output_with_speculation_equals_the_output_without(latest: Path, pocket_run: Run) -> None:
    rows = pq.read_table(latest / "acceptance" / "outputs.parquet").to_pylist()
    by_variant: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], {})[row["key"]] = row["output_ids"]
    assert len(by_variant["baseline"]) >= 100
    assert by_variant["speculative"] == by_variant["baseline"]
    assert pocket_run.report["outputs_identical"] is True


def test_stored_states_equal_transformers(latest: Path) -> None:
    """Relative error under 1e-3 in float32; the final state is taken before transformers applies its norm."""
    model = load_text_model(VERIFIER).float().eval()
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0].detach()))
    for path in sorted((latest / "features" / "hidden_states").glob("hs_*.safetensors"))[:6]:
        stored = load_file(path)
        with torch.no_grad():
            states = model(stored["token_ids"][None], output_hidden_states=True).hidden_states
        expected = [states[2], states[3], states[5], before_norm[-1]]
        for position, reference in enumerate(expected):
            ours = stored["hidden_states"][:, position]
            error = (ours - reference[0]).norm() / reference[0].norm()
            assert error < 1e-3, (path.name, position, float(error))


def _renamed(folder: Path, created: list[str], moved: list[str], until: threading.Event) -> None:
    """Notes, by inotify(7), the names that are created and those that are renamed into `folder`."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(fd, str(folder).encode(), IN_CREATE | IN_MOVED_TO) >= 0
    while not until.wait(0.1):
        with suppress(BlockingIOError):
            data = os.read(fd, 1 << 20)
            while data:
                _, mask, _, length = struct.unpack_from("iIII", data)
                name = data[16 : 16 + length].rstrip(b"\0").decode()
                (created if mask & IN_CREATE else moved).append(name)
                data = data[16 + length :]
    os.close(fd)


def test_fp8_samples_are_the_stored_states_quantized(latest: Path, tmp_path: Path) -> None:
    """A server of the fp8 store captures rows that the run has in float32: hs-connectors' form of the same states."""
    given = load_config(ROOT / "deployments/pocket.yaml")
    features = given.features.model_copy(update={"store": "fp8", "probe_all_layers": False})
    config = given.model_copy(update={"features": features})
    traces = open_artifact((latest / "traces").resolve())
    created: list[str] = []
    moved: list[str] = []
    done = threading.Event()

    with servers.lend(tmp_path, config) as lease:
        watch = threading.Thread(target=_renamed, args=(lease.storage, created, moved, done))
        watch.start()
        shard = Shard(index=0, start=0, stop=24)
        made = shard_stage.capture_shard(tmp_path, config, traces, shard, lambda: nullcontext(lease), silent)
        time.sleep(0.2)
        done.set()
        watch.join()
    probed = made.manifest().work["probe"]
    assert probed["not_probed"] == ["layer ids: features.probe_all_layers is off"]
    assert 0.01 < probed["mean_difference"] < 0.15  # three bits of mantissa, see `features.tolerance`
    stored = {row["key"]: row["row"] for row in pq.read_table(latest / "features" / "index.parquet").to_pylist()}
    whole = dict.fromkeys(row.key for row in read_rows(config, traces, 0, 24))
    sizes = [0, 0]
    off, codes = 0, 0
    with closing(open_pool(tmp_path, config)) as pool:
        for key in whole:
            reference = load_file(latest / "features" / "hidden_states" / f"hs_{stored[key]}.safetensors")
            sample = load_file(pool.path(key))
            expected, scales = quantize_tensor_to_fp8(reference["hidden_states"])
            assert torch.equal(sample["token_ids"], reference["token_ids"])
            assert sample["hidden_states"].dtype == torch.float8_e4m3fn
            assert torch.allclose(sample["hidden_states_scales"], scales, rtol=1e-5, atol=0)
            distance = _code(sample["hidden_states"]) - _code(expected)
            assert distance.abs().max() <= 1
            off, codes = off + int(distance.count_nonzero()), codes + distance.numel()
            sizes[0] += sample["hidden_states"].nbytes
            sizes[1] += reference["hidden_states"].nbytes
    assert (made.manifest().counts["samples"], made.manifest().counts["lost"]) == (len(whole), 0)
    assert off / codes < 1e-3, (off, codes)  # 0 of 1,244,160 as measured
    assert sizes[0] * 4 == sizes[1]
    assert sum(name.endswith(".safetensors") for name in moved) >= len(whole)
    assert sum(name.endswith(".safetensors.lock") for name in created) >= len(whole)
    assert not [name for name in created if name.endswith(".safetensors")], "a final name that was written to"


def _code(states: torch.Tensor) -> torch.Tensor:
    """float8 values by their place in order: neighbours differ by one."""
    bits = states.view(torch.uint8).to(torch.int32)
    return torch.where(bits >= 128, 128 - bits, bits)


def test_every_shard_was_probed_against_its_server_and_the_layer_reference(latest: Path, pocket_run: Run) -> None:
    made = [json.loads(path.read_text()) for path in latest.parents[1].glob("feature-shards/*/manifest.json")]
    references = list(latest.parents[1].glob("feature-reference/*/manifest.json"))
    assert (len(made), len(references)) == (4, 1)
    for shard in made:
        found = shard["work"]["probe"]
        assert (found["samples"], found["layer_ids"], found["not_probed"]) == (2, [2, 3, 5, 6], [])
        assert found["reference"] == references[0].parent.name
        assert found["relative_error"] < 1e-5
        assert found["argmax"] == 1
        assert found["mean_difference"] < 1e-4


def test_the_layer_reference_equals_transformers(latest: Path) -> None:
    model = load_text_model(VERIFIER).float().eval()
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0].detach()))
    paths = list(latest.parents[1].glob("feature-reference/*/sequence_*.safetensors"))
    assert len(paths) == 3
    for path in paths:
        held = load_file(path)
        with torch.no_grad():
            states = model(held["token_ids"][None], output_hidden_states=True).hidden_states
        for position, expected in enumerate([*states[1:6], before_norm[-1]]):
            error = (held["hidden_states"][:, position] - expected[0]).norm() / expected[0].norm()
            assert error < 1e-3, (path.name, position + 1, float(error))


def test_last_state_gives_the_servers_prompt_logprobs(latest: Path, tmp_path: Path) -> None:
    """The last-state probe: log_softmax(lm_head(norm(h_last))) against the server's top 5 of the same tokens."""
    weights = load_file(VERIFIER / "model-00001-of-00001.safetensors")
    head = weights["language_model.lm_head.weight"].float()
    gain = weights["language_model.model.norm.weight"].float()
    eps = json.loads((VERIFIER / "config.json").read_text())["text_config"]["rms_norm_eps"]
    config = load_config(ROOT / "deployments/pocket.yaml")
    agree, differences, positions = 0, [], 0
    cache = latest.parents[1] / "cache"
    with serving.serve(
        config.verifier, config.servers, serving.generation_server(), tmp_path / "log", cache
    ) as endpoint:
        for path in islice(sorted((latest / "features" / "hidden_states").glob("hs_*.safetensors")), 8):
            stored = load_file(path)
            tokens = stored["token_ids"].tolist()
            body = {"model": endpoint.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 5}
            served = httpx.post(f"{endpoint.url}/completions", json=body, timeout=120).json()["choices"][0][
                "prompt_logprobs"
            ]
            state = stored["hidden_states"][:, -1]
            normed = state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + eps) * gain
            ours = torch.log_softmax(normed @ head.T, dim=-1)
            for position, entry in enumerate(served[1:]):
                top = {int(token): value["logprob"] for token, value in entry.items()}
                agree += int(ours[position].argmax()) == max(top, key=lambda token: top[token])
                differences += [abs(float(ours[position, token]) - value) for token, value in top.items()]
                positions += 1
    assert positions > 300
    assert agree / positions >= 0.99
    assert float(np.mean(differences)) < 0.01


def test_the_exported_drafter_carries_the_maps(latest: Path) -> None:
    best = (latest / "drafter" / "best").resolve()
    drafter = load_file(best / "flat" / "model.safetensors")
    config = json.loads((best / "flat" / "config.json").read_text())
    t2d, d2t = drafter["t2d"].numpy(), drafter["d2t"].numpy()
    assert t2d.dtype == np.bool_
    assert t2d.shape == (512,)
    assert d2t.dtype == np.int64
    assert t2d.sum() == len(d2t) == config["draft_vocab_size"] == 320
    targets = np.arange(len(d2t)) + d2t
    assert (np.diff(targets) > 0).all()
    assert t2d[targets].all()
    assert np.array_equal(d2t, np.load(latest / "vocabulary" / "d2t.npy"))
    head = load_file(VERIFIER / "model-00001-of-00001.safetensors")["language_model.lm_head.weight"].float()
    assert torch.equal(drafter["lm_head.weight"], head[targets]), "a head row stands for another token"
    assert config["eagle_aux_hidden_state_layer_ids"] == config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]


def test_a_second_run_executes_no_stage_and_is_quick(pocket_run: Run) -> None:
    again = run(pocket_run.config, pocket_run.workdir)
    assert again.executed() == []
    assert again.seconds < 40
