"""Capture of hidden states killed in every way: `PYTHONPATH=. python benchmarks/crash_features.py [CASE ...]`.

Writes benchmarks/results/crash_features.json; with cases named, measures them and keeps the others' figures.  Pocket
verifier, real vLLM servers on the CPU, the flow capture-features with its tasks; about fifteen minutes on two cores, as
root (it mounts a small tmpfs).  It ends only what it started.

Each case starts from an empty work directory and ends with a finished store, which is compared with that of a run that
nothing disturbed:

* flow: kill -9 of the flow's process at two instants, then the same command again
* server: kill -9 of the API server, later of the engine core
* supervisor: kill -9 of the process between the flow and its server, at two instants
* disk: the work directory's tmpfs is filled and emptied again; later it is filled and the flow is killed meanwhile

What was asked and stored is written down by the flow's process itself, one line before each request and one after each
sample that the pool took.  `in_flight` is what was asked and not stored at the faults, summed over them: a row that was
in flight at the first one and waits for its turn at the second counts twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "crash_features.json"
VERIFIER = ROOT / "slipstream" / "pocket" / "verifier"
ROWS, SHORTEST, LONGEST = 160, 60, 440
CONCURRENCY, SHARDS = 8, 2
DISK_MB = 160
DEADLINE_S = 900


def work(config: Path, traces: str, log: Path) -> None:
    """The flow's process; notes what it asks for and stores."""
    from collections.abc import Mapping, Sequence

    from slipstream.config import load_config
    from slipstream.digest import digest_tokens
    from slipstream.features.extraction import ExtractionServer
    from slipstream.features.pool import FeaturePool

    lines = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    prefill, add = ExtractionServer._prefill, FeaturePool.add

    def note(what: str, token_ids: Sequence[int]) -> None:
        if len(token_ids) > 1:
            os.write(lines, f"{what} {digest_tokens(token_ids)}\n".encode())

    async def asked(self: ExtractionServer, token_ids: Sequence[int], fields: Mapping[str, object]) -> Any:
        note("asked", token_ids)
        return await prefill(self, token_ids, fields)

    def stored(self: FeaturePool, token_ids: Sequence[int], captured: Path) -> Any:
        info = add(self, token_ids, captured)
        note("stored", token_ids)
        return info

    ExtractionServer._prefill = asked  # type: ignore[method-assign]
    FeaturePool.add = stored  # type: ignore[method-assign]
    from flows.capture_features import capture_features

    capture_features(load_config(config), traces)


class Case:
    """A work directory and the runs in it."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work, self.log = folder, work, folder / "asked.log"
        folder.mkdir(exist_ok=True)
        self.log.touch()
        self.config = folder / "config.yaml"
        values = yaml.safe_load((ROOT / "deployments/smoke.yaml").read_text())
        values |= {"name": "crash", "workdir": str(work)}
        values["verifier"]["path"] = str(VERIFIER)
        values["servers"]["start_ahead"] = False
        values["features"] |= {
            "concurrency": CONCURRENCY,
            "shards": SHARDS,
            "disk_reserve_gib": 0.001,
            "disk_patience_s": 300,
            "probe_samples": 0,
            "probe_all_layers": False,
        }
        self.config.write_text(yaml.safe_dump(values))
        self.traces = traces(work, self.config)
        self.in_flight_at_faults = 0
        self._below: set[int] = set()  # everything that ran under the flow when a fault came
        self._flow: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begins the flow."""
        command = [sys.executable, __file__, "--work", str(self.config), self.traces, str(self.log)]
        env = {**os.environ, "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(self.folder / "results")}
        with (self.folder / "flow.log").open("ab") as output:
            self._flow = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)

    @property
    def flow(self) -> int:
        """The flow's process id."""
        assert self._flow is not None
        return self._flow.pid

    def stored(self) -> int:
        """Samples under their final names."""
        return len(list(self.work.glob("pool/features/*/??/*.safetensors")))

    def wait(self, reached: Callable[[], bool]) -> None:
        """Returns when `reached()`; the flow must still run then."""
        assert self._flow is not None
        deadline = time.monotonic() + DEADLINE_S
        while not reached():
            if self._flow.poll() is not None:
                raise SystemExit(f"the flow ended too early:\n{(self.folder / 'flow.log').read_text()[-3000:]}")
            if time.monotonic() > deadline:
                raise SystemExit("not reached in time")
            time.sleep(0.005)

    def fault(self, pid: int | None = None) -> None:
        """Counts what is in flight and kills a process with -9."""
        from slipstream.process import descendants

        self._below |= set(descendants(self.flow))
        lines = [line.split() for line in self.log.read_text().splitlines()]
        done = {key for what, key in lines if what == "stored"}
        self.in_flight_at_faults += len({key for what, key in lines if what == "asked"} - done)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def kill_flow(self) -> None:
        """kill -9 of the flow; returns when it and what it had started are gone."""
        self.fault(self.flow)
        assert self._flow is not None
        self._flow.wait()
        if outlived := self.outlived():
            raise SystemExit(f"outlived the flow: {outlived}")

    def outlived(self) -> list[str]:
        """What ran under the flow at a fault and still does a while after the flow's end."""
        deadline = time.monotonic() + 30
        while (left := [pid for pid in self._below if alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [command_of(pid)[:200] for pid in left]

    def finish(self) -> None:
        """Waits for the flow's success."""
        assert self._flow is not None
        if self._flow.wait(DEADLINE_S):
            raise SystemExit(f"the flow failed:\n{(self.folder / 'flow.log').read_text()[-3000:]}")

    def figures(self, reference: Store) -> dict[str, Any]:
        """What the matrix claims, measured."""
        store = Store(self.work)
        lines = [line.split() for line in self.log.read_text().splitlines()]
        asked = Counter(key for what, key in lines if what == "asked")
        stored = Counter(key for what, key in lines if what == "stored")
        manifests = [json.loads(path.read_text()) for path in self.work.glob("feature-shards/*/manifest.json")]
        leftovers = [*self.work.rglob("*.tmp"), *self.work.glob("pool/features/incoming/*")]
        return {
            "samples": len(store.files),
            "lost": sum(manifest["counts"]["lost"] for manifest in manifests),
            "asked_twice": sum(times - 1 for times in asked.values()),
            "captured_twice": sum(times - 1 for times in stored.values()),
            "in_flight": self.in_flight_at_faults,
            "restarts": sum(manifest["work"]["restarts"] for manifest in manifests),
            "suspects": sum(manifest["work"]["suspects"] for manifest in manifests),
            "paused_s": sum(manifest["work"]["paused_s"] for manifest in manifests),
            "vllm": sorted({str(manifest["work"]["vllm"]) for manifest in manifests}),
            "equal_content": store.content == reference.content,
            "largest_relative_error": store.error(reference),
            "half_files": store.damaged,
            "left_behind": len(leftovers),
            "outlived": self.outlived(),
        }


class Store:
    """A finished store: its content, its files, what its deep verification finds."""

    def __init__(self, work: Path) -> None:
        from slipstream.artifact import open_artifact

        (folder,) = work.glob("features/*")
        artifact = open_artifact(folder)
        self.content = artifact.content
        self.files = sorted((folder / "hidden_states").iterdir())
        self.damaged = len(artifact.verify(deep=True))

    def error(self, other: Store) -> float:
        """Largest difference of any state vector, relative to the largest value of the other's vector."""
        from safetensors.numpy import load_file

        worst = 0.0
        for mine, its in zip(self.files, other.files, strict=True):
            ours, theirs = load_file(mine), load_file(its)
            assert np.array_equal(ours["token_ids"], theirs["token_ids"])
            difference = np.abs(ours["hidden_states"] - theirs["hidden_states"]).max(axis=-1)
            worst = max(worst, float((difference / np.abs(theirs["hidden_states"]).max(axis=-1)).max()))
        return worst


def traces(work: Path, config: Path) -> str:
    """A traces artifact of random tokens, the same in every work directory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from slipstream import verifier
    from slipstream.artifact import claim
    from slipstream.config import load_config

    lot, rows = random.Random(0), []
    for i in range(ROWS):
        ids = [lot.randrange(480) for _ in range(lot.randint(SHORTEST, LONGEST))]
        split = "train" if i < ROWS * 4 // 5 else "validation"
        mask = [0] * 8 + [1] * (len(ids) - 8)
        rows.append({"key": f"k{i:04d}", "split": split, "input_ids": ids, "loss_mask": mask, "prompt_tokens": 8})
    with claim(work, "traces", "random") as folder:
        pq.write_table(pa.Table.from_pylist(rows), folder.path / "traces.parquet")
        made = folder.commit(
            version=1,
            recipe={"verifier": verifier.identity(load_config(config).verifier)},
            inputs={},
            content="random",
            files=["traces.parquet"],
        )
    return made.path


def command_of(pid: int) -> str:
    """A process's command line; empty when it is gone."""
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs, zombies apart."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def below(case: Case, mark: str) -> int:
    """The process under the flow whose command line has `mark`."""
    from slipstream.process import descendants

    found = [pid for pid in descendants(case.flow) if mark in command_of(pid)]
    if not found:
        raise SystemExit(f"no process with {mark}: {[command_of(pid)[:80] for pid in descendants(case.flow)]}")
    return found[0]


API, ENGINE, SUPERVISOR = " -m vllm.entrypoints", "VLLM::EngineCore", "slipstream.process"


def killed_flow(case: Case) -> None:
    """The flow, early and late; each time the same command goes on."""
    for count in (ROWS // 10, ROWS * 6 // 10):
        case.start()
        case.wait(lambda count=count: case.stored() >= count)
        case.kill_flow()
    case.start()
    case.finish()


def killed_server(case: Case, *marks: str) -> None:
    """These processes of the server, one at each instant; the flow goes on by itself."""
    case.start()
    for count, mark in zip((ROWS // 10, ROWS * 6 // 10), marks, strict=True):
        case.wait(lambda count=count: case.stored() >= count)
        case.fault(api_of(case) if mark == API else below(case, mark))
    case.finish()


def api_of(case: Case) -> int:
    """The API server itself, not the supervisor that has its command line in its own."""
    from slipstream.process import descendants

    found = [pid for pid in descendants(case.flow) if API in command_of(pid) and SUPERVISOR not in command_of(pid)]
    return found[0]


def fill(folder: Path) -> Path:
    """Takes all the room that is left."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return filler


def filled_disk(case: Case, disk: Path) -> None:
    """Full early, and empty again; full late, and the flow killed meanwhile."""
    case.start()
    case.wait(lambda: case.stored() >= ROWS // 10)
    case.fault()
    filler = fill(disk)
    time.sleep(8)
    filler.unlink()
    case.wait(lambda: case.stored() >= ROWS * 6 // 10)
    filler = fill(disk)
    time.sleep(8)
    if case.stored() == ROWS:
        raise SystemExit("the disk was never short")
    case.kill_flow()
    filler.unlink()
    case.start()
    case.finish()


@contextmanager
def tmpfs(folder: Path) -> Iterator[Path]:
    """A small disk."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
        return
    from flows.embedded import prefect_api

    wanted = sys.argv[1:] or ["flow", "server", "supervisor", "disk"]
    cases: dict[str, Any] = json.loads(RESULT.read_text())["cases"] if sys.argv[1:] else {}
    with tempfile.TemporaryDirectory(prefix="crash-") as temporary, prefect_api(Path(temporary) / "prefect"):
        folder = Path(temporary)
        undisturbed = Case(folder / "undisturbed", folder / "undisturbed" / "work")
        undisturbed.start()
        undisturbed.finish()
        reference = Store(undisturbed.work)
        cases["undisturbed"] = undisturbed.figures(reference)

        def measure(name: str, work: Path, do: Callable[[Case], None]) -> None:
            if name not in wanted:
                return
            case = Case(folder / name, work)
            started = time.monotonic()
            do(case)
            cases[name] = case.figures(reference) | {"seconds": round(time.monotonic() - started, 1)}
            print(name, json.dumps(cases[name]), flush=True)

        measure("flow", folder / "flow" / "work", killed_flow)
        measure("server", folder / "server" / "work", lambda case: killed_server(case, API, ENGINE))
        measure("supervisor", folder / "supervisor" / "work", lambda case: killed_server(case, SUPERVISOR, SUPERVISOR))
        with tmpfs(folder / "small") as small:
            measure("disk", small / "work", lambda case: filled_disk(case, small))
    result = {
        "command": "PYTHONPATH=. python benchmarks/crash_features.py",
        "cpus": os.cpu_count(),
        "seconds": round(sum(case.get("seconds", 0) for case in cases.values())),
        "concurrency": CONCURRENCY,
        "shards": SHARDS,
        "cases": cases,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
