r"""`track`: a second moment of the gradients in the state of an optimiser that keeps none, for next to nothing.

Every k-th gradient g is taken, as the optimiser is given it, into a mean that forgets,

.. math::
    \hat v_n = \hat v_{n-1} + \frac{1 - \beta}{1 - \beta^n} (g^2 - \hat v_{n-1}),

which is Adam's average with its bias corrected. It stands beside the optimiser's own entries in `optimizer.state`, so
that whatever saves that state saves it too. As `Optimizer.load_state_dict` turns every tensor of a state into the type
of the parameter, which may be bfloat16, all of them are bytes, which every type holds exactly.
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

from bayesadam._alone import listed_optimizers
from bayesadam._checks import count
from bayesadam._shards import is_sharded, own_part, whole, wrapped
from bayesadam.errors import MatchError, SettingError
from bayesadam.readers.rotated import Factors, product_of

if TYPE_CHECKING:
    from typing_extensions import Self

What = Literal["diagonal", "factored", "kronecker"]
# Entries of a parameter's state: how many gradients were taken, and by `what` some of the others. Up to 0.3 a diagonal
# had codes of 8 bits, which are still read.
COUNT = "tracked_count"
CODES, EXPONENTS, WHOLE = "tracked_codes", "tracked_exponents", "tracked_moment"
ROWS, COLUMNS = "tracked_rows", "tracked_columns"
LEFT, RIGHT = "tracked_left", "tracked_right"
TENSORS = (CODES, EXPONENTS, WHOLE, ROWS, COLUMNS, LEFT, RIGHT)
# Entries of a parameter group: steps seen since tracking began, and those that the optimiser had taken by then (None
# where it does not count); β of the gradients taken, k, the first steps of which all are, examples behind one.
STEPS, SINCE = "tracked_steps", "tracked_since"
DECAY, EVERY, FIRST, EXAMPLES = "tracked_decay", "tracked_every", "tracked_first", "tracked_batch_size"
# Each gradient of so many steps, and then each k-th, so that a short training has enough of them.
_FIRST, _EVERY = 100, 10
# Entries of a row that share an exponent; a code has the last four bits of float32's exponent and the first four of its
# mantissa.
_BLOCK, _SHIFT = 256, 19
_SHARDED = "Kronecker factors of a sharded parameter are not tracked: what='factored' or 'diagonal'"
_ENTRIES = {"diagonal": (WHOLE,), "factored": (ROWS, COLUMNS), "kronecker": (LEFT, RIGHT)}
# Sides of a matrix up to which its Kronecker factor is kept whole; of longer ones the diagonal is.
_WIDEST = 4096

OnGradients = Callable[[Optimizer, Tensor | None], None]


# --- when gradients are there ---------------------------------------------------------------------------------------


def on_gradients(optimizer: Optimizer, then: OnGradients) -> list[Any]:
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


# --- tracking -------------------------------------------------------------------------------------------------------


class Hooked:
    """Hooks in optimisers, which `remove()`, or the end of a `with`, takes out again; what was taken so far stays."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self._handles: list[Any] = []

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

    | `what`        | keeps                                                          | bytes for (m, n) |
    |---------------|----------------------------------------------------------------|------------------|
    | `"diagonal"`  | v̂ of each weight                                               | 4 m n            |
    | `"factored"`  | the mean over rows and that over columns, as Adafactor         | 4 (m + n)        |
    | `"kronecker"` | E[G Gᵀ] and E[Gᵀ G], as Shampoo and SOAP; of G a conv's matrix | 4 (m² + n²)      |

    Vectors have a diagonal.

    Args:
        optimizer: one, or several that train one model.
        what: see above.
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
    for followed in tracker.optimizers:
        if not isinstance(followed, Optimizer):
            raise SettingError(f"track takes a torch optimiser, or several, got {type(followed).__name__}")
        hooks = followed._optimizer_load_state_dict_post_hooks.values()
        if any("tracked" in getattr(hook, "keywords", {}) for hook in hooks):
            raise SettingError(f"this {type(followed).__name__} is tracked already: remove() that tracker first")
        if what == "kronecker" and any(is_sharded(p) for group in followed.param_groups for p in group["params"]):
            raise SettingError(_SHARDED)
    for followed in tracker.optimizers:
        _settle(followed, tracked=settings)
        pending: dict[Tensor, Any] = {}
        tracker._handles += [
            *on_gradients(followed, partial(_taken, what, settings, pending)),
            followed.register_step_post_hook(partial(_begun, pending)),
            followed.register_load_state_dict_post_hook(partial(_settle, tracked=settings)),
        ]
    return tracker


def _settle(optimizer: Optimizer, *, tracked: Mapping[str, Any]) -> None:
    """Groups get the settings they are now tracked by, and tensors are bytes again.

    A state that was loaded has other settings or none, and its tensors are of the parameters' types.
    """
    for group in optimizer.param_groups:
        group.update(tracked)
        group.setdefault(STEPS, 0)
        group.setdefault(SINCE, _steps_of(optimizer, group))
    for state in optimizer.state.values():
        for name in TENSORS if COUNT in state else ():
            if name in state and state[name].dtype != torch.uint8:
                state[name] = state[name].to(torch.uint8)
        if CODES in state:
            codes = state.pop(CODES)
            moment = _bytes(_decoded(own_part(codes), own_part(state.pop(EXPONENTS))))
            state[WHOLE] = _placed(moment, codes)


def _steps_of(optimizer: Optimizer, group: Mapping[str, Any]) -> int | None:
    """Steps that the optimiser has taken, if it counts them; 0 before the first."""
    states = [optimizer.state[parameter] for parameter in group["params"] if optimizer.state.get(parameter)]
    counts = [entries["step"] for entries in (group, *states) if "step" in entries]
    return max(map(int, counts)) if counts else None if states else 0


@_disable_dynamo
def _taken(
    what: What, settings: Mapping[str, Any], pending: dict[Tensor, Any], optimizer: Optimizer, scale: Tensor | None
) -> None:
    """Every k-th time, take the gradients of all parameters.

    Many optimisers begin a state where it is empty: until then what belongs there is `pending`.
    """
    if any(SINCE not in group for group in optimizer.param_groups):
        _settle(optimizer, tracked=settings)
    for group in optimizer.param_groups:
        due = group[STEPS] < group[FIRST] or group[STEPS] % group[EVERY] == 0
        group[STEPS] += 1
        for parameter in group["params"] if due else ():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_dense() if parameter.grad.layout != torch.strided else parameter.grad
            gradient = gradient.detach().float() if scale is None else gradient.detach().float() / scale
            state, names = optimizer.state.get(parameter, {}), _ENTRIES[what if gradient.dim() > 1 else "diagonal"]
            if stale := [name for name in TENSORS if name in state and name not in names]:
                # Of another `what`: begin anew.
                for name in (COUNT, *stale):
                    del state[name]
                group[SINCE] = _steps_of(optimizer, group)
            into = state if state else pending.setdefault(parameter, {})
            into[COUNT] = int(state.get(COUNT, 0)) + 1
            weight = (1 - group[DECAY]) / (1 - group[DECAY] ** into[COUNT])
            into.update(_updated(names, into, _by_rows(gradient), weight))


def _begun(pending: dict[Tensor, dict[str, Any]], optimizer: Optimizer, *_: Any) -> None:
    """Add what waited for the optimiser to begin a state."""
    for parameter, entries in pending.items():
        optimizer.state[parameter].update(entries)
    pending.clear()


def _updated(names: Sequence[str], state: Mapping[str, Any], gradient: Tensor, weight: float) -> dict[str, Tensor]:
    """The tracked entries with one more gradient, which counts by `weight`; a sharded one by its rows here."""
    local = own_part(gradient)
    matrix = local.reshape(len(local), local.shape[1:].numel()) if local.dim() else local.reshape(1, 1)
    squares = matrix.square()
    if WHOLE in names:
        now = {WHOLE: squares}
    elif ROWS in names:
        total = _summed(squares.sum(dim=0), gradient)
        now = {ROWS: squares.mean(dim=1, keepdim=True), COLUMNS: total / len(gradient)}
    elif is_sharded(gradient):
        raise SettingError(_SHARDED)
    else:
        sides = {LEFT: matrix, RIGHT: matrix.mT}
        now = {k: s @ s.mT if len(s) <= _WIDEST else s.square().sum(dim=1) for k, s in sides.items()}
    updated = {}
    for name, fresh in now.items():
        if name in state:
            _floats(own_part(state[name])).lerp_(fresh, weight)
            updated[name] = state[name]
        else:
            stored = _bytes(fresh * weight)
            updated[name] = stored if name == COLUMNS else _placed(stored, gradient)
    return updated


# --- sharded gradients ----------------------------------------------------------------------------------------------


def _by_rows(gradient: Tensor) -> Tensor:
    """A gradient of which every process has whole rows, if it does not have all."""
    if not is_sharded(gradient) or all(p.is_replicate() or p.is_shard(0) for p in gradient.placements):
        return gradient
    from torch.distributed.tensor import Shard

    return gradient.redistribute(placements=[p if p.is_replicate() else Shard(0) for p in gradient.placements])


def _placed(part: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor whose first dimension is split as that of `like` is."""
    shape = torch.Size((*like.shape[:1], *part.shape[1:]))
    return wrapped(part, like, shape) if is_sharded(like) else part


def _summed(part: Tensor, like: Tensor) -> Tensor:
    """The sum over the processes that the rows of `like` are split over."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Replicate() if p.is_replicate() else Partial() for p in like.placements]
    return whole(DTensor.from_local(part, like.device_mesh, placements, run_check=False))


# --- bytes ----------------------------------------------------------------------------------------------------------


def _bytes(values: Tensor) -> Tensor:
    """Of float32 numbers; the last dimension is four times as long."""
    # Of a part without rows strides may be anything.
    return torch.empty(values.shape, dtype=torch.float32, device=values.device).copy_(values).view(torch.uint8)


def _floats(stored: Tensor) -> Tensor:
    """The numbers behind bytes, in the same memory."""
    if not stored.numel():
        return torch.empty(*stored.shape[:-1], stored.shape[-1] // 4, device=stored.device)
    return stored.to(torch.uint8).contiguous().view(torch.float32)


def _decoded(codes: Tensor, exponents: Tensor) -> Tensor:
    """The numbers behind codes of 8 bits and the exponents of their blocks, by rows."""
    keys, lowest = codes.flatten(1).int(), exponents.int() << 4
    lowest = lowest.repeat_interleave(_BLOCK, dim=1)[:, : keys.shape[1]]
    return torch.where(keys > 0, keys + lowest, 0).bitwise_left_shift(_SHIFT).view(torch.float32)


# --- reading --------------------------------------------------------------------------------------------------------


def is_tracked(state: object) -> bool:
    """Whether a parameter's state holds a tracked second moment."""
    return isinstance(state, Mapping) and COUNT in state and any(name in state for name in TENSORS)


def moment(state: Mapping[str, Any], group: Mapping[str, Any], shape: torch.Size) -> Factors:
    """The tracked second moment as the parameter's matrix, or in the eigenbases of its Kronecker factors."""
    tensors = {name: whole(state[name]) for name in TENSORS if name in state}
    sides = (shape[0], shape[1:].numel()) if shape else (1, 1)
    if LEFT in tensors:
        factors = [_floats(tensors[name]) for name in (LEFT, RIGHT)]
        if tuple(map(len, factors)) != sides:
            raise MatchError(f"tracked factors are not those of a parameter of shape {tuple(shape)}: another model's")
        if not all(bool(factor.isfinite().all()) for factor in factors):
            # What reads it refuses it by name.
            return factors[0].new_full(sides, torch.nan), (None, None)
        return product_of(factors)
    if CODES in tensors:
        v = _decoded(tensors[CODES].to(torch.uint8), tensors[EXPONENTS].to(torch.uint8))
    elif WHOLE in tensors:
        v = _floats(tensors[WHOLE]).clone()
    else:
        rows, columns = _floats(tensors[ROWS]), _floats(tensors[COLUMNS])
        v = rows * columns / rows.mean().clamp(min=torch.finfo(torch.float32).tiny)
    if v.shape != sides:
        raise MatchError(f"a tracked moment has shape {tuple(v.shape)}: the state belongs to another model")
    return v, (None, None)
