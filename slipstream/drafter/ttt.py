"""EAGLE-3's training-time test arranged for a GPU: the loss and gradients of speculators' forward pass, sooner.

`install` gives a speculators `Eagle3DraftModel` (one Llama layer, full attention) this forward pass instead of its own
(speculators.models.eagle3.core.Eagle3DraftModel.forward, 0.9.0).  What differs is how, not what:

* the output heads, drafter's and verifier's, run on supervised positions only, the rest of the logits was masked away;
* weights are cast to the compute type once a step and not once a use;
* attention is torch's flash kernel over the packed documents plus the chain's own keys (`ttt_attention`), so no block
  mask is built or compiled and any packed length will do;
* what lies between the matrix products is compiled in two pieces, without graph breaks;
* with `fp8` the linear layers of the decoder and `fc` multiply in float8 (torchao's rowwise recipe, e4m3 with a scale a
  row), weights and their gradients staying float32.

The accuracies count supervised targets only (speculators' conditional one also counts chains that run past the last
supervised token).  Measured: benchmarks/results/training.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch.nn import functional

from slipstream.drafter.ttt_attention import Layout, attend
from slipstream.errors import InputError
from slipstream.verifier_ends import capped

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LAYER = (
    "input_layernorm.weight",
    "hidden_norm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
REDUCTION_EPS = 1e-5  # speculators.losses.utils._LOSS_REDUCTION_EPS


def unsupported(model: Any) -> str | None:
    """Why this model keeps speculators' own forward pass; None when `install` can take it."""
    layer = model.config.transformer_layer_config
    if layer.model_type != "llama":
        return f"its layers are of type {layer.model_type}"
    if len(model.layers) != 1:
        return f"it has {len(model.layers)} layers"
    if model.uses_sliding_window_attn:
        return "its attention has a sliding window"
    if layer.attention_bias or layer.mlp_bias:
        return "its linear layers have biases"
    if layer.hidden_act != "silu":
        return f"its activation is {layer.hidden_act}"
    return None


def install(model: Any, fp8: bool = False) -> None:
    """Replaces the model's forward pass; raises InputError for a model that `unsupported` names or without torchao."""
    if why := unsupported(model):
        raise InputError(f"drafter.shape: the fast forward pass is not for this drafter: {why}")
    model.ttt = _Pieces(_fp8_linear() if fp8 else functional.linear)
    model.forward = MethodType(forward, model)


def _fp8_linear() -> Linear:
    """y = x @ w.T with both in float8_e4m3, scaled by row; raises InputError without torchao."""
    try:
        from torchao.float8.config import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    except ImportError as error:
        raise InputError(
            f"drafter.fp8_linears: torchao cannot be imported ({error}); install torchao or set it to false"
        ) from error
    config = Float8LinearConfig.from_recipe_name("rowwise")
    products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    multiply = LinearMMConfig(*(ScaledMMConfig(False, product.use_fast_accum, False, False) for product in products))

    def linear(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = matmul_with_hp_or_float8_args.apply(states, weight.t(), multiply, config)
        return product

    return linear


class _Pieces:
    """The parts of the decoder layer before and after its attention, compiled where they run on a GPU."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self._compiled: dict[str, Callable[..., Any]] = {}

    def run(self, name: str, *args: Any) -> Any:
        """The piece of this name; the first tensor says where."""
        piece = getattr(self, name)
        if not args[0].is_cuda:
            return piece(*args)
        if name not in self._compiled:
            self._compiled[name] = torch.compile(piece)
        return self._compiled[name](*args)

    def project(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`fc` over the concatenated auxiliary states."""
        return self.linear(states, weight)

    def before(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        weights: tuple[torch.Tensor, ...],
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
        norm_before_residual: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Residual float32 [T, hidden] and query, key, value [T, heads, head_dim] with their rotary positions."""
        embed_norm, hidden_norm, w_query, w_key, w_value = weights[:5]
        dtype, head_dim = w_query.dtype, cos.shape[-1]
        normed = _rms(hidden.float(), hidden_norm, eps)
        both = torch.cat([_rms(embeds.float(), embed_norm, eps), normed], dim=-1).to(dtype)
        query, key, value = (
            self.linear(both, weight).unflatten(-1, (-1, head_dim)) for weight in (w_query, w_key, w_value)
        )
        residual = normed if norm_before_residual else hidden.float()
        return residual, _rotate(query, cos, sin), _rotate(key, cos, sin), value.contiguous()

    def after(
        self, attended: torch.Tensor, residual: torch.Tensor, weights: tuple[torch.Tensor, ...], eps: float
    ) -> torch.Tensor:
        """The layer's output, float32 [T, hidden]."""
        w_output, post_norm, w_gate, w_up, w_down = weights[5:]
        hidden = residual + self.linear(attended.flatten(1), w_output)
        normed = _rms(hidden, post_norm, eps).to(w_gate.dtype)
        mixed = functional.silu(self.linear(normed, w_gate)) * self.linear(normed, w_up)
        return hidden + self.linear(mixed, w_down)


def _rms(states: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps) * gain


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions as transformers' Llama applies them, in float32; `cos` and `sin` are [T, head_dim]."""
    wide = states.float()
    first, second = wide.chunk(2, dim=-1)
    turned = wide * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
    return turned.to(states.dtype)


def forward(
    model: Any,
    hidden_states: torch.Tensor,
    input_ids: torch.Tensor,
    document_ids: torch.Tensor,
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    verifier_last_hidden_states: torch.Tensor,
    ttt_steps: int = 3,
    ttt_step_loss_decay: float = 1.0,
    loss_config: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    """No draft tokens, the loss, and speculators' metrics; arguments as speculators' forward pass, all [1, T, …]."""
    device = hidden_states.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.fc.weight.dtype
    with torch.autocast(device.type, enabled=False):
        return _forward(
            model,
            hidden_states[0].to(dtype),
            input_ids[0],
            document_ids[0],
            loss_mask[0].bool(),
            position_ids[0],
            verifier_last_hidden_states[0],
            ttt_steps,
            ttt_step_loss_decay,
            loss_config or {},
            dtype,
        )


def _forward(
    model: Any,
    auxiliary: torch.Tensor,
    tokens: torch.Tensor,
    documents: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    last: torch.Tensor,
    steps: int,
    decay: float,
    losses: Mapping[str, Any],
    dtype: torch.dtype,
) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    pieces, device, config = model.ttt, auxiliary.device, model.config
    weights, eps = _layer_weights(model, dtype), config.transformer_layer_config.rms_norm_eps
    hidden = pieces.run("project", _normed_auxiliary(model, auxiliary, dtype), model.fc.weight.to(dtype))
    # The only wait for the device: what decides shapes is needed here.
    on_host = torch.stack([documents, mask.to(documents.dtype)]).cpu()
    layout, rows = Layout.of(on_host[0], device), on_host[1].nonzero()[:, 0]
    supervised = rows.to(device, non_blocking=True)
    head = model.lm_head.weight.to(dtype)
    with torch.no_grad():
        targets = _targets(model, last.index_select(0, supervised), dtype)
        target_ids = targets.argmax(-1)
    alive = mask.clone()
    loss = hidden.new_zeros((), dtype=torch.float32)
    metrics: dict[str, torch.Tensor] = {}
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for step in range(steps):
        with torch.no_grad():
            embeds = model.embed_tokens(functional.pad(tokens[step:], (0, step)))
            cos, sin = model.rotary_emb(embeds[None].float(), (positions + step)[None])
        norm_first = config.norm_before_residual
        residual, query, key, value = pieces.run("before", embeds, hidden, weights, cos[0], sin[0], eps, norm_first)
        keys.append(key)
        values.append(value)
        attended = attend(query, keys, values, layout, key.shape[-1] ** -0.5)
        hidden = pieces.run("after", attended, residual, weights, eps)
        if config.norm_output:
            hidden = _rms(hidden, model.norm.weight.float(), eps)
        first = int((rows < step).sum())  # targets that no position drafts at this step
        held = supervised[first:] - step
        chosen = hidden.index_select(0, held)
        if not config.norm_output:
            chosen = functional.rms_norm(chosen, (chosen.shape[-1],), model.norm.weight.float(), eps)
        logits = functional.linear(chosen.to(dtype), head)
        part, terms = _loss(logits, targets[first:], losses, decay**step)
        loss = loss + part
        was_alive = alive.index_select(0, held)
        right = was_alive & (logits.detach().argmax(-1) == target_ids[first:])
        alive = torch.zeros_like(alive).index_copy(0, held, right)
        metrics |= _metrics(step, part.detach(), terms, right, was_alive)
    metrics["loss_sum"], metrics["loss_total"] = loss.detach().clone(), torch.ones((), device=device)
    return [], loss, metrics


def _layer_weights(model: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The decoder layer's weights in the order of `LAYER`: matrices in the compute type, norms in float32."""
    held = dict(model.layers[0].named_parameters())
    return tuple(held[name].to(dtype) if held[name].ndim == 2 else held[name].float() for name in LAYER)


def _normed_auxiliary(model: Any, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if model.input_norm is not None:
        return model.input_norm(states).to(dtype)
    if model.fc_norm is not None:
        parts = zip(model.fc_norm, states.chunk(len(model.fc_norm), dim=-1), strict=True)
        return torch.cat([norm(part) for norm, part in parts], dim=-1).to(dtype)
    return states


def _targets(model: Any, last: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The verifier's logits [n, draft vocabulary] for final states [n, hidden]."""
    logits = functional.linear(model.verifier_norm(last).to(dtype), model.verifier_lm_head.weight.to(dtype))
    return capped(logits, getattr(model.verifier_lm_head, "cap", None))  # verifier_parts.CappedHead


def _loss(
    logits: torch.Tensor, targets: torch.Tensor, losses: Mapping[str, Any], weight: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weighted mean over the rows and, of several terms, each one's (speculators.losses.utils.compound_loss)."""
    terms: dict[str, torch.Tensor] = {}
    total = logits.new_zeros((), dtype=torch.float32)
    for name, (function, share) in losses.items():
        each = function(logits[None], targets[None])[0] if len(logits) else logits.sum(-1)
        term = each.float().sum() * weight / (len(logits) + REDUCTION_EPS)
        total = total + share * term
        if len(losses) > 1:
            terms[f"{name}_loss"] = term.detach()
    return total, terms


def _metrics(
    step: int, loss: torch.Tensor, terms: Mapping[str, torch.Tensor], right: torch.Tensor, was_alive: torch.Tensor
) -> dict[str, torch.Tensor]:
    one = torch.ones_like(loss)
    correct = right.sum().float()
    found = {f"loss_{step}_sum": loss, f"loss_{step}_total": one}
    for name, value in terms.items():
        found |= {f"{name}_{step}_sum": value, f"{name}_{step}_total": one}
    return found | {
        f"full_acc_{step}_sum": correct,
        f"full_acc_{step}_total": torch.full_like(loss, float(len(right))),
        f"cond_acc_{step}_sum": correct,
        f"cond_acc_{step}_total": was_alive.sum().float(),
    }
