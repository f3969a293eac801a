"""Any EAGLE-3 checkpoint folder, read as one thing: a speculators config spelled out, tensors by speculators' names.

Ours, speculators' own, and flat ones of other makers (`midlayer.*` or `layers.0.*`, with or without a `model.` prefix,
in one file or in shards).  Whatever is exported goes through this, so that no tensor is lost on the way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from slipstream import vocabulary
from slipstream.drafter import described
from slipstream.drafter.warm_start_source import canonical
from slipstream.errors import Damaged, InputError

CONFIG = "config.json"
VERIFIERS = ("verifier_norm.", "verifier_lm_head.")  # the verifier's own, for training only
MAPS, EMBEDDING = ("d2t", "t2d"), "embed_tokens.weight"


@dataclass(frozen=True)
class Opened:
    """A checkpoint: `config` is a speculators `config.json` whose decoder is spelled out."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def aux_ids(self) -> list[int]:
        """The auxiliary layer ids, by vLLM's convention."""
        return list(self.config["eagle_aux_hidden_state_layer_ids"])


def read(folder: Path, layer_ids: Sequence[int] | None = None) -> Opened:
    """The checkpoint in `folder`; `layer_ids` are the auxiliary ones, which go before what the checkpoint says.

    Raises InputError for a folder that holds no EAGLE-3 drafter, for what is missing in one, and for tensors that do
    not fit its config; Damaged for a mapping that breaks an invariant.
    """
    path = folder / CONFIG
    config, given = spelled_out(described.load(path), path, layer_ids), _files(folder)
    _check(folder, config, given)
    return Opened(folder, config, {name: given[name] for name in given if not name.startswith(VERIFIERS)})


def _files(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder}: no .safetensors file, so there are no weights to export")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            for name, tensor in load_file(file).items():
                if (known := canonical(name)) in tensors:
                    raise InputError(f"{file}: tensor {known} is there twice; keep the drafter's own files in {folder}")
                tensors[known] = tensor
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: cannot be read as safetensors ({error}); fetch the checkpoint again") from error
    return tensors


def spelled_out(config: Mapping[str, Any], path: Path, layer_ids: Sequence[int] | None = None) -> dict[str, Any]:
    """The speculators config of a config.json of either form, with its decoder's fields spelled out.

    The file may leave out what transformers has a default for; vLLM reads the fields without transformers' class, so
    that they would be missing there.  `layer_ids` go before the file's.
    """
    from transformers import AutoConfig, PreTrainedConfig

    says = described.in_speculators_form(config, str(path))
    try:
        full = AutoConfig.for_model(**{"model_type": "llama", **says["transformer_layer_config"]}).to_dict()
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: transformers cannot read its transformer_layer_config ({error})") from error
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {"_name_or_path", "output_attentions"}
    own = {name: value for name, value in full.items() if name not in common or name == "model_type"}
    if not (ids := layer_ids or says.get(described.IDS)):
        raise InputError(
            f"{path}: no {described.IDS}, so nothing says which states it reads; name them with --layer-ids"
        )
    return {**says, described.IDS: list(ids), "transformer_layer_config": own}


def expected(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a drafter's tensors but the maps.  Source: speculators 0.9.0, models/eagle3/core.py."""
    layer, ids = config["transformer_layer_config"], config["eagle_aux_hidden_state_layer_ids"]
    hidden, heads, inner = layer["hidden_size"], layer["head_dim"], layer["intermediate_size"]
    queries, keys = layer["num_attention_heads"] * heads, layer["num_key_value_heads"] * heads
    states = len(ids) * (config.get("target_hidden_size") or hidden)
    attention = {"q_proj": (queries, 2 * hidden), "k_proj": (keys, 2 * hidden), "v_proj": (keys, 2 * hidden)}
    attention["o_proj"] = (hidden, queries)
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (layer["vocab_size"], hidden),
        "fc.weight": (hidden, states),
        **{f"layers.0.self_attn.{name}.weight": shape for name, shape in attention.items()},
        **{f"layers.0.mlp.{name}.weight": shape for name, shape in mlp.items()},
        **{f"layers.0.{name}.weight": (hidden,) for name in norms},
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    if layer.get("model_type") == "qwen3":
        shapes |= {f"layers.0.self_attn.{name}.weight": (heads,) for name in ("q_norm", "k_norm")}
    for flag, part, projections in (("attention_bias", "self_attn", attention), ("mlp_bias", "mlp", mlp)):
        if layer.get(flag):
            shapes |= {f"layers.0.{part}.{name}.bias": shape[:1] for name, shape in projections.items()}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (states,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (states // len(ids),) for i in range(len(ids))}
    return shapes


def _check(folder: Path, config: Mapping[str, Any], given: Mapping[str, torch.Tensor]) -> None:
    """Every tensor is accounted for: wanted ones are there with their shape, and no other is."""
    shapes, layer = expected(config), config["transformer_layer_config"]
    if layer["num_hidden_layers"] != 1:
        raise InputError(f"{folder}: {layer['num_hidden_layers']} decoder layers; drafters of one are exported")
    mapped = config["draft_vocab_size"] != layer["vocab_size"]
    if missing := [name for name in MAPS if mapped and name not in given]:
        raise InputError(
            f"{folder}: no {' and no '.join(missing)}, and its {config['draft_vocab_size']} draft tokens are not the "
            f"verifier's {layer['vocab_size']}: without the mapping every draft id would mean another token"
        )
    if missing := [name for name in shapes if name not in given and name != EMBEDDING]:
        raise InputError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all)")
    for name, tensor in given.items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise InputError(
                f"{folder}: tensor {name} is {list(tensor.shape)}, and its config makes it {list(shapes[name])}"
            )
    if strange := sorted(name for name in given.keys() - shapes.keys() if not name.startswith((*VERIFIERS, *MAPS))):
        raise InputError(f"{folder}: tensor {strange[0]} has no place in a drafter of this config")
    if mapped:
        _check_maps(folder, config, given)


def _check_maps(folder: Path, config: Mapping[str, Any], given: Mapping[str, torch.Tensor]) -> None:
    wanted = {"d2t": config["draft_vocab_size"], "t2d": config["transformer_layer_config"]["vocab_size"]}
    for name, size in wanted.items():
        if tuple(given[name].shape) != (size,):
            raise Damaged(f"{folder}: {name} is {list(given[name].shape)}, and its config makes it [{size}]")
    try:
        vocabulary.check(given["t2d"].numpy(), given["d2t"].numpy())
    except Damaged as error:
        raise Damaged(f"{folder}: {error}") from error


def whole(folder: Path) -> bool:
    """Whether config and weights in `folder` can be read; files set aside as damaged are empty."""
    try:
        json.loads((folder / CONFIG).read_bytes())
        with safe_open(folder / "model.safetensors", framework="numpy"):
            return True
    except (OSError, ValueError, SafetensorError):
        return False
