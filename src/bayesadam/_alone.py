"""One thread at a time with a model whose weights, buffers, hooks or modes are not its own for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_adding = Lock()


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
    """Wait until no other thread is with the model, and keep them waiting; the same thread may come in again."""
    with _adding:
        lock = _locks.setdefault(unwrap(model), RLock())
    with lock:
        yield


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
