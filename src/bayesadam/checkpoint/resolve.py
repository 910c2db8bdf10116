"""From a checkpoint to states with names: which optimiser wrote it, and which parameter each state belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bayesadam.checkpoint.checkpoint import Checkpoint, clean_names
from bayesadam.checkpoint.identify import has_tensors, identify_reader, kept_shape
from bayesadam.checkpoint.names import Slot, assign, memory_of, parameter_names
from bayesadam.curvature import Curvature, StateReader, read_state_dict, reader_named
from bayesadam.curvature.match import Match, match_state_dict, unwrap
from bayesadam.errors import MatchError


def match_checkpoint(
    checkpoint: Checkpoint,
    model: nn.Module | None = None,
    *,
    optimizer: str | StateReader | None = None,
    param_names: Sequence[str] | None = None,
    groups_in_order: bool = False,
) -> Match:
    """Match the optimiser's state to the weights, with or without the model.

    Names are used where the state has them or the caller gives them. Otherwise the order of the file's weights tells,
    if shapes leave one answer: see `bayesadam.checkpoint.names`. A model tells parameters from buffers, and the order
    where the file has none; where file and model have different orders, both must give the same answer.

    Args:
        checkpoint: what `read_checkpoint` returned.
        model: the model, whose weights are neither used nor changed.
        optimizer: the name of the optimiser that wrote the state, or a reader; None tells it by the state's keys.
        param_names: the parameter names in the optimiser's order.
        groups_in_order: your word that each of several groups was filled in the model's order.
    """
    resolved = _resolve(checkpoint, model, optimizer, param_names, groups_in_order)
    return match_state_dict(resolved.model, resolved.state_dict, resolved.reader, resolved.names)


def read_curvature(
    checkpoint: Checkpoint,
    model: nn.Module | None = None,
    *,
    optimizer: str | StateReader | None = None,
    param_names: Sequence[str] | None = None,
    groups_in_order: bool = False,
) -> Curvature:
    """v̂ by parameter name; the arguments are those of `match_checkpoint`."""
    resolved = _resolve(checkpoint, model, optimizer, param_names, groups_in_order)
    return read_state_dict(resolved.model, resolved.state_dict, optimizer=resolved.reader, param_names=resolved.names)


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the checkpoint's weights and buffers into the model, all or none of them."""
    inner = unwrap(model)
    weights = _weights_for(checkpoint, inner)
    own = inner.state_dict(keep_vars=True)
    tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor)}
    # A tied tensor may be saved under one of its names.
    saved = {memory_of(tensors[name]) for name in weights if name in tensors}
    missing = [
        name
        for name, tensor in tensors.items()
        if name not in weights and memory_of(tensor) not in saved and not name.endswith("num_batches_tracked")
    ]
    unknown = [name for name in weights if name not in tensors]
    if missing or unknown:
        raise MatchError(
            f"{checkpoint.path} is another model's: {type(inner).__name__} "
            + (f"has {missing[:4]}, which it lacks" if missing else f"has no {unknown[:4]}")
        )
    for name, tensor in weights.items():
        if tensor.shape != tensors[name].shape:
            raise MatchError(
                f"{checkpoint.path} is another model's: {name!r} has shape {tuple(tensor.shape)} in the file and "
                f"{tuple(tensors[name].shape)} in the model"
            )
    inner.load_state_dict(weights, strict=False)


@dataclass(frozen=True)
class _Resolved:
    """What `match_state_dict` and `read_state_dict` need."""

    model: nn.Module
    state_dict: Mapping[str, Any]
    reader: StateReader
    names: list[str]


class _Weights(nn.Module):
    """Stands in for the model where there is none: parameters by name, over the checkpoint's own memory."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.named = {name: nn.Parameter(tensor.detach()) for name, tensor in named.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters, in the file's order."""
        return iter(self.named.items())


def _resolve(
    checkpoint: Checkpoint,
    model: nn.Module | None,
    optimizer: str | StateReader | None,
    param_names: Sequence[str] | None,
    in_order: bool,
) -> _Resolved:
    state_dict = checkpoint.optimizer
    reader = identify_reader(state_dict, checkpoint.recorded.optimizer) if optimizer is None else optimizer
    record = reader_named(reader) if isinstance(reader, str) else reader
    known = param_names if param_names is not None else checkpoint.param_names
    if model is None:
        candidates, repeats = parameter_names(checkpoint.weights)
        single = [name for name in candidates if name not in repeats]
        slots = _slots(state_dict, record)
        # Memory is also shared by parameters that were made from one tensor and never tied.
        chosen = candidates if len(slots) > len(single) else single
        if known is not None:
            known = _clean(known, checkpoint.weights)
            chosen = [name for name in checkpoint.weights if name in {*single, *known}]
        stand_in = _Weights({name: checkpoint.weights[name] for name in chosen})
        if known is not None:
            return _Resolved(stand_in, state_dict, record, known)
        shapes = {name: checkpoint.weights[name].shape for name in chosen}
        found = assign(slots, shapes, ordered=checkpoint.ordered, in_order=in_order)
        return _Resolved(stand_in, *_restricted(state_dict, record, found))
    parameters = dict(unwrap(model).named_parameters())
    weights = _weights_for(checkpoint, unwrap(model))
    for name, parameter in parameters.items():
        if name in weights and weights[name].shape != parameter.shape:
            raise MatchError(
                f"{checkpoint.path} is another model's: {name!r} has shape {tuple(weights[name].shape)} in the file and "
                f"{tuple(parameter.shape)} in the model"
            )
    if known is not None:
        return _Resolved(model, state_dict, record, list(known))
    return _Resolved(
        model, *_restricted(state_dict, record, _by_model(checkpoint, record, parameters, weights, in_order))
    )


def _by_model(
    checkpoint: Checkpoint,
    record: StateReader,
    parameters: Mapping[str, nn.Parameter],
    weights: Mapping[str, Tensor],
    in_order: bool,
) -> dict[Any, str]:
    """The names by the model's order, and by the file's where it has another: the class may have changed since."""
    slots = _slots(checkpoint.optimizer, record)
    trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    names = trainable if len(slots) == len(trainable) else list(parameters)
    shapes = {name: parameters[name].shape for name in names}
    found = assign(slots, shapes, ordered=True, in_order=in_order)
    filed = [name for name in weights if name in shapes]
    if checkpoint.ordered and len(filed) == len(names) and filed != names:
        other = assign(slots, {name: shapes[name] for name in filed}, ordered=True, in_order=in_order)
        differing = [key for key in found if other.get(key) != found[key]]
        if differing:
            key = differing[0]
            raise MatchError(
                f"{checkpoint.path} has the weights in another order than the model: the state under key {key!r} would "
                f"be that of {other.get(key)!r} by the file, of {found[key]!r} by the model. Pass param_names=[...], the "
                "parameter names in the order in which the optimiser was given them"
            )
    return found


def _slots(state_dict: Mapping[str, Any], record: StateReader) -> list[Slot]:
    states = state_dict["state"]
    slots = []
    for number, group in enumerate(state_dict["param_groups"]):
        for key in group["params"]:
            state = states.get(key, {})
            shape = kept_shape(record, state)
            slots.append(Slot(key, number, shape, has_tensors(state) or record.statistic == "identity"))
    return slots


def _restricted(
    state_dict: Mapping[str, Any], record: StateReader, found: Mapping[Any, str]
) -> tuple[dict[str, Any], StateReader, list[str]]:
    """The state of the keys that have a name; the others hold nothing."""
    groups = [
        {**group, "params": [key for key in group["params"] if key in found]} for group in state_dict["param_groups"]
    ]
    names = [found[key] for group in groups for key in group["params"]]
    nameless = {key for group in state_dict["param_groups"] for key in group["params"]} - found.keys()
    states = {key: state for key, state in state_dict["state"].items() if key not in nameless}
    return {"state": states, "param_groups": groups}, record, names


def _clean(names: Sequence[str], weights: Mapping[str, Tensor]) -> list[str]:
    """Names as the weights have them."""
    behind = {key: name for name, key in clean_names(names).items()}
    cleaned = [name if name in weights else behind.get(name, name) for name in names]
    unknown = [name for name in cleaned if name not in weights]
    if unknown:
        raise MatchError(
            f"the optimiser's parameters {unknown[:4]} are not among the weights: is it another model's state?"
        )
    return cleaned


def _weights_for(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Tensor]:
    """The weights by the model's names, which may themselves begin with what looks like a wrapper's prefix."""
    names = set(model.state_dict(keep_vars=True))
    stored = {checkpoint.stored_names[name]: tensor for name, tensor in checkpoint.weights.items()}
    return max((dict(checkpoint.weights), stored), key=lambda named: len(names & named.keys()))
