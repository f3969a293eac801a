"""fp8 against native hidden states, by the drafters they train: `PYTHONPATH=. python benchmarks/features_fp8.py`.

Writes benchmarks/results/features_fp8.json.  One set of traces of the pocket verifier; its states are captured once in
the verifier's type and once as per-token float8_e4m3; a drafter is trained on each for every seed; the accepted length
of each is measured on a vLLM server with the held-out prompts.  Everything is made by the stages of a run, without
Prefect; what a work directory (--work) has is not made again, so the run can be continued.

    fp8_bytes_over_bf16             bytes of the two stores
    fp8_accepted_length_over_bf16   means over the seeds
    noise                             the standard deviation over the seeds of native, relative to its mean
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream import serving, vocabulary
from slipstream.acceptance.served import measure
from slipstream.artifact import Artifact, tool_versions
from slipstream.config import RunConfig, load_config
from slipstream.drafter import stage as drafter_stage
from slipstream.features import servers as feature_servers
from slipstream.features import shard_stage, store
from slipstream.features.rows import plan_shards
from slipstream.progress import silent
from slipstream.traces import prompt_set, splits
from slipstream.traces import stage as traces_stage

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "features_fp8.json"
STORES = ("native", "fp8")


def configuration(work: Path, dtype: str, device: str, form: str, seed: int) -> RunConfig:
    """The pocket run on this device, with this store and seed; training on the CPU."""
    config = load_config(ROOT / "deployments" / "pocket.yaml")
    gpu = ["--enforce-eager", "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", "2G"]
    changes: dict[str, dict[str, Any]] = {
        "verifier": {"dtype": dtype, "path": str(ROOT / "slipstream" / "pocket" / "verifier")},
        "servers": {
            "python": sys.executable if device == "cuda" else config.servers.python,
            "device": device,
            "start_ahead": False,
            "extra_args": gpu if device == "cuda" else [],
        },
        "features": {"store": form, "shards": 1},
        "drafter": {"seed": seed, "keep_initial": False, "threads": 2},
        "acceptance": {"untrained": False, "concurrency": 32},
    }
    values = config.model_dump() | {"workdir": str(work), "name": f"{form}-{seed}"}
    for section, fields in changes.items():
        values[section] = values[section] | fields
    return RunConfig.model_validate(values)


def traces_of(config: RunConfig, prompts: Artifact) -> Artifact:
    """The traces stage."""

    @contextmanager
    def replicas(logs: Path) -> Iterator[list[serving.Endpoint]]:
        specs, cache = [serving.generation_server()], serving.cache_folder(config.servers, config.root)
        with serving.replicas(config.verifier, config.servers, specs, logs, cache) as endpoints:
            yield endpoints

    return traces_stage.run(config.root, config, prompts, replicas, silent)


def features_of(config: RunConfig, traces: Artifact) -> tuple[Artifact, dict[str, Any]]:
    """The features stage, and what its shards say of the work."""
    with feature_servers.shared(config.root, config):
        shards = [
            shard_stage.capture_shard(
                config.root, config, traces, shard, lambda: feature_servers.lend(config.root, config), silent
            )
            for shard in plan_shards(config, traces)
        ]
    return store.assemble(config.root, config, traces, shards), shards[0].manifest().work


def accepted(config: RunConfig, prompts: Artifact, drafter: Artifact) -> dict[str, Any]:
    """Acceptance of the best epoch on the held-out prompts."""
    best = drafter.manifest().counts["best_epoch"]
    served = drafter_stage.served_folder(drafter.folder, best)
    spec = serving.speculative_server(served, config.acceptance.draft_tokens)
    asked = list(prompt_set.load(prompts, splits.HELD_OUT))
    logs, cache = config.root / "logs" / config.name, serving.cache_folder(config.servers, config.root)
    with serving.replicas(config.verifier, config.servers, [spec], logs, cache) as [endpoint]:
        counters = measure(endpoint, asked, config.acceptance, config.verifier, lambda: None).counters
    return {
        "acceptance_rate": round(counters.acceptance_rate, 4),
        "accepted_length": round(counters.mean_accepted_length, 4),
        "best_epoch": best,
    }


def main() -> None:
    """Makes everything that is missing and writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--together", type=int, default=6, help="trainings, and then servers, side by side")
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {what}", flush=True)

    configs = {
        (form, seed): configuration(args.work, args.dtype, args.device, form, seed)
        for form in STORES
        for seed in range(args.seeds)
    }
    first = configs["native", 0]
    prompts = prompt_set.run(first.root, first.prompts)
    traces = traces_of(first, prompts)
    say(f"traces: {traces.manifest().counts}")
    words = vocabulary.run(first.root, first, traces)
    stores: dict[str, Artifact] = {}
    figures: dict[str, dict[str, Any]] = {}
    for form in STORES:
        stores[form], work = features_of(configs[form, 0], traces)
        counts = stores[form].manifest().counts
        figures[form] = {"bytes": counts["bytes"], "tokens": counts["tokens"], "lost": counts["lost"], "work": work}
        say(f"{form}: {figures[form]}")
    with ThreadPoolExecutor(args.together) as threads:
        trained = threads.map(
            lambda item: drafter_stage.run(item[1].root, item[1], stores[item[0][0]], words, silent), configs.items()
        )
        drafters = dict(zip(configs, trained, strict=True))
        say("trained")
        served = threads.map(lambda item: accepted(item[1], prompts, drafters[item[0]]), configs.items())
        acceptance = dict(zip(configs, served, strict=True))
    for form in STORES:
        figures[form]["seeds"] = [acceptance[form, seed] for seed in range(args.seeds)]
    lengths = {form: [entry["accepted_length"] for entry in figures[form]["seeds"]] for form in STORES}
    means = {form: statistics.mean(values) for form, values in lengths.items()}
    found = {
        "command": " ".join(["python", *sys.argv]),
        "device": args.device,
        "dtype": args.dtype,
        "held_out_prompts": prompt_set.count(prompts, splits.HELD_OUT),
        **figures,
        "fp8_bytes_over_bf16": round(figures["fp8"]["bytes"] / figures["native"]["bytes"], 4),
        "fp8_accepted_length_over_bf16": round(means["fp8"] / means["native"], 4),
        "noise": round(statistics.stdev(lengths["native"]) / means["native"], 4),
        "noise_fp8": round(statistics.stdev(lengths["fp8"]) / means["fp8"], 4),
        "versions": tool_versions(),
    }
    args.result.write_text(json.dumps(found, indent=2) + "\n")
    say(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
