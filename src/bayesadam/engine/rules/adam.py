"""Adam and AdamW, by torch's own fused kernel: the rule whose state the paper reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

from bayesadam.engine.network import Network, unflatten
from bayesadam.engine.rules.laplace_prior import shrink
from bayesadam.engine.rules.rule import Number, Rule, State, Step

EPS = 1e-8
# As many pieces as torch's fused Adam takes in one launch: a block of a GPU has one piece, however long.
_PIECES = 30


@dataclass(frozen=True)
class Adam(Rule):
    """m ← β₁ m + (1−β₁) g, v ← β₂ v + (1−β₂) g², θ ← θ − α m̂/(√v̂ + ε).

    Attributes:
        betas: (β₁, β₂).
        weight_decay: λ of the penalty (λ/2)|θ|², or of AdamW's decay where `decoupled`.
        decoupled: AdamW in place of Adam.
        sparsity: λ of a Laplace prior, the penalty λ|θ|₁; v never sees it.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    decoupled: bool = False
    sparsity: float = 0.0

    def start(self, weights: Tensor, n_data: Number) -> State:
        """m, v and the count of steps."""
        return adam_state(weights)

    def update(self, weights: Tensor, gradient: Tensor, state: State, noise: Tensor | None, step: Step) -> None:
        """torch's Adam, then the proximal step of the Laplace prior where there is one."""
        decay, decoupled = self.weight_decay, self.decoupled
        adam_update(weights, gradient, state, lr=step.lr, betas=self.betas, weight_decay=decay, decoupled=decoupled)
        if self.sparsity:
            metric = (state["exp_avg_sq"] / step.second).sqrt_().add_(EPS)
            shrink(weights, metric, lr=step.lr, sparsity=self.sparsity)


def adam_state(weights: Tensor) -> State:
    """Zeros for m, v and the count of steps, which has one entry per piece that the kernel is given."""
    step = torch.zeros(len(_pieces(weights)), device=weights.device)
    return {"exp_avg": torch.zeros_like(weights), "exp_avg_sq": torch.zeros_like(weights), "step": step}


def adam_update(
    weights: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Number,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> None:
    """One step of Adam, in place."""
    torch_adam(
        _pieces(weights),
        _pieces(gradient),
        _pieces(state["exp_avg"]),
        _pieces(state["exp_avg_sq"]),
        max_exp_avg_sqs=[],
        state_steps=list(state["step"].unbind()),
        fused=True,
        capturable=weights.device.type == "cuda",
        decoupled_weight_decay=decoupled,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=EPS,
        maximize=False,
    )


def second_moment(state: Mapping[str, Tensor], beta2: float) -> Tensor:
    """v̂ = v/(1 − β₂ᵗ), (s, weights); zeros before the first step."""
    steps = state["step"][0].double()
    return state["exp_avg_sq"] / (1 - beta2**steps).clamp(min=torch.finfo(torch.float32).tiny).float()


def optimizer_state_dict(
    network: Network, state: Mapping[str, Tensor], index: int, rule: Adam, *, lr: float
) -> dict[str, Any]:
    """One network's part of the state, as the state dict of torch's Adam or AdamW for that network alone."""
    parts = {key: unflatten(network, state[key]) for key in ("exp_avg", "exp_avg_sq")}
    names = list(network.shapes())
    entries = {
        place: {"step": state["step"][0].cpu(), **{key: part[name][index].cpu() for key, part in parts.items()}}
        for place, name in enumerate(names)
    }
    group = {"lr": lr, "betas": rule.betas, "eps": EPS, "weight_decay": rule.weight_decay, "amsgrad": False}
    group |= {"decoupled_weight_decay": rule.decoupled, "params": [*entries], "param_names": names}
    return {"state": entries, "param_groups": [group]}


def _pieces(tensor: Tensor) -> list[Tensor]:
    if tensor.device.type == "cpu":
        return [tensor]
    return list(torch.split(tensor.view(-1), -(-tensor.numel() // _PIECES)))
