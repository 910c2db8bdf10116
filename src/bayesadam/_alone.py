"""One thread at a time with a model whose weights, buffers, hooks or modes are not its own for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from weakref import WeakKeyDictionary

from torch import nn

from bayesadam.errors import BayesAdamError

_changed = Condition()
# The thread that has a model, and how many times over.
_holders: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()
_wanted: dict[int, nn.Module] = {}


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile, DataParallel and DistributedDataParallel, with its own names."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@contextmanager
def alone_with(model: nn.Module) -> Iterator[None]:
    """Wait until no other thread is with the model, and keep them waiting; the same thread may come in again.

    Raises:
        BayesAdamError: the thread that has the model waits, itself or through others, for one that this thread has.
    """
    model, me = unwrap(model), get_ident()
    with _changed:
        while _holder(model) not in (None, me):
            if _waits_for(model, me):
                raise BayesAdamError(
                    f"this thread and another have a model each and wait for the other's, a {type(model).__name__}: "
                    "go into sampled() of several models in the same order everywhere, or of one at a time"
                )
            _wanted[me] = model
            try:
                _changed.wait()
            finally:
                del _wanted[me]
        _holders[model] = me, _holders.get(model, (me, 0))[1] + 1
    try:
        yield
    finally:
        with _changed:
            depth = _holders[model][1] - 1
            if depth:
                _holders[model] = me, depth
            else:
                del _holders[model]
                _changed.notify_all()


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Alone with the model, which is in evaluation mode; afterwards each module is in its own mode again."""
    with alone_with(model):
        modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


def _holder(model: nn.Module) -> int | None:
    return _holders.get(model, (None, 0))[0]


def _waits_for(model: nn.Module, me: int) -> bool:
    """Whether the model's holder waits for a model of this thread's, or for one whose holder does."""
    holder = _holder(model)
    while holder is not None and holder in _wanted:
        holder = _holder(_wanted[holder])
        if holder == me:
            return True
    return False
