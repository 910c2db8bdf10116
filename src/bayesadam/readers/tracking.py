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
from typing import Any, Literal, get_args

import torch
from torch import Tensor

# The public `torch.compiler.disable` imports all of dynamo at once; torch.optim uses this one.
from torch._compile import _disable_dynamo
from torch.nn.functional import pad
from torch.optim import Optimizer

from bayesadam._checks import count
from bayesadam._shards import is_sharded, own_part, whole
from bayesadam.errors import SettingError, StateError
from bayesadam.readers.rotated import Factors, product_of

What = Literal["diagonal", "factored", "kronecker"]
# Entries of a parameter's state: how many gradients were taken, and by `what` and `bits` some of the others.
COUNT = "tracked_count"
CODES, EXPONENTS, WHOLE = "tracked_codes", "tracked_exponents", "tracked_moment"
ROWS, COLUMNS = "tracked_rows", "tracked_columns"
LEFT, RIGHT = "tracked_left", "tracked_right"
TENSORS = (CODES, EXPONENTS, WHOLE, ROWS, COLUMNS, LEFT, RIGHT)
# Entries of a parameter group: steps seen since tracking began, β of the gradients taken, k, examples behind one.
STEPS, DECAY, EVERY, EXAMPLES = "tracked_steps", "tracked_decay", "tracked_every", "tracked_batch_size"
# Entries of a row that share an exponent, and the fewest that are worth it.
_BLOCK, _FEWEST = 256, 16
# A code has the last four bits of float32's exponent and the first four of its mantissa.
_SHIFT, _OCTAVES, _LAST = 19, 15, 255
_DROPPED = (1 << _SHIFT) - 1
# The golden ratio, of the bits that are dropped: multiples of it are spread as evenly as can be.
_GOLDEN = 324_027
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


class Tracker:
    """What `track` gives: `remove()` stops it, and what was tracked stays in the state."""

    def __init__(self, optimizers: Sequence[Optimizer], handles: Sequence[Any]) -> None:
        self.optimizers, self._handles = tuple(optimizers), list(handles)

    def remove(self) -> None:
        """Stop tracking."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def track(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    what: What = "diagonal",
    every: int = 10,
    bits: Literal[8, 32] = 8,
    decay: float = 0.99,
    batch_size: int | None = None,
) -> Tracker:
    """Keep the second moment of the gradients in the optimiser's own state: for Muon, SGD, Lion, and whatever has none.

        optimizer = torch.optim.Muon(matrices)
        ba.track(optimizer)                        # before training, and before a state is loaded
        ...
        ba.Posterior.from_optimizer(model, optimizer, n_data=60_000, batch_size=128)

    Checkpoints hold it, whoever writes them. Loaded into a tracked optimiser it goes on, to the bit. Gradients are
    taken as the step uses them: accumulated, clipped, unscaled, and without weight decay.

    | `what`        | keeps                                                          | a weight of (m, n)     |
    |---------------|----------------------------------------------------------------|------------------------|
    | `"diagonal"`  | v̂ of each weight                                               | 1 byte, 4 with bits=32 |
    | `"factored"`  | the mean over rows and that over columns, as Adafactor         | 4 (m + n) bytes in all |
    | `"kronecker"` | E[G Gᵀ] and E[Gᵀ G], as Shampoo and SOAP; of G a conv's matrix | 4 (m² + n²) bytes      |

    Eight bits are the last four bits of a float32's exponent and the first four of its mantissa, relative to the
    largest of 256 neighbours of a row. They are rounded up or down in turns, so that small changes are not lost.
    Vectors, and rows shorter than 16, have 32 bits.

    Args:
        optimizer: one, or several that train one model.
        what: see above.
        every: k: each k-th gradient is taken.
        bits: of a diagonal.
        decay: β of the gradients taken: the last 1/(1 − β) of them count.
        batch_size: examples behind one gradient, if it should be in the checkpoint.
    """
    if what not in get_args(What):
        raise SettingError(f"what must be one of {get_args(What)}, got {what!r}")
    if bits not in (8, 32) or (bits != 8 and what != "diagonal"):
        raise SettingError(f"bits must be 8 or 32, of a diagonal, got {bits!r} of {what!r}")
    if not 0 <= decay < 1:
        raise SettingError(f"decay must be at least 0 and below 1, got {decay!r}")
    count("every", every, "steps")
    kind = f"{what}{bits}" if what == "diagonal" else what
    listed: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    # Trainers keep the optimiser in `.optimizer`.
    listed = [getattr(each, "optimizer", each) if not isinstance(each, Optimizer) else each for each in listed]
    handles = []
    for each in listed:
        if not isinstance(each, Optimizer):
            raise SettingError(f"track takes a torch optimiser, or several, got {type(each).__name__}")
        if any(
            getattr(hook, "keywords", {}).get("tracked") for hook in each._optimizer_load_state_dict_post_hooks.values()
        ):
            raise SettingError(f"this {type(each).__name__} is tracked already: remove() that tracker first")
        settings: dict[str, Any] = {STEPS: 0, DECAY: decay, EVERY: every}
        for group in each.param_groups:
            for name, value in (settings | ({} if batch_size is None else {EXAMPLES: batch_size})).items():
                group[name] = group.get(name, 0) if name == STEPS else value
        _as_bytes(each)
        pending: dict[Tensor, Any] = {}
        handles += on_gradients(each, partial(_taken, kind, pending))
        handles.append(each.register_step_post_hook(partial(_begun, pending)))
        handles.append(each.register_load_state_dict_post_hook(partial(_loaded, tracked=settings)))
    return Tracker(listed, handles)


def _loaded(optimizer: Optimizer, *, tracked: Mapping[str, Any]) -> None:
    """After a state was loaded, which has the settings that it was tracked by, or none."""
    for group in optimizer.param_groups:
        group.update({name: group.get(name, value) if name == STEPS else value for name, value in tracked.items()})
    _as_bytes(optimizer)


def _as_bytes(optimizer: Optimizer) -> None:
    """Tracked tensors as bytes again, which loading has turned into the parameters' type."""
    for state in optimizer.state.values():
        for name in TENSORS if COUNT in state else ():
            if name in state and state[name].dtype != torch.uint8:
                state[name] = state[name].to(torch.uint8)


@_disable_dynamo
def _taken(kind: str, pending: dict[Tensor, Any], optimizer: Optimizer, scale: Tensor | None) -> None:
    """Every k-th time, take the gradients of all parameters.

    Many optimisers begin a state where it is empty: until then what belongs there is `pending`.
    """
    for group in optimizer.param_groups:
        due = group[STEPS] % group[EVERY] == 0
        group[STEPS] += 1
        for parameter in group["params"] if due else ():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_dense() if parameter.grad.layout != torch.strided else parameter.grad
            gradient = gradient.detach().float() if scale is None else gradient.detach().float() / scale
            state = optimizer.state.get(parameter, {})
            taken = int(state.get(COUNT, 0)) + 1
            weight = (1 - group[DECAY]) / (1 - group[DECAY] ** taken)
            found: dict[str, Any] = {**_updated(kind, state, gradient, weight, taken), COUNT: taken}
            (state if state else pending.setdefault(parameter, {})).update(found)


def _begun(pending: dict[Tensor, dict[str, Any]], optimizer: Optimizer, *_: Any) -> None:
    """Add what waited for the optimiser to begin a state."""
    for parameter, found in pending.items():
        optimizer.state[parameter].update(found)
    pending.clear()


def _updated(kind: str, state: Mapping[str, Any], gradient: Tensor, weight: float, turn: int) -> dict[str, Tensor]:
    """The tracked entries with one more gradient, which counts by `weight`; a sharded one by its parts."""
    local = own_part(gradient)
    matrix = local.reshape(len(local), -1) if local.dim() else local.reshape(1, 1)
    if gradient.dim() < 2 or (kind == "diagonal8" and gradient.shape[1:].numel() < _FEWEST):
        kind = "diagonal32"
    if kind == "diagonal8":
        old = (
            _decoded(own_part(state[CODES]), own_part(state[EXPONENTS])) if CODES in state else torch.zeros_like(matrix)
        )
        codes, exponents = _encoded(old.lerp_(matrix.square(), weight), turn)
        return {CODES: _placed(codes.reshape(local.shape), gradient), EXPONENTS: _placed(exponents, gradient)}
    if kind == "diagonal32":
        now = {WHOLE: matrix.square()}
    elif kind == "factored":
        now = {ROWS: matrix.square().mean(dim=1), COLUMNS: whole(gradient.square().flatten(1).mean(dim=0))}
    elif is_sharded(gradient):
        raise SettingError("Kronecker factors of a sharded parameter are not tracked: what='factored' or 'diagonal'")
    else:
        sides = {LEFT: matrix, RIGHT: matrix.mT}
        now = {k: s @ s.mT if len(s) <= _WIDEST else s.square().sum(dim=1) for k, s in sides.items()}
    found = {}
    for name, fresh in now.items():
        old = _floats(own_part(state[name])) if name in state else torch.zeros_like(fresh)
        held = _bytes(old.lerp_(fresh, weight))
        found[name] = held if name == COLUMNS else _placed(held, gradient)
    return found


def _placed(part: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor whose first dimension is split as that of `like` is."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    shape = torch.Size((*like.shape[:1], *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


# --- bytes ----------------------------------------------------------------------------------------------------------


def _bytes(values: Tensor) -> Tensor:
    """Of float32 numbers; the last dimension is four times as long."""
    return values.float().contiguous().view(torch.uint8)


def _floats(stored: Tensor) -> Tensor:
    """The numbers behind bytes, a copy."""
    return stored.to(torch.uint8).contiguous().view(torch.float32).clone()


def _encoded(values: Tensor, turn: int) -> tuple[Tensor, Tensor]:
    """Codes of non-negative float32 numbers, (m, n), and the exponents of their blocks, (m, blocks).

    A number is rounded to one of its two neighbours: up if the part of it that is dropped and a number of the turn
    between 0 and 1 make more than 1. Those numbers are the multiples of the golden ratio, so that over turns as many
    are rounded up as should be. What is 0 stays 0, and nothing else becomes it.
    """
    m, n = values.shape
    bits = pad(values, (0, -n % _BLOCK)).reshape(-1, _BLOCK).view(torch.int32)
    # Rounded up, the largest may reach the next octave.
    exponents = (((bits.amax(dim=1, keepdim=True) + _DROPPED) >> 23) - _OCTAVES).clamp_(min=0)
    places = torch.arange(_BLOCK, device=values.device)
    turns = (((places + 1) * _GOLDEN + turn * _GOLDEN * 7) & _DROPPED).int()
    keys = (bits + turns).bitwise_right_shift_(_SHIFT).sub_(exponents << 4).clamp_(1, _LAST)
    codes = keys.mul_(bits > 0).to(torch.uint8).reshape(m, -1)[:, :n]
    return codes.contiguous(), exponents.to(torch.uint8).reshape(m, -1)


def _decoded(codes: Tensor, exponents: Tensor) -> Tensor:
    """The numbers behind codes, (m, n) in float32."""
    codes, exponents = codes.to(torch.uint8).flatten(1), exponents.to(torch.uint8)
    m, n = codes.shape
    blocks = pad(codes, (0, -n % _BLOCK)).reshape(-1, _BLOCK).int()
    keys = (exponents.reshape(-1, 1).int() << 4) + blocks
    return keys.bitwise_left_shift_(_SHIFT).mul_(blocks > 0).view(torch.float32).reshape(m, -1)[:, :n].contiguous()


# --- reading --------------------------------------------------------------------------------------------------------


def is_tracked(state: object) -> bool:
    """Whether a parameter's state holds a tracked second moment."""
    return isinstance(state, Mapping) and COUNT in state and any(name in state for name in TENSORS)


def moment(state: Mapping[str, Any], group: Mapping[str, Any], shape: torch.Size) -> Factors:
    """The tracked second moment as the parameter's matrix, or in the eigenbases of its Kronecker factors."""
    held = {name: whole(state[name]) for name in TENSORS if name in state}
    sides = (shape[0], shape[1:].numel()) if shape else (1, 1)
    if LEFT in held:
        factors = [_floats(held[name]) for name in (LEFT, RIGHT)]
        if tuple(map(len, factors)) != sides:
            raise StateError(f"tracked factors are not those of a parameter of shape {tuple(shape)}: another model's")
        return product_of(factors)
    if CODES in held:
        found = _decoded(held[CODES], held[EXPONENTS])
    elif WHOLE in held:
        found = _floats(held[WHOLE])
    else:
        rows, columns = _floats(held[ROWS]), _floats(held[COLUMNS])
        found = rows[:, None] * columns / rows.mean().clamp(min=torch.finfo(torch.float32).tiny)
    if found.shape != sides:
        raise StateError(f"a tracked moment has shape {tuple(found.shape)}: the state belongs to another model")
    return found, (None, None)
