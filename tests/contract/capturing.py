"""Traces and a configuration for capture-features, without a model: servers are `stub_vllm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from stub_vllm import interpreter

from slipstream import verifier
from slipstream.artifact import Artifact, claim
from slipstream.config import RunConfig, load_config
from tests.conftest import ROOT


def configuration(folder: Path, servers: dict[str, Any], **features: Any) -> RunConfig:
    """deployments/smoke.yaml with work directory `folder` and these servers and features."""
    values = load_config(ROOT / "deployments" / "smoke.yaml").model_dump(mode="json")
    values["workdir"] = str(folder)
    values["verifier"]["path"] = str(ROOT / "slipstream" / "pocket" / "verifier")
    folder.mkdir(parents=True, exist_ok=True)
    python = str(interpreter(folder / "python"))
    values["servers"] |= {"python": python, "start_ahead": False, "startup_timeout_s": 300} | servers
    values["features"] |= {"probe_samples": 0, "probe_all_layers": False, "concurrency": 1} | features
    return RunConfig.model_validate(values)


def traces_of(config: RunConfig, rows: int, prompts: str = "") -> Artifact:
    """Finished traces of the prompts content `prompts`: `rows` rows of three to seven tokens."""
    made_with = {"verifier": verifier.identity(config.verifier)}
    ids = [[5 + i, *range(1, 3 + i % 5)] for i in range(rows)]
    table = [
        {
            "key": f"k{i:03d}",
            "split": "train" if i < rows - rows // 4 else "validation",
            "prompt_tokens": 1,
            "input_ids": tokens,
            "loss_mask": [0] + [1] * (len(tokens) - 1),
        }
        for i, tokens in enumerate(ids)
    ]
    with claim(config.root, "traces", f"rows{rows}") as folder:
        if (done := folder.complete()) is not None:
            return done
        pq.write_table(pa.Table.from_pylist(table), folder.path / "traces.parquet")
        return folder.commit(
            version=1,
            recipe=made_with,
            inputs={"prompts": prompts} if prompts else {},
            content=f"rows{rows}",
            files=["traces.parquet"],
            counts={"rows": rows},
        )
