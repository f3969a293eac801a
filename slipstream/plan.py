"""What a configuration will cost and whether it fits, before anything starts.

Works on any machine: while the verifier's folder or the prompts are absent it counts with the published shape
(`verifier.shape`), `prompts.expected_prompts` and `traces.expected_tokens_per_trace`.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream import verifier
from slipstream.artifact import MANIFEST
from slipstream.config import BYTES, DrafterConfig, RunConfig
from slipstream.drafter import shape as drafter_shape
from slipstream.errors import InputError
from slipstream.traces import origin
from slipstream.traces.gathered import gathering
from slipstream.traces.mixture import mixture
from slipstream.traces.sources import on_hub

RESERVE = 0.05  # share of the disk that a run leaves free


def gpus_here() -> int:
    """NVIDIA GPUs of this machine."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def free_bytes(path: Path) -> int:
    """Free bytes on the file system that `path` lies or will lie on."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _prompts(config: RunConfig) -> int:
    wanted = config.prompts
    absent = [source for source in wanted.sources if not Path(source.path).exists()]
    if absent and wanted.expected_prompts:  # a data set on the Hub as well: planning downloads nothing
        return min(wanted.expected_prompts, wanted.limit or wanted.expected_prompts)
    if missing := [source.path for source in absent if not on_hub(source)]:
        raise InputError(f"{missing[0]}: no such prompt file; without it set prompts.expected_prompts to plan")
    with gathering(None, wanted.split_seed) as gathered:
        tallies = gathered.read(wanted.sources, False, lambda reject: None, keep=False)
    weights = [source.weight for source in wanted.sources]
    return sum(mixture([tally.new for tally in tallies], weights, wanted.limit))


def _bytes_per_token(config: RunConfig, layers: int, hidden: int) -> int:
    from slipstream.features.recipe import store_dtype  # imports torch
    from slipstream.features.sample import Form

    stored = config.features.store != "none"
    return Form(layers, hidden, store_dtype(config)).bytes_per_token if stored else 0


def _captured(config: RunConfig) -> int:
    """Bytes of states that the row pool holds for this configuration; the capture's own plan knows of which rows."""
    from slipstream.features.recipe import pool_folder

    try:
        pool = pool_folder(config.root, config)
    except InputError:  # nothing is known of the verifier but its shape
        return 0
    return sum(path.stat().st_size for path in pool.glob("??/*.safetensors"))


def _passes(config: RunConfig) -> int:
    """Prefills of every token beside the pass that generates it: one, none, or one an epoch when nothing is stored."""
    if config.features.store == "none":
        return config.drafter.epochs
    return 0 if config.features.capture_while_generating else 1


def _drafter_parameters(config: RunConfig, shape: verifier.Shape) -> dict[str, int]:
    """Of the drafter that `drafter.build` makes: trained ones, and all with the verifier's embedding and the head."""
    draft, hidden = drafter_shape.resolve(config), shape.hidden_size
    layers = len(config.features.layer_ids)
    heads = draft.num_attention_heads * draft.head_dim
    kv_heads = draft.num_key_value_heads * draft.head_dim
    mlp = 3 * hidden * draft.intermediate_size
    decoder = 2 * hidden * (heads + 2 * kv_heads) + heads * hidden + mlp + 3 * hidden
    norms = hidden * (1 + layers * (draft.norm_before_fc + draft.fc_norm))
    head = config.vocabulary.size * hidden
    trained = layers * hidden * hidden + decoder + norms + head * config.drafter.train_lm_head
    return {
        "trained": trained,
        "total": trained + shape.vocab_size * hidden + head * (not config.drafter.train_lm_head),
    }


def _drafter_bytes(config: RunConfig, parameters: dict[str, int], embedding: int) -> int:
    """The most that a drafter's folder holds while it is made: checkpoints in float32, and the exports.

    `embedding` are the embedding's parameters.  Of `best_and_last` there are three at once, the best, the last and the
    one that is being written, and one inside an epoch, which a SIGTERM may leave without any being asked for.
    """
    drafter, total, trained = config.drafter, parameters["total"], parameters["trained"]
    kept = drafter.epochs if drafter.keep_checkpoints == "all" else min(drafter.epochs, 3)
    inside = 1 if drafter.epochs else 0
    initial = 1 if drafter.keep_initial or not drafter.epochs else 0
    moments = 2 * trained
    checkpoints = 4 * (kept * (total + moments) + inside * (trained + moments) + initial * total)
    flat = total - (0 if drafter.export_embeddings else embedding)
    return checkpoints + (drafter.epochs + initial) * BYTES[config.verifier.dtype] * (flat + total)


def _drafted(config: RunConfig) -> int:
    """Bytes of an unfinished training with these settings: going on with it needs no second room for them.

    A finished one may be of other features, as before every retraining, so it does not count.
    """
    wanted, found = config.drafter.recipe(), [0]
    for job in config.root.glob("drafter/*/job.json"):
        if job.with_name(MANIFEST).exists():
            continue
        try:
            held = DrafterConfig.model_validate(json.loads(job.read_bytes())["drafter"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if held.recipe() == wanted:
            found.append(sum(path.stat().st_size for path in job.parent.rglob("*") if path.is_file()))
    return max(found)


def plan(config: RunConfig) -> dict[str, Any]:
    """Tokens, bytes, hours, GPUs, free disk, and `fits` with the reasons against it.

    Raises InputError when the configuration contradicts itself (a layer id past the last, a draft vocabulary
    larger than the verifier's) or nothing is known about the verifier.
    """
    shape, source = verifier.known_shape(config.verifier)
    layer_ids = verifier.capture_ids(config.features.layer_ids, shape)
    if config.vocabulary.size > shape.vocab_size:
        raise InputError(
            f"vocabulary.size: {config.vocabulary.size} draft tokens are more than the verifier's {shape.vocab_size}"
        )
    count = _prompts(config)
    traced = round(count * (1 - config.prompts.held_out_ratio))
    imported = origin.imported(config).manifest().counts["tokens"] if config.traces.imported else 0
    tokens = imported or traced * config.traces.expected_tokens_per_trace
    bytes_per_token = _bytes_per_token(config, len(layer_ids), shape.hidden_size)
    store = tokens * bytes_per_token
    parameters = _drafter_parameters(config, shape)
    checkpoints = _drafter_bytes(config, parameters, shape.vocab_size * shape.hidden_size)
    free = free_bytes(config.root)
    trained_tokens = tokens * (1 - config.prompts.val_ratio) * config.drafter.epochs
    hours = {
        "traces": 0.0 if imported else tokens / config.rates.traces_tokens_per_s / 3600,
        "features": 0.0 if imported else tokens * _passes(config) / config.rates.features_tokens_per_s / 3600,
        "training": trained_tokens / config.rates.training_tokens_per_s / max(1, len(config.drafter.devices)) / 3600,
    }
    gpus = max(config.servers.gpus if config.servers.device == "cuda" else 0, len(config.drafter.devices))
    missing = 0 if imported else max(0, store - _captured(config))
    left = max(0, checkpoints - _drafted(config))
    needed = int((missing + left) * (1 + RESERVE) + config.features.disk_reserve_gib * 2**30)
    reasons = []
    if needed > free:
        reasons.append(f"{needed / 1e9:.1f} GB of disk needed under {config.root}, {free / 1e9:.1f} GB free")
    if gpus > (here := gpus_here()):
        reasons.append(f"{gpus} GPUs needed, {here} here")
    return {
        "name": config.name,
        "verifier": source,
        "prompts": count,
        "traced_prompts": traced,
        "tokens": tokens,
        "layer_ids": layer_ids,
        "store": config.features.store,
        "bytes_per_token": bytes_per_token,
        "feature_store_bytes": store,
        "checkpoint_bytes": checkpoints,
        "disk_free_bytes": free,
        "gpus": gpus,
        "gpus_here": gpus_here(),
        "servers": {"replicas": config.servers.replicas, "tensor_parallel": config.servers.tensor_parallel},
        "drafter_parameters": parameters,
        "hours": {name: round(value, 2) for name, value in hours.items()},
        "hours_total": round(sum(hours.values()), 2),
        "fits": not reasons,
        "reasons": reasons,
    }


def preflight(config: RunConfig) -> None:
    """Everything that can be known to be wrong before a server starts; raises InputError with one sentence."""
    from slipstream import serving
    from slipstream.drafter import warm_start_check  # imports torch
    from slipstream.features import beside_training
    from slipstream.traces import prompt_set
    from slipstream.vocabulary import kept

    verifier.check(config)
    verifier.identity(config.verifier)
    prompt_set.key(config.prompts)
    serving.require_environment(config.servers)
    require_runner(config)
    if config.drafter.init_from and not Path(config.drafter.init_from).is_dir():
        raise InputError(f"{config.drafter.init_from}: no such checkpoint folder; set drafter.init_from or remove it")
    warm_start_check.of_run(config)
    if config.vocabulary.mapping == "init_from":
        kept.of_warm_start(config, verifier.load_shape(config.verifier).vocab_size)
    drafter_shape.require_positions(config.verifier.max_model_len, drafter_shape.resolve(config), "drafter.shape")
    if config.features.store == "none":
        beside_training.count(config)
    if not (estimate := plan(config))["fits"]:
        raise InputError(f"{config.name}: does not fit here: {'; '.join(estimate['reasons'])}")


def require_runner(config: RunConfig) -> None:
    """Raises InputError when `servers.runner` needs a package that is not installed."""
    if config.servers.runner == "ray" and find_spec("prefect_ray") is None:
        raise InputError(
            "servers.runner: ray needs the package prefect-ray; pip install 'slipstream[ray]', or set it to threads"
        )
