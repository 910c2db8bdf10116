r"""`track`: a second moment of the gradients in the state of an optimiser that keeps none, for next to nothing.

Every k-th gradient g is taken, as the optimiser is given it, into a mean that forgets,

.. math::
    \hat v_n = \hat v_{n-1} + \frac{1 - \beta}{1 - \beta^n} (g^2 - \hat v_{n-1}),

which is Adam's average with its bias corrected. It stands beside the optimiser's own entries in `optimizer.state`, so
that whatever saves that state saves it too. As `Optimizer.load_state_dict` turns every tensor of a state into the type
of the parameter, which may be bfloat16, all of them are bytes, which every type holds exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

# The public `torch.compiler.disable` imports all of dynamo at once; torch.optim uses this one.
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from bayesadam._alone import listed_optimizers
from bayesadam._checks import count
from bayesadam._shards import extremes, is_sharded, own_part, whole, wrapped
from bayesadam.errors import SettingError, StateError
from bayesadam.readers.rotated import Factors, product_of

if TYPE_CHECKING:
    from typing_extensions import Self

What = Literal["diagonal", "factored", "kronecker"]
# Entries of a parameter's state: how many gradients were taken, and by `what` and `bits` some of the others.
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
# Entries of a row that share an exponent, and the fewest that are worth it.
_BLOCK, _FEWEST = 256, 16
# Gradients of at most so many numbers are taken together.
_TOGETHER = 1 << 25
# A code has the last four bits of float32's exponent and the first four of its mantissa.
_SHIFT, _OCTAVES, _LAST = 19, 15, 255
_DROPPED = (1 << _SHIFT) - 1
# The golden ratio, of the bits that are dropped: multiples of it are spread as evenly as can be.
_GOLDEN = 324_027
_SHARDED = "Kronecker factors of a sharded parameter are not tracked: what='factored' or 'diagonal'"
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


class Tracker(Hooked):
    """What `track` gives: `remove()` stops it, and what was tracked stays in the state."""


def track(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    what: What = "diagonal",
    every: int | None = None,
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
        every: k: each k-th gradient is taken; None for each of the first hundred, and then each tenth.
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
    if every is not None:
        count("every", every, "steps")
    kind = f"{what}{bits}" if what == "diagonal" else what
    first, every = (_FIRST, _EVERY) if every is None else (0, every)
    settings = {DECAY: decay, EVERY: every, FIRST: first} | ({} if batch_size is None else {EXAMPLES: batch_size})
    tracker = Tracker(listed_optimizers(optimizer))
    for each in tracker.optimizers:
        if not isinstance(each, Optimizer):
            raise SettingError(f"track takes a torch optimiser, or several, got {type(each).__name__}")
        if any(
            getattr(hook, "keywords", {}).get("tracked") for hook in each._optimizer_load_state_dict_post_hooks.values()
        ):
            raise SettingError(f"this {type(each).__name__} is tracked already: remove() that tracker first")
        if what == "kronecker" and any(is_sharded(p) for group in each.param_groups for p in group["params"]):
            raise SettingError(_SHARDED)
    for each in tracker.optimizers:
        _settle(each, tracked=settings)
        pending: dict[Tensor, Any] = {}
        tracker._handles += [
            *on_gradients(each, partial(_taken, kind, settings, pending)),
            each.register_step_post_hook(partial(_begun, pending)),
            each.register_load_state_dict_post_hook(partial(_settle, tracked=settings)),
        ]
    return tracker


def _settle(optimizer: Optimizer, *, tracked: Mapping[str, Any]) -> None:
    """Groups get the settings they are now tracked by, and tensors are bytes again.

    A state that was loaded has other settings or none, and its tensors are of the parameters' types.
    """
    for group in optimizer.param_groups:
        group.update(tracked)
        group.setdefault(STEPS, 0)
        if SINCE not in group:
            group[SINCE] = _steps_of(optimizer, group)
    for state in optimizer.state.values():
        for name in TENSORS if COUNT in state else ():
            if name in state and state[name].dtype != torch.uint8:
                state[name] = state[name].to(torch.uint8)


def _steps_of(optimizer: Optimizer, group: Mapping[str, Any]) -> int | None:
    """Steps that the optimiser has taken, if it counts them; 0 before the first."""
    states = [optimizer.state[parameter] for parameter in group["params"] if optimizer.state.get(parameter)]
    counts = [each["step"] for each in (group, *states) if "step" in each]
    return max(map(int, counts)) if counts else None if states else 0


@_disable_dynamo
def _taken(
    kind: str, settings: Mapping[str, Any], pending: dict[Tensor, Any], optimizer: Optimizer, scale: Tensor | None
) -> None:
    """Every k-th time, take the gradients of all parameters.

    Many optimisers begin a state where it is empty: until then what belongs there is `pending`.
    """
    if any(SINCE not in group for group in optimizer.param_groups):
        _settle(optimizer, tracked=settings)
    rehearsed = _is_rehearsal(optimizer)
    for group in optimizer.param_groups:
        due = group[STEPS] < group[FIRST] or group[STEPS] % group[EVERY] == 0
        group[STEPS] += not rehearsed
        coded: dict[tuple[Any, ...], list[tuple[dict[str, Any], Tensor]]] = {}
        for parameter in group["params"] if due else ():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.to_dense() if parameter.grad.layout != torch.strided else parameter.grad
            gradient = gradient.detach().float() if scale is None else gradient.detach().float() / scale
            state, names = optimizer.state.get(parameter, {}), _entries(kind, gradient.shape)
            if stale := [name for name in TENSORS if name in state and name not in names]:
                # Of another `what`: begin anew.
                for name in (COUNT, *stale):
                    del state[name]
                group[SINCE] = _steps_of(optimizer, group)
            taken = int(state.get(COUNT, 0)) + (not rehearsed)
            weight = (1 - group[DECAY]) / (1 - group[DECAY] ** taken) if taken else 0.0
            into, gradient = state if state else pending.setdefault(parameter, {}), _by_rows(gradient)
            into[COUNT] = taken
            if CODES in names:
                alike = (gradient.device, gradient.shape[1:].numel(), weight, taken)
                coded.setdefault(alike, []).append((into, gradient))
            else:
                into.update(_updated(names, into, gradient, weight))
        for (*_, weight, taken), members in coded.items():
            for some in _portions(members):
                _recode(some, weight, taken)


def _is_rehearsal(optimizer: Optimizer) -> bool:
    """Whether the step is one that torch.distributed.checkpoint takes to find out which entries a state has.

    It takes it before the first one, at a learning rate of 0 and by gradients of 0.
    """
    if optimizer.state or not all(float(group.get("lr", 1.0)) == 0 for group in optimizer.param_groups):
        return False
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return not any(bool(extremes(g).any()) for g in gradients if g is not None and g.numel())


def _begun(pending: dict[Tensor, dict[str, Any]], optimizer: Optimizer, *_: Any) -> None:
    """Add what waited for the optimiser to begin a state."""
    for parameter, found in pending.items():
        optimizer.state[parameter].update(found)
    pending.clear()


def _entries(kind: str, shape: torch.Size) -> tuple[str, ...]:
    """Those of the tracked tensors that a parameter of this shape has."""
    if len(shape) < 2 or (kind == "diagonal8" and shape[1:].numel() < _FEWEST):
        kind = "diagonal32"
    sides = {"diagonal8": (CODES, EXPONENTS), "factored": (ROWS, COLUMNS), "kronecker": (LEFT, RIGHT)}
    return sides.get(kind, (WHOLE,))


def _portions(members: Sequence[tuple[dict[str, Any], Tensor]]) -> Iterator[list[tuple[dict[str, Any], Tensor]]]:
    """Runs of gradients that are taken together: as many as make `_TOGETHER` numbers, or one."""
    some: list[tuple[dict[str, Any], Tensor]] = []
    for member in members:
        if some and sum(gradient.numel() for _, gradient in (*some, member)) > _TOGETHER:
            yield some
            some = []
        some.append(member)
    yield some


def _recode(members: Sequence[tuple[dict[str, Any], Tensor]], weight: float, turn: int) -> None:
    """Into the 8 bits of parameters with rows of one length, one more gradient each, which counts by `weight`.

    All of them are one matrix for this, as a GPU would else wait for many small operations.
    """

    def joined(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    local = [own_part(gradient) for _, gradient in members]
    squares = joined([part.reshape(len(part), part.shape[1:].numel()) for part in local]).square()
    if CODES in members[0][0]:
        codes = joined([own_part(into[CODES]).flatten(1) for into, _ in members])
        old = _decoded(codes, joined([own_part(into[EXPONENTS]) for into, _ in members]))
    else:
        old = torch.zeros_like(squares)
    sizes = [len(part) for part in local]
    each = (torch.split(found, sizes) for found in _encoded(old.lerp_(squares, weight), turn))
    for (into, gradient), part, codes, exponents in zip(members, local, *each, strict=True):
        # Of their own memory, as whatever saves a tensor may save all of the memory it lies in.
        into[CODES] = _placed(codes.reshape(part.shape).clone(), gradient)
        into[EXPONENTS] = _placed(exponents.clone(), gradient)


def _updated(names: Sequence[str], state: Mapping[str, Any], gradient: Tensor, weight: float) -> dict[str, Tensor]:
    """The other tracked entries with one more gradient, which counts by `weight`; a sharded one by its rows here."""
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
    found = {}
    for name, fresh in now.items():
        if name in state:
            _floats(own_part(state[name])).lerp_(fresh, weight)
            found[name] = state[name]
        else:
            stored = _bytes(fresh * weight)
            found[name] = stored if name == COLUMNS else _placed(stored, gradient)
    return found


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


def _encoded(values: Tensor, turn: int) -> tuple[Tensor, Tensor]:
    """Codes of non-negative float32 numbers, (m, n), and the exponents of their blocks, (m, blocks).

    A number is rounded to one of its two neighbours: up if the part of it that is dropped and a number of the turn
    between 0 and 1 make more than 1. Those numbers are the multiples of the golden ratio, so that over turns as many
    are rounded up as should be. What is 0 stays 0, and nothing above 10⁻³⁹ becomes it. One NaN makes its block NaN.
    """
    largest = torch.cat([part.amax(dim=2) for part in _blocks(values)], dim=1)
    # Rounded up, the largest may reach the next octave.
    exponents = (((largest.view(torch.int32) + _DROPPED) >> 23) - _OCTAVES).clamp_(min=0)
    exponents.masked_fill_(largest.isnan(), _LAST)
    places = torch.arange(values.shape[1], device=values.device) % _BLOCK + 1
    turns = ((places * _GOLDEN + turn * _GOLDEN * 7) & _DROPPED).int()
    # Sixteen bits hold all that is left, in half the memory.
    keys = (values.view(torch.int32) + turns).bitwise_right_shift_(_SHIFT).to(torch.int16)
    least = keys.clamp(max=1)
    for part, lowest in zip(_blocks(keys), _blocks_of(exponents, values.shape[1]), strict=True):
        part.sub_(lowest)
    return torch.maximum(keys, least, out=keys).to(torch.uint8), exponents.to(torch.uint8)


def _decoded(codes: Tensor, exponents: Tensor) -> Tensor:
    """The numbers behind codes, (m, n) in float32."""
    keys = codes.flatten(1).to(torch.int16)
    is_positive = keys.clamp(max=1)
    each = zip(_blocks(keys), _blocks(is_positive), _blocks_of(exponents, keys.shape[1]), strict=True)
    for part, positive, lowest in each:
        part.addcmul_(positive, lowest)
    return keys.int().bitwise_left_shift_(_SHIFT).view(torch.float32)


def _blocks(matrix: Tensor) -> list[Tensor]:
    """The whole blocks of rows, (m, blocks, 256), and what is left of them, (m, 1, fewer), in the same memory."""
    whole, rest = divmod(matrix.shape[1], _BLOCK)
    parts = [matrix[:, : whole * _BLOCK].view(len(matrix), whole, _BLOCK)] if whole else []
    return [*parts, matrix[:, whole * _BLOCK :].unsqueeze(1)] if rest else parts


def _blocks_of(exponents: Tensor, n: int) -> list[Tensor]:
    """The keys that exponents stand for, of the blocks of rows of n."""
    keys = (exponents.to(torch.int16) << 4).unsqueeze(2)
    whole = n // _BLOCK
    return [part for part in (keys[:, :whole], keys[:, whole:]) if part.shape[1]]


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
        if not all(bool(factor.isfinite().all()) for factor in factors):
            # What reads it refuses it by name.
            return factors[0].new_full(sides, torch.nan), (None, None)
        return product_of(factors)
    if CODES in held:
        found = _decoded(held[CODES], held[EXPONENTS])
    elif WHOLE in held:
        found = _floats(held[WHOLE]).clone()
    else:
        rows, columns = _floats(held[ROWS]), _floats(held[COLUMNS])
        found = rows * columns / rows.mean().clamp(min=torch.finfo(torch.float32).tiny)
    if found.shape != sides:
        raise StateError(f"a tracked moment has shape {tuple(found.shape)}: the state belongs to another model")
    return found, (None, None)
