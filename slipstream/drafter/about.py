"""What is known of a drafter before its first step, for the model cards of its epochs; no path of this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from slipstream import serving, verifier
from slipstream.artifact import Artifact
from slipstream.config import RunConfig, Source
from slipstream.drafter.shape import resolve
from slipstream.lineage import lineage

FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\s*\n", re.DOTALL)


def about(config: RunConfig, features: Artifact, vocabulary: Artifact) -> dict[str, Any]:
    """The facts by section: `run`, `verifier`, `data`, `mapping`, `shape`, `training`, `serve`."""
    steps = {step.stage: step.manifest() for step in (*lineage(features), *lineage(vocabulary))}
    counts = {stage: manifest.counts for stage, manifest in steps.items()}
    folder = verifier.folder_of(config.verifier)
    shape, trained = verifier.load_shape(config.verifier), config.drafter
    return {
        "run": config.name,
        "verifier": {
            "name": folder.name,
            "identity": verifier.identity(config.verifier),
            "model_type": shape.model_type,
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "license": published_license(folder),
        },
        "data": {
            "sources": [
                _source(source, counts.get("prompts", {}), index) for index, source in enumerate(config.prompts.sources)
            ],
            "imported": config.traces.imported is not None,
            **{name: counts["features"].get(name) for name in ("train", "validation", "tokens")},
            "max_tokens": config.traces.max_tokens,
            "sampling": [way.model_dump(mode="json", exclude_defaults=True) for way in config.traces.sampling],
            "layer_ids": config.features.layer_ids,
            "store": config.features.store,
        },
        "mapping": {
            "from": config.vocabulary.mapping,
            **{name: counts["vocabulary"].get(name) for name in ("size", "target_size", "forced")},
            **{name: counts["vocabulary"].get(name) for name in ("coverage_train", "coverage_validation")},
        },
        "shape": resolve(config).model_dump(mode="json"),
        "training": {
            **trained.model_dump(mode="json", include=set(TRAINING)),
            "devices": max(1, len(trained.devices)),
            "init_from": trained.init_from and Path(trained.init_from).name,
        },
        "serve": {
            "arguments": serving.arguments(
                config.verifier, config.servers.model_copy(update={"extra_args": []}), serving.ServerSpec("speculative")
            ),
            "tensor_parallel": config.servers.tensor_parallel,
            "dtype": config.verifier.dtype,
            "draft_tokens": config.acceptance.draft_tokens,
        },
    }


TRAINING = (
    *(
        "published",
        "train_lm_head",
        "epochs",
        "learning_rate",
        "scheduler",
        "warmup_ratio",
        "optimizer",
        "weight_decay",
    ),
    *("sequence_length", "ttt_steps", "ttt_step_loss_decay", "loss", "loss_weights", "noise", "compute_dtype"),
    *("fp8_linears", "seed"),
)


def _source(source: Source, counts: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A source by its name: a data set on the Hub keeps its own, a file or folder here only the last part."""
    here = Path(source.path)
    known = counts.get("sources", {}).get(str(index), {})
    return {
        "name": here.name if here.is_absolute() or here.suffix or here.exists() else source.path,
        **source.model_dump(
            mode="json", include={"weight", "domain", "split", "subset", "revision"}, exclude_none=True
        ),
        "used": known.get("used"),
    }


def published_license(folder: Path) -> str | None:
    """The license that the model card in a folder names in its front matter; None when none does."""
    try:
        found = FRONT_MATTER.match((folder / "README.md").read_text(encoding="utf-8"))
        values = yaml.safe_load(found.group(1)) if found else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    named = values.get("license") if isinstance(values, dict) else None
    return named if isinstance(named, str) else None
