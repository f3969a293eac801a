"""Trains the pocket verifier: one loop, Muon for the matrices, AdamW for the rest, balanced experts.

On a GPU every expert is computed for every token and weighted by the router's choice (zero for six of eight): two
matrix products instead of eight gathers that wait for the host. On two CPU cores the gathers are faster (1.1 s a step
against 1.5 s). Experts are balanced the way DeepSeek-V3 does it, without an auxiliary loss: a bias on the router's
scores moves against each expert's load (so the exported `e_score_correction_bias` is not zero).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3ForCausalLM

from slipstream.pocket.muon import Muon
from slipstream.pocket.traces import Batch


@dataclass(frozen=True)
class Recipe:
    """Steps, rows a step, learning rates (peak, linear to zero), warm-up steps, load-balancing rate."""

    steps: int
    rows: int = 64
    matrix_lr: float = 0.002
    other_lr: float = 0.006
    warmup: int = 100
    balance: float = 0.002


def all_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`DeepseekV3Experts.forward` without a loop: hidden `[T, H]`, chosen and weights `[T, k]`, returns `[T, H]`."""
    count, both, width = self.gate_up_proj.shape
    gate, up = (hidden @ self.gate_up_proj.view(count * both, width).T).view(-1, count, both).chunk(2, dim=-1)
    share = torch.zeros(len(hidden), count, dtype=hidden.dtype, device=hidden.device)
    share = share.scatter(1, chosen, weights.to(hidden.dtype))
    inner = F.silu(gate) * up * share.unsqueeze(-1)
    mixed: Tensor = inner.flatten(1) @ self.down_proj.transpose(1, 2).reshape(count * both // 2, width)
    return mixed


def routers(model: DeepseekV3ForCausalLM) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def use_all_experts(model: DeepseekV3ForCausalLM) -> None:
    """Swaps the experts' forward in place."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.forward = MethodType(all_experts, layer.mlp.experts)


def optimizers(model: DeepseekV3ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices, others = list[nn.Parameter](), list[nn.Parameter]()
    for name, p in model.named_parameters():
        hidden = p.dim() >= 2 and not any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate.weight"))
        (matrices if hidden else others).append(p)
    fused = next(model.parameters()).is_cuda
    return [
        Muon(matrices, lr=recipe.matrix_lr),
        torch.optim.AdamW(others, lr=recipe.other_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused),
    ]


def train(
    model: DeepseekV3ForCausalLM,
    draw: Callable[[], Batch],
    recipe: Recipe,
    say: Callable[[str], None] = print,
) -> float:
    """Trains `model` in place on its device; returns the seconds it took. `draw` gives the next batch."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        use_all_experts(model)
    else:
        model.set_experts_implementation("eager")
    model.train()
    loads: list[Tensor] = []
    hooks = [
        gate.register_forward_hook(lambda _m, _i, out: loads.append(F.one_hot(out[2], 8).sum(dim=(0, 1)).float()))
        for gate in routers(model)
    ]
    steppers = optimizers(model, recipe)
    peaks = [s.param_groups[0]["lr"] for s in steppers]
    total, began, tokens = torch.zeros((), device=device), time.perf_counter(), 0
    for step in range(1, recipe.steps + 1):
        fraction = min(step / recipe.warmup, 1 - (step - 1) / recipe.steps)
        for stepper, peak in zip(steppers, peaks, strict=True):
            stepper.param_groups[0]["lr"] = peak * fraction
        batch = draw()
        loads.clear()
        ids, labels = batch.ids.to(device, non_blocking=True), batch.labels.to(device, non_blocking=True)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        with torch.no_grad():
            for gate, load in zip(routers(model), loads, strict=True):
                gate.e_score_correction_bias += recipe.balance * fraction * torch.sign(load.mean() - load)
        total += loss.detach()
        tokens += batch.ids.numel()
        if step % 100 == 0 or step == recipe.steps:
            seconds = time.perf_counter() - began
            mean = total.item() / (step % 100 or 100)
            say(f"step {step} loss {mean:.4f} {step / seconds:.2f} steps/s {tokens / seconds:.0f} tokens/s")
            total.zero_()
    for hook in hooks:
        hook.remove()
    model.train(False)
    return time.perf_counter() - began
