"""Traces against a stub server: chaos, memory, and speed beside speculators: `python benchmarks/traces.py`.

Writes benchmarks/results/traces.json.  About ten minutes on two cores; nothing but this process's children is ended.

* chaos: 10,000 prompts, 100-token answers, two endpoints; 1 % 503, 0.5 % dropped connections, 0.2 % cut thinking;
  kill -9 of the client at three random instants; one endpoint away for ten seconds.
* memory: the generating process's peak resident memory with 10,000 and with 100,000 prompts.
* speed: requests a second of this client and of `speculators regenerate-responses`, in turn, on one stub server at
  equal concurrency.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "traces.json"
VERIFIER = ROOT / "slipstream" / "pocket" / "verifier"
CONCURRENCY = 64
FAULTS = {"errors": 0.01, "drops": 0.005, "cut": 0.002}


@dataclass(frozen=True)
class Stub:
    """A stub server process."""

    url: str
    log: Path

    def away(self, seconds: float) -> None:
        """Lets it vanish for so long."""
        body = json.dumps({"seconds": seconds}).encode()
        request = urllib.request.Request(
            self.url.removesuffix("/v1") + "/control/away", body, {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=5).read()

    def requests(self) -> Iterator[dict[str, Any]]:
        """What it was asked: arrival time, text, outcome."""
        with self.log.open() as lines:
            yield from map(json.loads, lines)


@contextmanager
def stub(folder: Path, name: str, delay_s: float, **faults: float) -> Iterator[Stub]:
    """A stub server of 100-token answers."""
    log = folder / f"{name}.jsonl"
    command = [sys.executable, str(ROOT / "tests/chaos_server.py"), "--port", "0", "--tokens", "100"]
    command += ["--delay-s", str(delay_s), "--seed", "0", "--log", str(log)]
    for fault, share in faults.items():
        command += [f"--{fault}", str(share)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Stub(process.stdout.readline().split()[-1], log)
    finally:
        process.terminate()
        process.wait()


def write_prompts(path: Path, count: int) -> Path:
    """So many different prompts of about 400 characters."""
    with path.open("w") as file:
        for i in range(count):
            text = f"Question {i}: " + " ".join(f"word{(i * 31 + j * 17) % 997}" for j in range(48))
            file.write(json.dumps({"id": f"p{i}", "prompt": text}) + "\n")
    return path


def config(folder: Path, prompts: Path, urls: list[str]) -> Path:
    """A configuration of the traces stage for these prompts and endpoints; cut answers are rejected."""
    values = yaml.safe_load((ROOT / "deployments/smoke.yaml").read_text())
    values |= {"name": "traces-benchmark", "workdir": str(folder / "work")}
    held_out = folder / "held-out.jsonl"
    held_out.write_text(json.dumps({"prompt": "the held-out one"}) + "\n")
    values["prompts"] = {
        "sources": [{"path": str(prompts)}],
        "held_out_sources": [{"path": str(held_out)}],
        "held_out_ratio": 0,
    }
    values["verifier"] |= {"path": str(VERIFIER), "max_model_len": 4096}
    values["servers"]["traces_endpoints"] = urls
    values["traces"] = {
        "max_tokens": 256,
        "concurrency": CONCURRENCY,
        "request_timeout_s": 30,
        "keep_truncated": False,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def work(path: Path) -> None:
    """The generating process: prompts and traces stages, then its memory and counts as one JSON line."""
    import resource

    from slipstream import serving
    from slipstream.config import load_config
    from slipstream.progress import silent
    from slipstream.traces import prompt_set, stage

    loaded = load_config(path)

    @contextmanager
    def servers(logs: Path) -> Iterator[list[serving.Endpoint]]:
        yield serving.connect_any(loaded.servers.traces_endpoints)

    def peak_mb() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    baseline = peak_mb()
    prompts = prompt_set.run(loaded.root, loaded.prompts)
    after_prompts = peak_mb()
    made = stage.run(loaded.root, loaded, prompts, servers, silent)
    summary = json.loads((made.folder / stage.SUMMARY).read_text())
    print(
        json.dumps(
            {
                "folder": made.path,
                "prompts_folder": prompts.path,
                "baseline_mb": round(baseline, 1),
                "after_prompts_mb": round(after_prompts, 1),
                "peak_mb": round(peak_mb(), 1),
                "execution": summary["execution"],
            }
        )
    )


def start(path: Path) -> subprocess.Popen[str]:
    """The generating process on a configuration."""
    return subprocess.Popen(
        [sys.executable, __file__, "--work", str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Its line of figures."""
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the generating process ended with {process.returncode}")
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return figures


def recorded(folder: Path) -> dict[str, float]:
    """When each answered prompt was recorded, by prompt key."""
    files = list((folder / "work/pool/traces").glob("*/rows.sqlite3"))
    if not files:
        return {}
    with sqlite3.connect(f"file:{files[0]}?mode=ro", uri=True, timeout=30) as ledger:
        rows = ledger.execute("SELECT json_extract(rest, '$.key'), at FROM rows")
        return dict(rows.fetchall())


def answers(folder: Path) -> int:
    """How many answers are recorded."""
    files = list((folder / "work/pool/traces").glob("*/rows.sqlite3"))
    try:
        with sqlite3.connect(f"file:{files[0]}?mode=ro", uri=True, timeout=30) as ledger:
            return int(ledger.execute("SELECT count(*) FROM rows").fetchone()[0])
    except (IndexError, sqlite3.OperationalError):
        return 0


def chaos(count: int) -> dict[str, Any]:
    """The chaos run and what became of every prompt."""
    import pyarrow.parquet as pq

    from slipstream.traces.prompts import Prompt

    lot = random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prompts = write_prompts(folder / "prompts.jsonl", count)
        with stub(folder, "one", 0.05, **FAULTS) as one, stub(folder, "two", 0.05, **FAULTS) as two:
            path = config(folder, prompts, [one.url, two.url])
            instants = sorted(lot.sample(range(count // 20, count * 8 // 10), 3))
            gone_at = count * 9 // 10
            killed, known = [], 0
            for instant in instants:
                process = start(path)
                while answers(folder) < instant and process.poll() is None:
                    time.sleep(0.02)
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                known = answers(folder)
                killed.append(known)
            process = start(path)
            while answers(folder) < max(gone_at, known + 200) and process.poll() is None:
                time.sleep(0.02)
            two.away(10)
            figures = finish(process)
            at = recorded(folder)
            by_text = {}
            kept: set[str] = set()
            for split in ("train", "validation"):
                for line in (Path(figures["prompts_folder"]) / f"{split}.jsonl").open():
                    prompt = Prompt.from_json(json.loads(line))
                    by_text[prompt.messages[-1]["content"]] = prompt.key
            log = [*one.requests(), *two.requests()]
            twice = sum(1 for entry in log if entry["t"] > at.get(by_text[entry["text"]], float("inf")))
            accepted = pq.read_table(Path(figures["folder"]) / "traces.parquet", columns=["key"])["key"].to_pylist()
            rejects = [json.loads(line) for line in (Path(figures["folder"]) / "rejects.jsonl").open()]
            kept |= set(accepted)
            rejected = {entry["key"] for entry in rejects}
            outcomes: dict[str, int] = {}
            for entry in log:
                outcomes[entry["outcome"]] = outcomes.get(entry["outcome"], 0) + 1
            return {
                "prompts": len(by_text),
                "accepted": len(accepted),
                "rejected": len(rejects),
                "neither": len(set(by_text.values()) - kept - rejected),
                "both": len(kept & rejected),
                "accepted_repeated": len(accepted) - len(kept),
                "asked_twice": twice,
                "requests": len(log),
                "requests_by_outcome": outcomes,
                "killed_after_answers": killed,
                "absences": figures["execution"]["absences"],
                "retried_by_last_client": figures["execution"]["retried"],
            }


def memory(counts: list[int]) -> dict[str, Any]:
    """Peak resident memory of the generating process for each number of prompts, one fresh process each."""
    made: dict[str, Any] = {}
    for count in counts:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            prompts = write_prompts(folder / "prompts.jsonl", count)
            with stub(folder, "one", 0.0) as one:
                figures = finish(start(config(folder, prompts, [one.url])))
            made[str(count)] = {name: figures[name] for name in ("baseline_mb", "after_prompts_mb", "peak_mb")}
            made[str(count)]["requests_per_s"] = round(
                figures["execution"]["requested"] / figures["execution"]["seconds"], 1
            )
    return made


def ours(folder: Path, prompts: Path, url: str) -> dict[str, float]:
    """This client on one endpoint."""
    execution = finish(start(config(folder, prompts, [url])))["execution"]
    return {
        "requests_per_s": execution["requested"] / execution["seconds"],
        "server_limited_share": execution["throughput"]["server_limited_share"],
        "client_cpu_share": execution["throughput"]["client_cpu_share"],
    }


def theirs(folder: Path, prompts: Path, url: str) -> float:
    """`speculators regenerate-responses` on one endpoint: the rate that it prints."""
    command = [str(Path(sys.executable).with_name("speculators")), "regenerate-responses"]
    command += ["--endpoint", f"{url}/chat/completions", "--model", str(VERIFIER), "--dataset", str(prompts)]
    command += ["--concurrency", str(CONCURRENCY), "--max-tokens", "256", "--outfile", str(folder / "theirs.jsonl")]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    found = re.search(r"Throughput: ([\d.]+) req/s", done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"speculators printed no throughput:\n{(done.stdout + done.stderr)[-2000:]}")
    return float(found[1])


def speed(count: int, delay_s: float, rounds: int) -> dict[str, Any]:
    """Both clients in turn against the same stub; `ratio` compares the best runs, which the machine disturbed least."""
    mine: list[dict[str, float]] = []
    peer: list[float] = []
    with tempfile.TemporaryDirectory() as temporary, stub(Path(temporary), "one", delay_s) as server:
        prompts = write_prompts(Path(temporary) / "prompts.jsonl", count)
        for i in range(rounds):
            for name, run in (("ours", ours), ("theirs", theirs)):
                folder = Path(temporary) / f"{name}{i}"
                folder.mkdir()
                result = run(folder, prompts, server.url)
                (mine if name == "ours" else peer).append(result)  # type: ignore[arg-type]
    rates = [result["requests_per_s"] for result in mine]
    return {
        "delay_s": delay_s,
        "concurrency": CONCURRENCY,
        "requests": count,
        "ours_requests_per_s": [round(rate, 1) for rate in rates],
        "speculators_requests_per_s": peer,
        "ratio": round(max(rates) / max(peer), 3),
        "ratio_of_medians": round(statistics.median(rates) / statistics.median(peer), 3),
        "server_limited_share": [result["server_limited_share"] for result in mine],
        "client_cpu_share": [result["client_cpu_share"] for result in mine],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=int, default=10_000)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    count = args.prompts
    unrest = chaos(count)
    peaks = memory([count, 10 * count])
    busy = speed(count // 2, 0.0, rounds=5)
    usual = speed(count // 5, 0.5, rounds=1)
    result = {
        "command": "python benchmarks/traces.py",
        "cpus": os.cpu_count(),
        "prompts": unrest["prompts"],
        "accepted": unrest["accepted"],
        "rejected": unrest["rejected"],
        "asked_twice": unrest["asked_twice"],
        "memory_growth_mb": round(peaks[str(10 * count)]["peak_mb"] - peaks[str(count)]["peak_mb"], 1),
        "requests_per_second_over_speculators": busy["ratio"],
        "chaos": unrest,
        "memory": peaks,
        "speed_when_the_server_costs_nothing": busy,
        "speed_at_half_a_second_an_answer": usual,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
