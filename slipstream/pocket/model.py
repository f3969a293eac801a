"""The pocket verifier's shape, and its directory in Kimi-K2.5's form.

A `DeepseekV3ForCausalLM` of 2.9 M parameters: hidden 128, six layers (one dense, five with eight experts, two chosen,
one shared), MLA with four heads. `kv_lora_rank` 512 and `qk_rope_head_dim` 64 are large for the rest because vLLM's
CPU kernel for MLA exists for these two widths only.

`export(model, tokenizer, folder)` writes what vLLM's `KimiK25ForConditionalGeneration` serves with
`--language-model-only`: a top-level `kimi_k25` config with a nested `text_config`, weights under `language_model.`, one
matrix an expert, an index. There is no vision tower. `load_text_model(folder)` reads
such a directory back into transformers.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from slipstream.pocket.tokenizer import VOCAB_SIZE, token_id

WEIGHTS_FILE = "model-00001-of-00001.safetensors"
PREFIX = "language_model."

TEXT_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "initializer_range": 0.02,
}
"""`text_config` values that both transformers and vLLM read. Kimi-K2.5's own where size does not matter."""

ROPE = {
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
ROPE_THETA = 50000.0


def text_config(bos: int, eos: int, pad: int) -> DeepseekV3Config:
    """The shape as transformers' configuration; the three token ids are the tokenizer's."""
    rope = {"rope_type": "yarn", "rope_theta": ROPE_THETA, **ROPE}
    return DeepseekV3Config(**TEXT_SHAPE, rope_parameters=rope, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)


def served_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The `config.json` of the directory, with token ids from `tokenizer`."""
    bos, eos, pad, media = (token_id(tokenizer, t) for t in ("[BOS]", "<|im_end|>", "[PAD]", "<|media_pad|>"))
    text = {
        **TEXT_SHAPE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        # transformers does not keep these two, and vLLM routes by softmax without them
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "rope_theta": ROPE_THETA,
        "rope_scaling": {"type": "yarn", **ROPE},
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": "bfloat16",
    }
    vision = {
        "model_type": "kimi_k25_vision",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": vision,
        "media_placeholder_token_id": media,
        "image_token_id": media,
        "projection_hidden_size": vision["hidden_size"],
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": "bfloat16",
    }


def unpack_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From transformers' packed experts to one matrix an expert.

    `….experts.gate_up_proj [E, 2 I, H]` becomes `….experts.<e>.gate_proj.weight` and `.up_proj.weight` `[I, H]`,
    `….experts.down_proj [E, H, I]` becomes `….experts.<e>.down_proj.weight [H, I]`; other tensors stay.
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(".experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for e, both in enumerate(tensor):
                out[f"{stem}{e}.gate_proj.weight"], out[f"{stem}{e}.up_proj.weight"] = both.chunk(2)
        elif name.endswith(".experts.down_proj"):
            stem = name.removesuffix("down_proj")
            out |= {f"{stem}{e}.down_proj.weight": down for e, down in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def pack_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of `unpack_experts`."""
    out = {k: v for k, v in state.items() if ".experts." not in k}
    stems = sorted({m.group(1) for k in state if (m := re.match(r"(.+\.experts\.)\d+\.", k))})
    for stem in stems:
        count = 1 + max(int(k.removeprefix(stem).split(".")[0]) for k in state if k.startswith(stem))
        gate, up, down = (
            [state[f"{stem}{e}.{part}_proj.weight"] for e in range(count)] for part in ("gate", "up", "down")
        )
        out[f"{stem}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        out[f"{stem}down_proj"] = torch.stack(down)
    return out


def export(model: DeepseekV3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes config, bf16 weights and index, generation and preprocessor files into `folder`, which must exist.

    The routers' `e_score_correction_bias` stays float32, as in Kimi-K2.5. The tokenizer's own files are
    `slipstream.pocket.tokenizer.save`'s.
    """
    state = {}
    for name, tensor in unpack_experts(model.state_dict()).items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        state[PREFIX + name] = tensor.detach().cpu().to(dtype).contiguous()
    save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = served_config(tokenizer)
    total = sum(t.numel() * t.element_size() for t in state.values())
    patches = {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 256, "patch_limit_on_one_side": 16}
    video = {"sample_fps": 2.0, "temporal_merge_kernel_size": 4, "in_patch_limit_each_frame": 64}
    statistics = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    documents: dict[str, dict[str, Any]] = {
        "config.json": config,
        "model.safetensors.index.json": {
            "metadata": {"total_size": total},
            "weight_map": dict.fromkeys(sorted(state), WEIGHTS_FILE),
        },
        "generation_config.json": {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "preprocessor_config.json": {
            "image_processor_type": "Kimi_K25ImageProcessor",
            "media_proc_cfg": {**patches, **video, **statistics, "fixed_output_tokens": None},
        },
    }
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def fresh_model(tokenizer: Tokenizer) -> DeepseekV3ForCausalLM:
    """An untrained model on the CPU in float32; torch's seed decides its weights."""
    bos, eos, pad = (token_id(tokenizer, t) for t in ("[BOS]", "<|im_end|>", "[PAD]"))
    return new_model(text_config(bos, eos, pad))


def new_model(config: DeepseekV3Config) -> DeepseekV3ForCausalLM:
    untyped: Any = DeepseekV3ForCausalLM
    model: DeepseekV3ForCausalLM = untyped(config)
    return model


def load_text_model(folder: Path) -> DeepseekV3ForCausalLM:
    """The text model of a directory that `export` wrote, float32, in eval mode, on the CPU: the reference for tests.

    Raises RuntimeError when a tensor is missing, unexpected or of another shape.
    """
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    config = text_config(text["bos_token_id"], text["eos_token_id"], text["pad_token_id"])
    model = new_model(config)
    state = {k.removeprefix(PREFIX): v for k, v in load_file(folder / WEIGHTS_FILE).items()}
    model.load_state_dict(pack_experts(state), strict=True)
    model.train(False)
    return model
