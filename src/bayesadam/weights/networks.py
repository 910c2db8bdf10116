"""What posteriors ask of a network, and write to it: weights, rows for padding, running statistics of batch norms.

Predictions depend on running statistics and on frozen weights, and no posterior holds them, so there are checks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam._alone import alone_with, unwrap
from bayesadam._shards import is_sharded, own_part
from bayesadam._warnings import warn
from bayesadam.readers.match import own_parameters
from bayesadam.weights.named import AnyPath, Named

_NAMES = ("running_mean", "running_var")
# Squares of gradients that are nothing but rounding, over those of their layer's weight.
_ROUNDING = 1e-6
# Statistics are of about so many numbers of a tensor.
_SAMPLE = 1 << 16
_BY_ROUNDING = 1e-2


def running_statistics(model: nn.Module) -> dict[str, list[float]]:
    """Mean and Euclidean norm of every running mean and variance, by name.

    >>> running_statistics(nn.BatchNorm1d(4))
    {'running_mean': [0.0, 0.0], 'running_var': [1.0, 2.0]}
    """
    named = unwrap(model).named_buffers()
    return _statistics((name, buffer) for name, buffer in named if name.rpartition(".")[2] in _NAMES)


def unheld_statistics(model: nn.Module, held: Collection[str]) -> dict[str, list[float]]:
    """The same of the running statistics and of the parameters that a posterior does not hold, such as frozen ones."""
    rest = ((name, p) for name, p in unwrap(model).named_parameters() if name not in held and p.is_floating_point())
    return running_statistics(model) | _statistics(rest)


def _statistics(named: Iterable[tuple[str, Tensor]]) -> dict[str, list[float]]:
    """Mean and norm of each tensor, of a large one those of every k-th number."""
    some = {name: _some(tensor).double() for name, tensor in named if tensor.numel() and not is_sharded(tensor)}
    return {name: [float(part.mean()), float(part.norm())] for name, part in some.items()}


def _some(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLE)]


def writes_to_statistics(model: nn.Module) -> int:
    """How often running statistics were written to, by torch's own count; cheaper than a look at their values."""
    names = (*_NAMES, "num_batches_tracked")
    buffers = (buffer for name, buffer in unwrap(model).named_buffers() if name.rpartition(".")[2] in names)
    return sum(0 if buffer.is_inference() else buffer._version for buffer in buffers)


def other_statistics(saved: Mapping[str, Any], model: nn.Module) -> list[str]:
    """The tensors of a model whose statistics are not the saved ones, but for the rounding of 16 bits.

    That moves a norm by less than a percent, and a mean of n numbers by as much of norm/n.
    """
    named = [*unwrap(model).named_buffers(), *unwrap(model).named_parameters()]
    there = {name: tensor for name, tensor in named if name in saved}
    sizes = {name: len(_some(tensor)) for name, tensor in there.items()}
    return [
        name
        for name, (mean, norm) in _statistics(there.items()).items()
        if not (
            math.isclose(norm, saved[name][1], rel_tol=_BY_ROUNDING, abs_tol=1e-6)
            and abs(mean - saved[name][0]) <= _BY_ROUNDING * norm / sizes[name] + 1e-6
        )
    ]


def norm_widths(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """How many units each batch norm has, by its name, of the buffers of a model or the tensors of a state dict.

    >>> norm_widths(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)).state_dict())
    {'1': 4}
    """
    names = (name for name in tensors if name.rpartition(".")[2] == "running_mean")
    return {name.rpartition(".")[0]: tensors[name].numel() for name in names}


def biases_before_norms(
    names: Collection[str], moment: Callable[[str], Tensor], widths: Collection[int]
) -> tuple[str, ...]:
    """The biases that a batch norm follows, sorted; `moment` gives v̂ of a parameter, `norm_widths` the widths.

    The norm removes what they add, so that their gradients are rounding errors, at most a millionth of their weight's;
    but its running mean has them in it, and without them the network is another one.
    """
    biases = []
    for name in names:
        weight = f"{name.removesuffix('bias')}weight"
        if name.endswith("bias") and weight in names and (v := moment(name)).numel() in widths:
            felt = float(moment(weight).mean())
            if 0 <= float(v.mean()) <= _ROUNDING * felt and felt > 0:
                biases.append(name)
    return tuple(sorted(biases))


def warn_of_other_statistics(path: AnyPath, saved: Mapping[str, Any], model: nn.Module) -> None:
    """Warn where a posterior was saved beside other tensors, which it does not hold, than the model has."""
    if other := other_statistics(saved, model):
        warn(
            f"the model's running statistics or frozen weights are not those that {path} was saved with (first "
            f"{other[0]!r}, {len(other)} in all): predictions would be another network's. Load the model's own state "
            "dict before the posterior"
        )


def copy_into(model: nn.Module, values: Named) -> None:
    """Write weights by name into a model's parameters, into their shards where they are sharded."""
    with alone_with(model), torch.no_grad():
        parameters = own_parameters(model)
        for name, value in values.items():
            own_part(parameters[name]).copy_(own_part(value))


def copy_with(model: nn.Module, values: Named) -> nn.Module:
    """A copy of the model with other weights."""
    with alone_with(model):
        copied = copy.deepcopy(model)
    copy_into(copied, values)
    return copied


def padding_rows(model: nn.Module) -> dict[str, int]:
    """The rows that embeddings keep for padding, by parameter name: torch gives them no gradient.

    A table that another layer uses too, such as a tied head, has none.

    >>> padding_rows(nn.Sequential(nn.Embedding(5, 2, padding_idx=-1), nn.Embedding(5, 2)))
    {'0.weight': 4}
    """
    rows: dict[int, set[int | None]] = {}
    for module in model.modules():
        row = module.padding_idx if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
        for parameter in module._parameters.values():
            rows.setdefault(id(parameter), set()).add(row)
    by_name = {name: rows[id(parameter)] for name, parameter in model.named_parameters()}
    only = {name: next(iter(kept)) for name, kept in by_name.items() if len(kept) == 1}
    return {name: row for name, row in only.items() if row is not None}
