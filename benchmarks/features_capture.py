"""How fast hidden states are captured, on a GPU: `PYTHONPATH=. python benchmarks/features_capture.py [--store FOLDER]`.

Writes benchmarks/results/features_capture.json (or --result).  One run measures four clients in turn, --rounds times:

* prefill: a plain vLLM server without prefix caching, one request a sample, one token generated;
* connector: the extraction server (vLLM's stock connector), the same requests, until every file is written;
* capture: Slipstream's shard stage on the same server: states checked, checksums, row pool, index, manifest; its sync
  apart;
* speculators: `speculators generate-offline-data --validate-outputs` on the same server (it checks as well).

The verifier is a slice of Kimi-K2.5's width (hidden 7168, MLA, MoE top-8) with 4 layers and random weights.  The files
of all four lie on one file system and are removed between turns.  `sync_s` is what forcing the bytes to the disk takes
afterwards: the capture does it before its manifest, the others' files are synced here in the first round; it counts for
nobody.

Needs vllm, speculators and a GPU in this interpreter, no Prefect.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import serving
from slipstream.artifact import Artifact, claim
from slipstream.config import RunConfig
from slipstream.features import shard_stage
from slipstream.features.lease import Lease
from slipstream.features.pool import FeaturePool
from slipstream.features.rows import plan_shards
from slipstream.progress import silent

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "features_capture.json"
POCKET = ROOT / "slipstream" / "pocket" / "verifier"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LAYER_IDS = [1, 2, 3]  # and 4, the final state
CONCURRENCY = 64
# Kimi-K2.5's text_config with four layers and 64 of its 384 experts: a token still visits 8 and a shared one.
SLICE = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 163840,
    "max_position_embeddings": 32768,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 163586,
    "bos_token_id": 163584,
}


def write_verifier(folder: Path) -> None:
    """The slice as a model folder; its weights are vLLM's random ones."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SLICE, indent=2))
    for name in TOKENIZER:
        if (POCKET / name).exists():
            shutil.copy(POCKET / name, folder / name)
    save_file({"unused": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")


def write_traces(workdir: Path, tokens: int) -> Artifact:
    """Rows of 512 to 2,560 random tokens, about `tokens` in all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lot, rows, total = random.Random(0), [], 0
    while total < tokens:
        ids = [lot.randrange(1000, 160000) for _ in range(lot.randrange(512, 2561))]
        mask = [0] * 64 + [1] * (len(ids) - 64)
        row = {"key": f"k{len(rows):05d}", "split": "train", "input_ids": ids, "loss_mask": mask, "prompt_tokens": 64}
        rows.append(row)
        total += len(ids)
    with claim(workdir, "traces", f"random-{tokens}") as folder:
        pq.write_table(pa.Table.from_pylist(rows), folder.path / "traces.parquet", row_group_size=64)
        return folder.commit(version=2, recipe={}, inputs={}, content=f"random-{tokens}", files=["traces.parquet"])


def rows_of(traces: Artifact) -> list[list[int]]:
    """The token ids of every row."""
    import pyarrow.parquet as pq

    found: list[list[int]] = pq.read_table(traces.folder / "traces.parquet")["input_ids"].to_pylist()
    return found


def configuration(verifier: Path, workdir: Path, store: str, args: Sequence[str]) -> RunConfig:
    """A configuration whose features stage is the one that runs here."""
    values = {
        "name": "capture-benchmark",
        "workdir": str(workdir),
        "prompts": {"sources": [{"path": "none.jsonl"}]},
        "verifier": {
            "path": str(verifier),
            "dtype": "bfloat16",
            "max_model_len": 8192,
            "reasoning_parser": None,
        },
        "servers": {
            "python": sys.executable,
            "device": "cuda",
            "startup_timeout_s": 400,
            "max_num_seqs": 256,
            "extra_args": list(args),
        },
        "features": {
            "layer_ids": LAYER_IDS,
            "store": store,
            "concurrency": CONCURRENCY,
            "probe_samples": 0,
            "probe_all_layers": False,
        },
        "drafter": {
            "shape": {
                "num_attention_heads": 64,
                "num_key_value_heads": 64,
                "head_dim": 128,
                "intermediate_size": 18432,
            }
        },
    }
    return RunConfig.model_validate(values)


async def _ask(endpoint: serving.Endpoint, rows: Sequence[Sequence[int]]) -> list[str]:
    """One request a row, CONCURRENCY in flight; the files that the answers name."""
    import aiohttp

    queue, named = iter(rows), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def work() -> None:
            for ids in queue:
                body = {"model": endpoint.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0}
                async with session.post(f"{endpoint.url}/completions", json=body) as answer:
                    answer.raise_for_status()
                    params = (await answer.json()).get("kv_transfer_params") or {}
                    named.append(params.get("hidden_states_path", ""))

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return named


def prefill(endpoint: serving.Endpoint, rows: Sequence[Sequence[int]]) -> float:
    """Seconds until every request is answered."""
    started = time.monotonic()
    asyncio.run(_ask(endpoint, rows))
    return time.monotonic() - started


def connector(endpoint: serving.Endpoint, rows: Sequence[Sequence[int]], storage: Path) -> tuple[float, list[Path]]:
    """Seconds until every file is written, and the files."""
    started = time.monotonic()
    paths = [Path(name) for name in asyncio.run(_ask(endpoint, rows))]
    while not all(path.exists() and _released(path) for path in paths):
        asyncio.run(_ask(endpoint, [[1]]))  # an idle engine writes its last files at its next step
        time.sleep(0.01)
    return time.monotonic() - started, paths


def _released(path: Path) -> bool:
    import fcntl

    try:
        with Path(f"{path}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    return True


def sync(paths: Sequence[Path]) -> float:
    """Seconds to force these files to the disk, eight at a time as the row pool does."""
    from concurrent.futures import ThreadPoolExecutor

    from slipstream import atomic

    started = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(atomic.fsync_file, paths))
    return time.monotonic() - started


def capture(config: RunConfig, traces: Artifact, lease: Lease) -> tuple[float, float]:
    """Seconds of the shard stage without its sync, and of the sync; prints what its parts took."""
    synced: list[float] = []
    added: list[tuple[float, float]] = []
    plain, add = FeaturePool.sync, FeaturePool.add

    def watched(pool: FeaturePool, token_ids: Sequence[int], captured: Path) -> Any:
        began = time.monotonic()
        info = add(pool, token_ids, captured)
        added.append((began, time.monotonic()))
        return info

    def timed(pool: FeaturePool, keys: Sequence[str]) -> int:
        started = time.monotonic()
        done = plain(pool, keys)
        synced.append(time.monotonic() - started)
        return done

    @contextmanager
    def lend() -> Iterator[Lease]:
        yield lease

    FeaturePool.sync, FeaturePool.add = timed, watched  # type: ignore[method-assign]
    try:
        started = time.monotonic()
        [shard] = plan_shards(config, traces)
        made = shard_stage.capture_shard(config.root, config, traces, shard, lend, silent)
        seconds = time.monotonic() - started
    finally:
        FeaturePool.sync, FeaturePool.add = plain, add  # type: ignore[method-assign]
    counts = made.manifest().counts
    assert counts["lost"] == 0, counts
    each = statistics.mean(end - began for began, end in added)
    print(
        f"capture: first sample after {added[0][0] - started:.2f} s, last stored after {added[-1][1] - started:.2f} s, "
        f"done after {seconds:.2f} s ({sum(synced):.2f} s of it sync), {each * 1e3:.0f} ms to check and store one",
        flush=True,
    )
    return seconds - sum(synced), sum(synced)


def speculators(endpoint: serving.Endpoint, dataset: Path, output: Path) -> tuple[float, list[Path]]:
    """Seconds of `speculators generate-offline-data` from its first request on, and its files."""
    code = "import time; print('loaded', time.time()); from speculators.__main__ import app; app()"
    command = [sys.executable, "-c", code, "generate-offline-data", "--endpoint", endpoint.url]
    command += ["--preprocessed-data", str(dataset), "--output", str(output), "--concurrency", str(CONCURRENCY)]
    command += ["--validate-outputs", "--request-timeout", "600", "--fail-on-error"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"speculators ended with {done.returncode}: {done.stderr[-3000:]}")
    elapsed = [line for line in (done.stdout + done.stderr).splitlines() if "s elapsed" in line]
    seconds = float(elapsed[-1].split("Timing:")[1].split("s elapsed")[0])
    return seconds, list(output.glob("hs_*.safetensors"))


def write_dataset(folder: Path, rows: Sequence[Sequence[int]]) -> None:
    """The data set that speculators reads."""
    import datasets

    dataset = datasets.Dataset.from_dict({"input_ids": rows, "loss_mask": rows, "seq_len": [len(row) for row in rows]})
    dataset.set_format("torch")
    dataset.save_to_disk(folder)


def empty(folder: Path) -> None:
    """Removes what lies in `folder`."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def disk_speed(folder: Path) -> dict[str, float]:
    """GB/s of writing 4 GiB, and with the sync."""
    block, path = os.urandom(1 << 26), folder / "speed"
    started = time.monotonic()
    with path.open("wb") as file:
        for _ in range(64):
            file.write(block)
        written = time.monotonic()
        os.fsync(file.fileno())
    synced = time.monotonic()
    path.unlink()
    size = 64 * len(block) / 1e9
    return {"write_gb_s": round(size / (written - started), 2), "synced_gb_s": round(size / (synced - started), 2)}


def measure(root: Path, tokens: int, rounds: int, store: str) -> dict[str, Any]:
    """All four clients, in turn."""
    verifier, work, storage = root / "verifier", root / "work", root / "storage"
    write_verifier(verifier)
    storage.mkdir()
    args = ["--load-format", "dummy", "--enforce-eager", "--gpu-memory-utilization", "0.45"]
    args += ["--max-num-batched-tokens", "16384"]
    config = configuration(verifier, work, store, args)
    traces = write_traces(work, tokens)
    rows = rows_of(traces)
    total = sum(map(len, rows))
    write_dataset(root / "dataset", rows)
    size = total * (len(LAYER_IDS) + 1) * SLICE["hidden_size"] * 2  # type: ignore[operator]
    times: dict[str, list[float]] = {"prefill": [], "connector": [], "capture": [], "speculators": []}
    syncs: dict[str, list[float]] = {name: [] for name in times if name != "prefill"}
    with ExitStack() as stack:
        extraction = serving.extraction_server([*LAYER_IDS, SLICE["num_hidden_layers"]], storage, store == "fp8")  # type: ignore[list-item]
        started = time.monotonic()
        plain, extracting = (
            stack.enter_context(
                serving.serve(config.verifier, config.servers, spec, root / f"{spec.role}.log", root / "cache", [0])
            )
            for spec in (serving.ServerSpec("generation", ("--no-enable-prefix-caching",)), extraction)
        )
        print(f"servers ready after {time.monotonic() - started:.0f} s", flush=True)
        prefill(plain, rows[:128])
        connector(extracting, rows[:128], storage)
        empty(storage)
        for number in range(rounds):
            turns = list(times)
            for name in turns[number % len(turns) :] + turns[: number % len(turns)]:
                if name == "prefill":
                    times[name].append(prefill(plain, rows))
                    continue
                if name == "capture":
                    seconds, synced = capture(config, traces, Lease(extracting, storage))
                    syncs[name].append(synced)
                    shutil.rmtree(work / "pool")
                    shutil.rmtree(work / shard_stage.STAGE)
                else:
                    if name == "connector":
                        seconds, files = connector(extracting, rows, storage)
                    else:
                        seconds, files = speculators(extracting, root / "dataset", root / "speculators")
                    if number == 0:
                        syncs[name].append(sync(files))
                    shutil.rmtree(root / "speculators", ignore_errors=True)
                empty(storage)
                times[name].append(seconds)
            print({name: [round(total / value) for value in values] for name, values in times.items()}, flush=True)
    speed = {name: round(total / statistics.median(values)) for name, values in times.items()}
    return {
        "command": " ".join(["python", *sys.argv]),
        "tokens": total,
        "samples": len(rows),
        "bytes_bf16": size,
        "concurrency": CONCURRENCY,
        "rounds": rounds,
        "tokens_per_second": speed,
        "seconds": {name: [round(value, 3) for value in values] for name, values in times.items()},
        "sync_s": {name: [round(value, 3) for value in values] for name, values in syncs.items()},
        "capture_over_connector": round(speed["capture"] / speed["connector"], 3),
        "capture_over_prefill": round(speed["capture"] / speed["prefill"], 3),
        "capture_over_speculators": round(speed["capture"] / speed["speculators"], 3),
        "connector_over_prefill": round(speed["connector"] / speed["prefill"], 3),
    }


def versions() -> dict[str, str]:
    """What ran."""
    import importlib.metadata

    import torch

    names = ("vllm", "torch", "transformers", "speculators", "safetensors")
    found = {name: importlib.metadata.version(name) for name in names}
    return {**found, "python": platform.python_version(), "gpu": torch.cuda.get_device_name(0)}


def main() -> None:
    """Measures and writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, default=None, help="folder for all files; a temporary one by default")
    parser.add_argument("--tokens", type=int, default=360_000, help="a turn's tokens; 57,344 bytes each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--form", choices=("native", "fp8"), default="native")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.store) as temporary:
        root = Path(temporary)
        found = {"file_system": disk_speed(root), "cpus": os.cpu_count()}
        found |= measure(root, args.tokens, args.rounds, args.form) | {"versions": versions()}
    args.result.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
