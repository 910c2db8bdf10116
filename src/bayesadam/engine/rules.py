"""How the weights of a stack of networks learn: Adam and AdamW, by torch's fused kernel."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = dict[str, Tensor]
EPS = 1e-8
# The number of pieces that torch's fused Adam takes in one launch: a block of a GPU has one piece, however long.
_PIECES = 30


@dataclass(frozen=True)
class Adam:
    """m ← β₁ m + (1−β₁) g, v ← β₂ v + (1−β₂) g², θ ← θ − α m̂/(√v̂ + ε).

    `weight_decay` is λ of the penalty (λ/2)|θ|², or of AdamW's decay where `decoupled`.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    decoupled: bool = False

    def start(self, weights: Tensor) -> State:
        """Zeros for m, v and the count of steps, which has one entry per piece that the kernel is given."""
        step = torch.zeros(len(_pieces(weights)), device=weights.device)
        return {"exp_avg": torch.zeros_like(weights), "exp_avg_sq": torch.zeros_like(weights), "step": step}

    def update(self, weights: Tensor, gradient: Tensor, state: State, lr: float | Tensor) -> None:
        """One step, in place."""
        kernel: Any = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        pieces, step = map(_pieces, (weights, gradient, state["exp_avg"], state["exp_avg_sq"])), state["step"].add_(1)
        settings = {"lr": lr, "beta1": self.betas[0], "beta2": self.betas[1], "weight_decay": self.weight_decay}
        kernel(*pieces, [], list(step.unbind()), **settings, eps=EPS, amsgrad=False, maximize=False)


def _pieces(tensor: Tensor) -> list[Tensor]:
    return [tensor] if tensor.is_cpu else list(torch.split(tensor.view(-1), -(-tensor.numel() // _PIECES)))
