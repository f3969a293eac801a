"""Muon for stacks of matrices: momentum, then the nearest orthogonal matrix as the update.

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers". torch's own Muon takes single matrices only, and
the pocket verifier's experts are stacks.
"""

import torch
from torch import Tensor

# quintic Newton-Schulz coefficients of the reference implementation
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrices: Tensor) -> Tensor:
    """`[…, m, n]` to about `U Vᵀ` of each matrix's singular value decomposition (singular values in 0.7 … 1.2)."""
    x: Tensor = matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Parameters of two or more dimensions; the last two are the matrix. `lr` is the update's root mean square × 5."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for same in shapes.values():
                updates = []
                for p in same:
                    if p.grad is None:
                        raise ValueError("Muon.step needs a gradient for every parameter")
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]))
                scale = 0.2 * max(same[0].shape[-2:]) ** 0.5
                for p, update in zip(same, orthogonalize(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * scale)
