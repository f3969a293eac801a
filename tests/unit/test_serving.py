"""vLLM servers: command line, environment, readiness; no server is started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from stub_server import Capture, StubServer

from slipstream import serving
from slipstream.config import ServersConfig, VerifierConfig
from slipstream.errors import InputError, ServerError
from slipstream.serving import Endpoint

ROOT = Path(__file__).parents[2]


def line(spec: serving.ServerSpec, verifier: dict[str, Any] | None = None, **servers: Any) -> list[str]:
    """The command line of a server."""
    config = ServersConfig(python=sys.executable, **servers)
    return serving.command(VerifierConfig(path="v", **(verifier or {})), config, spec, 1234)


def value(command: list[str], flag: str) -> str:
    """What follows a flag."""
    return command[command.index(flag) + 1]


def test_extraction_captures_what_is_asked_and_caches_no_prefix(tmp_path: Path) -> None:
    command = line(serving.extraction_server([2, 30, 58, 61], tmp_path))
    assert "--no-enable-prefix-caching" in command
    speculative = json.loads(value(command, "--speculative-config"))
    ids = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert (speculative["method"], ids) == ("extract_hidden_states", [2, 30, 58, 61])
    transfer = json.loads(value(command, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "ExampleHiddenStatesConnector"
    assert transfer["kv_connector_extra_config"]["shared_storage_path"] == str(tmp_path)


def test_the_fp8_store_has_a_connector_of_its_own(tmp_path: Path) -> None:
    given = json.loads(value(line(serving.extraction_server([1], tmp_path)), "--kv-transfer-config"))
    fp8 = json.loads(value(line(serving.extraction_server([1], tmp_path, fp8=True)), "--kv-transfer-config"))
    assert "kv_connector_module_path" not in given
    module = ROOT / "infra/serve/plugin" / (fp8["kv_connector_module_path"].replace(".", "/") + ".py")
    assert f"class {fp8['kv_connector']}(" in module.read_text()
    assert {name: fp8[name] for name in given} == given | {"kv_connector": fp8["kv_connector"]}


def test_extraction_has_room_for_a_trace_of_full_length(tmp_path: Path) -> None:
    """vLLM refuses a prompt of max_model_len tokens: it must generate one more."""
    given = {"max_model_len": 512}
    assert value(line(serving.generation_server(), given), "--max-model-len") == "512"
    assert value(line(serving.extraction_server([1], tmp_path), given), "--max-model-len") == "513"


def test_speculation(tmp_path: Path) -> None:
    speculative = json.loads(value(line(serving.speculative_server(tmp_path, 3)), "--speculative-config"))
    assert speculative == {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}


def test_servers_listen_on_the_loopback_only() -> None:
    assert value(line(serving.generation_server()), "--host") == "127.0.0.1"


def test_code_of_the_verifier_runs_only_when_pinned() -> None:
    assert "--trust-remote-code" not in line(serving.generation_server())
    trusted = line(serving.generation_server(), {"trust_remote_code": True, "revision": "abc"})
    assert "--trust-remote-code" in trusted
    assert value(trusted, "--revision") == "abc"


def test_devices() -> None:
    gpu = line(serving.generation_server(), gpus=8, tensor_parallel=4)
    assert value(gpu, "--tensor-parallel-size") == "4"
    assert "--enforce-eager" not in gpu
    cpu = line(serving.generation_server(), device="cpu")
    assert "--enforce-eager" in cpu
    assert "--tensor-parallel-size" not in cpu


def test_reasoning_parser_and_extra_arguments() -> None:
    assert value(line(serving.generation_server()), "--reasoning-parser") == "kimi_k2"
    plain = line(serving.generation_server(), {"reasoning_parser": None}, extra_args=["--seed", "1"])
    assert "--reasoning-parser" not in plain
    assert plain[-2:] == ["--seed", "1"]


def test_the_environment_is_offline_and_has_its_gpus(tmp_path: Path) -> None:
    gpu = serving.environment(ServersConfig(gpus=8, tensor_parallel=4), tmp_path, ["4", "5", "6", "7"])
    assert gpu["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert (gpu["HF_HUB_OFFLINE"], gpu["VLLM_NO_USAGE_STATS"], gpu["DO_NOT_TRACK"]) == ("1", "1", "1")
    cpu = serving.environment(ServersConfig(device="cpu", kv_cache_gib=2), tmp_path, [])
    assert (cpu["VLLM_CPU_KVCACHE_SPACE"], cpu["OMP_NUM_THREADS"]) == ("2", "1")
    assert "CUDA_VISIBLE_DEVICES" not in cpu


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, [["0", "1"], ["2", "3"]]),
        ("4,5,6,7", [["4", "5"], ["6", "7"]]),
        ("3, 1,0,2", [["3", "1"], ["0", "2"]]),
        ("GPU-8932f937,GPU-1,MIG-GPU-2/1/0,MIG-3", [["GPU-8932f937", "GPU-1"], ["MIG-GPU-2/1/0", "MIG-3"]]),
    ],
)
def test_replicas_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None, expected: list[list[str]]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    servers = ServersConfig(gpus=4, tensor_parallel=2)
    assert [serving.visible_gpus(servers, replica) for replica in range(servers.replicas)] == expected
    assert serving.visible_gpus(ServersConfig(device="cpu"), 0) == []


@pytest.mark.parametrize(
    ("allowed", "listed"), [("", 0), ("-1", 0), ("NoDevFiles", 0), ("2", 1), ("GPU-1,GPU-2,GPU-3", 3)]
)
def test_too_few_visible_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, allowed: str, listed: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    servers = ServersConfig(gpus=4, tensor_parallel=2)
    with pytest.raises(
        InputError, match=f"CUDA_VISIBLE_DEVICES={allowed}: {listed} GPUs are free, and server 1 needs 2"
    ):
        serving.visible_gpus(servers, 1)


def test_a_missing_serve_environment_is_named() -> None:
    with pytest.raises(InputError, match=r"no-python: no serve environment here; run `make install`"):
        serving.require_environment(ServersConfig(python="no-python"))


def test_a_named_endpoint(stub: StubServer) -> None:
    endpoint = serving.connect(stub.url + "/")
    assert endpoint == Endpoint(stub.url, "stub")
    assert endpoint.metrics_url == stub.url.removesuffix("/v1") + "/metrics"
    assert stub.asked("/v1/completions") == [{"model": "stub", "prompt": [1], "max_tokens": 1, "temperature": 0}]


def test_nobody_there() -> None:
    with StubServer() as stub:
        url = stub.url
    with pytest.raises(ServerError, match="no OpenAI-compatible server answers there"):
        serving.connect(url)


def test_ready_is_a_generated_token_and_not_an_open_port(stub: StubServer) -> None:
    stub.on_capture(lambda tokens, number: Capture(status=503))
    with pytest.raises(ServerError, match=r"no token within .* HTTP 503"):
        serving.wait_until_ready(Endpoint(stub.url, "stub"), None, 0.3)
    stub.on_capture(lambda tokens, number: Capture())
    serving.wait_until_ready(Endpoint(stub.url, "stub"), None, 5)


def test_a_server_that_dies_says_why(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nraise ValueError('no such model')\n")
    python.chmod(0o755)
    servers = ServersConfig(python=str(python), device="cpu", startup_timeout_s=20)
    log = tmp_path / "server.log"
    verifier, spec = VerifierConfig(path="v"), serving.generation_server()
    with (
        pytest.raises(ServerError, match=r"server\.log: .*status 1 .*ValueError: no such model"),
        serving.serve(verifier, servers, spec, log, tmp_path / "cache"),
    ):
        pass
