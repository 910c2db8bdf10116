r"""`track`: a second moment of the gradients in the state of an optimiser that keeps none, for next to nothing.

Every k-th gradient g is taken, as the optimiser is given it, into a mean that forgets,

.. math::
    \hat v_n = \hat v_{n-1} + \frac{1 - \beta}{1 - \beta^n} (g^2 - \hat v_{n-1}),

which is Adam's average with its bias corrected. It stands beside the optimiser's own entries in `optimizer.state`, so
that whatever saves that state saves it too. `Optimizer.load_state_dict` turns every tensor of a state into the type of
the parameter, which may be bfloat16: so all of them are bytes, which every type holds exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

# The public `torch.compiler.disable` imports all of dynamo at once; torch.optim uses this one.
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from bayesadam._alone import listed_optimizers
from bayesadam._checks import count
from bayesadam._shards import is_sharded
from bayesadam.errors import SettingError

if TYPE_CHECKING:
    from typing_extensions import Self

What = Literal["diagonal", "factored"]
# Entries of a parameter's state: how many gradients were taken, and the mean of their squares or its two factors.
COUNT, WHOLE, ROWS, COLUMNS = "tracked_count", "tracked_moment", "tracked_rows", "tracked_columns"
TENSORS = (WHOLE, ROWS, COLUMNS)
# Entries of a parameter group: steps seen, β of the gradients taken, k; the first steps of which all are, examples
# behind one.
STEPS, DECAY, EVERY = "tracked_steps", "tracked_decay", "tracked_every"
FIRST, EXAMPLES = "tracked_first", "tracked_batch_size"
# Each gradient of so many steps, and then each k-th, so that a short training has enough of them.
_FIRST, _EVERY = 100, 10

State = dict[str, Any]


def on_gradients(optimizer: Optimizer, then: Callable[[Optimizer, Tensor | None], None]) -> list[RemovableHandle]:
    """Call `then(optimizer, scale)` in every step, as the gradients are there that it uses; gives the hooks' handles.

    That is before the step, or after one that is given a closure, which is what computes them. `scale` is what a fused
    optimiser will divide them by itself, under a GradScaler; a step that overflowed is left out.
    """

    def hook(after: bool, optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        # A hook is given the arguments of the bound step, with the optimiser itself before them.
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if (closure is not None) != after:
            return
        scale, overflow = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
        if overflow is None or not bool(overflow):
            with torch.no_grad():
                then(optimizer, scale)

    return [
        optimizer.register_step_pre_hook(partial(hook, False)),
        optimizer.register_step_post_hook(partial(hook, True)),
    ]


def whole_gradient(parameter: Tensor, gradient: Tensor, scale: Tensor | None) -> Tensor:
    """The gradient that the step uses, dense and unscaled, in float32 or float64."""
    if is_sharded(parameter):
        raise SettingError(
            "gradients of sharded parameters are not tracked or recorded: train with AdamW, or unsharded"
        )
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    dense = dense.detach().to(torch.promote_types(parameter.dtype, torch.float32))
    return dense if scale is None else dense / scale.to(dense.device)


class Hooked:
    """Hooks in optimisers, which `remove()`, or the end of a `with`, takes out again; what was taken so far stays."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self._handles: list[RemovableHandle] = []

    def remove(self) -> None:
        """Take no more gradients; those taken so far stay."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def track(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    what: What = "diagonal",
    every: int | None = None,
    decay: float = 0.99,
    batch_size: int | None = None,
) -> Hooked:
    """Keep the second moment of the gradients in the optimiser's own state: for Muon, SGD, Lion, and whatever has none.

        optimizer = torch.optim.Muon(matrices)
        ba.track(optimizer)                        # before training, and before a state is loaded
        ...
        ba.Posterior.from_optimizer(model, optimizer, n_data=60_000, batch_size=128)

    Checkpoints hold it, whoever writes them. Loaded into a tracked optimiser it goes on, to the bit. Gradients are
    taken as the step uses them: accumulated, clipped, unscaled, and without weight decay.

    Args:
        optimizer: one, or several that train one model.
        what: `"diagonal"`, v̂ of each weight in float32, or `"factored"`, as Adafactor the means over rows and columns.
        every: k: each k-th gradient is taken; None for each of the first hundred, and then each tenth.
        decay: β of the gradients taken: the last 1/(1 − β) of them count.
        batch_size: examples behind one gradient, if it should be in the checkpoint.
    """
    if what not in get_args(What):
        raise SettingError(f"what must be one of {get_args(What)}, got {what!r}")
    if not 0 <= decay < 1:
        raise SettingError(f"decay must be at least 0 and below 1, got {decay!r}")
    if every is not None:
        count("every", every, "steps")
    first, every = (_FIRST, _EVERY) if every is None else (0, every)
    settings = {DECAY: decay, EVERY: every, FIRST: first} | ({} if batch_size is None else {EXAMPLES: batch_size})
    tracker = Hooked(listed_optimizers(optimizer))
    for tracked in tracker.optimizers:
        hooks = tracked._optimizer_load_state_dict_post_hooks.values()
        if any(getattr(hook, "func", None) is _settle for hook in hooks):
            raise SettingError(f"this {type(tracked).__name__} is tracked already: remove() that tracker first")
    for tracked in tracker.optimizers:
        _settle(settings, tracked)
        pending: dict[Tensor, State] = {}
        tracker._handles += [
            *on_gradients(tracked, partial(_taken, what, settings, pending)),
            tracked.register_step_post_hook(partial(_begun, pending)),
            tracked.register_load_state_dict_post_hook(partial(_settle, settings)),
        ]
    return tracker


def _settle(settings: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Groups get the settings they are now tracked by, and tensors are bytes again.

    A state that was loaded has other settings or none, and its tensors are of the parameters' types.
    """
    for group in optimizer.param_groups:
        group.update(settings)
        group.setdefault(STEPS, 0)
    for state in optimizer.state.values():
        state.update({name: state[name].to(torch.uint8) for name in TENSORS if name in state})


@_disable_dynamo
def _taken(
    what: What, settings: Mapping[str, Any], pending: dict[Tensor, State], optimizer: Optimizer, scale: Tensor | None
) -> None:
    """Every k-th time, take the gradients of all parameters.

    Many optimisers begin a state where it is empty: until then what belongs there is `pending`.
    """
    if any(STEPS not in group for group in optimizer.param_groups):
        _settle(settings, optimizer)
    for group in optimizer.param_groups:
        due = group[STEPS] < group[FIRST] or group[STEPS] % group[EVERY] == 0
        group[STEPS] += 1
        for parameter in group["params"] if due else ():
            if parameter.grad is None:
                continue
            gradient = whole_gradient(parameter, parameter.grad, scale).float()
            is_factored = what == "factored" and gradient.dim() > 1
            state = optimizer.state.get(parameter, {})
            if COUNT in state and not all(name in state for name in ((ROWS, COLUMNS) if is_factored else (WHOLE,))):
                # It was tracked in another way: begin anew.
                for name in [name for name in state if str(name).startswith("tracked_")]:
                    del state[name]
            into = state if state else pending.setdefault(parameter, {})
            into[COUNT] = int(into.get(COUNT, 0)) + 1
            weight = (1 - group[DECAY]) / (1 - group[DECAY] ** into[COUNT])
            _average(into, gradient, weight, is_factored)


def _begun(pending: dict[Tensor, State], optimizer: Optimizer, *_: object) -> None:
    for parameter, entries in pending.items():
        optimizer.state[parameter].update(entries)
    pending.clear()


def _average(state: State, gradient: Tensor, weight: float, is_factored: bool) -> None:
    """Take one more gradient, which counts by `weight`, into a state."""
    squares = gradient.reshape(_sides(gradient.shape)).square()
    fresh = {ROWS: squares.mean(dim=1, keepdim=True), COLUMNS: squares.mean(dim=0)} if is_factored else {WHOLE: squares}
    for name, values in fresh.items():
        if name in state:
            state[name].view(torch.float32).lerp_(values, weight)
        else:
            state[name] = (values * weight).contiguous().view(torch.uint8)


def is_tracked(state: object) -> bool:
    """Whether a parameter's state holds a tracked second moment."""
    return isinstance(state, Mapping) and COUNT in state and any(name in state for name in TENSORS)


def moment(state: Mapping[str, Any], group: Mapping[str, Any], shape: torch.Size) -> Tensor:
    """The tracked second moment, of the parameter's shape, or of another where it is another parameter's."""
    tensors: dict[str, Tensor] = {name: state[name] for name in TENSORS if name in state}
    floats = {name: stored.to(torch.uint8).contiguous().view(torch.float32) for name, stored in tensors.items()}
    if ROWS in floats:
        mean = floats[ROWS].mean().clamp(min=torch.finfo(torch.float32).tiny)
        floats[WHOLE] = floats[ROWS] * floats[COLUMNS] / mean
    v = floats[WHOLE]
    return v.reshape(shape) if v.shape == _sides(shape) else v


def _sides(shape: torch.Size) -> tuple[int, int]:
    return (shape[0], shape[1:].numel()) if shape else (1, 1)
