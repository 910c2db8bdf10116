"""The user's model as a pure function of named parameters: other weights in it for a while, in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bayesadam._alone import alone_with, in_eval_mode, named_modules
from bayesadam._shards import is_sharded
from bayesadam.errors import MatchError, SettingError
from bayesadam.predict.batches import is_ragged
from bayesadam.readers.match import own_parameters
from bayesadam.weights.gaussian import GaussianWeights
from bayesadam.weights.named import Named
from bayesadam.weights.networks import other_statistics, writes_to_statistics

Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, eq=False, repr=False)
class Gaussian(GaussianWeights):
    """A Gaussian over the weights of a model, with the likelihood of its outputs: see `Posterior`."""

    model: nn.Module = field(kw_only=True)
    likelihood: str | None = field(default=None, kw_only=True)
    noise_variance: Tensor | None = field(default=None, kw_only=True)
    temperature: float = field(default=1.0, kw_only=True)
    running: tuple[int, dict[str, list[float]]] | None = field(default=None, kw_only=True)

    @property
    def moved_statistics(self) -> list[str]:
        """Running statistics of the model's batch norms that have changed since the posterior was read."""
        assert self.running is not None
        writes, before = self.running
        return [] if writes == writes_to_statistics(self.model) else other_statistics(before, self.model)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name, which must still be those of the posterior."""
        parameters = own_parameters(self.model)
        for name, shape in self.shapes.items():
            if name not in parameters or parameters[name].shape != shape:
                raise MatchError(f"the model no longer has a parameter {name!r} of shape {tuple(shape)}")
        return parameters


@contextmanager
def swapped(model: nn.Module, params: Named) -> Iterator[None]:
    """The model with other tensors for the parameters they name, wherever those are used, and copies of its buffers.

    They are taken in the types and on the devices of the parameters, and may have a copy for each example. Buffers of
    torch's own layers are only read in evaluation mode, and not copied. What was there before is back at the end.
    """
    instead: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    missing = dict(params)
    modules = list(named_modules(model))
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            tensor = params.get(prefix + key)
            if tensor is not None and parameter is not None:
                shape, own = tensor.shape, parameter.shape
                if shape == own or shape[1:] == own or (own[:1] == (1,) and shape[1:] == own[1:]):
                    instead[id(parameter)] = tensor.to(parameter.device, parameter.dtype)
                    missing.pop(prefix + key)
    for name, tensor in missing.items():
        raise MatchError(f"the model no longer has a parameter {name!r} of shape {tuple(tensor.shape)}")
    for _, module in modules:
        before += [(module._parameters, k, p) for k, p in module._parameters.items() if id(p) in instead]
        if module.training or not type(module).__module__.startswith("torch.nn."):
            before += [(module._buffers, k, b) for k, b in module._buffers.items() if b is not None]
    try:
        for place, key, tensor in before:
            place[key] = instead[id(tensor)] if id(tensor) in instead else tensor.clone()
        yield
    finally:
        for place, key, tensor in before:
            place[key] = tensor


@dataclass(frozen=True, eq=False)
class Call:
    """f(θ, inputs) → (batch, ...) of one model.

    Tensors and ragged batches are passed alone, tuples as arguments, mappings as keywords. `forward(model, inputs)` is
    for models whose call is unusual; its first tensor or `.logits` is taken. `mean` is μ.
    """

    model: nn.Module
    forward: Forward | None = None
    mean: Named = field(default_factory=dict)

    @classmethod
    def of(cls, posterior: Gaussian, forward: Forward | None) -> Call:
        """At the mean of a posterior, in the types and on the devices of its model's parameters."""
        with alone_with(posterior.model):
            parameters = posterior.parameters()
            if any(map(is_sharded, parameters.values())):
                raise SettingError(
                    "a prediction needs whole tensors, and this posterior is sharded over processes: predict with "
                    "posterior.gathered(model), a plain model of the same architecture, or run the model yourself "
                    "inside posterior.sampled()"
                )
            mean = {name: mu.detach().to(parameters[name]) for name, mu in posterior.mean.items()}
        return cls(posterior.model, forward, mean)

    @cached_property
    def leaves(self) -> Named:
        """μ, with gradients."""
        return {name: mu.detach().requires_grad_() for name, mu in self.mean.items()}

    def __call__(self, params: Named, inputs: Any) -> Tensor:
        """The model's output, (batch, ...), with `params` for the parameters they name."""
        with swapped(self.model, params):
            return output_tensor(self.run(inputs))

    def flat(self, params: Named, inputs: Any) -> Tensor:
        """The output as (batch, outputs)."""
        output = self(params, inputs)
        return output.reshape(output.shape[0], -1)

    def run(self, inputs: Any) -> Any:
        """All that the model returns, with the weights that it has."""
        if self.forward is not None:
            try:
                return self.forward(self.model, inputs)
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                raise MatchError(
                    "forward= takes a gradient, such as a force, where gradients are off: put it under "
                    "torch.enable_grad()"
                ) from error
        if isinstance(inputs, Mapping):
            return self.model(**inputs)
        several = isinstance(inputs, tuple | list) and not is_ragged(inputs)
        return self.model(*inputs) if several else self.model(inputs)


def output_tensor(output: Any) -> Tensor:
    """The tensor in what a model returned: itself, `.logits`, `["logits"]`, or the first of a tuple."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() == 0:
        what = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise MatchError(
            f"the model returned {what}, not a tensor of real outputs with a row for each example: pass "
            "forward=lambda model, batch: ... that returns them, (batch, ...)"
        )
    return output


def require_rows(output: Tensor, size: int) -> None:
    """Refuse outputs that do not have the batch first."""
    if output.shape[0] != size:
        raise MatchError(
            f"the model returned {output.shape[0]} rows for {size} examples: its output must have the batch first. "
            "Pass forward=lambda model, batch: ... that returns (batch, ...), and the inputs with the batch first. "
            "Examples of several rows each, such as graphs, are given as a list of them: of mappings or tuples, which "
            "in a list are batches, as [examples] or (examples, targets)"
        )


def mixes_examples(failure: Exception | None = None) -> MatchError:
    """What is raised of a model that gives another output for an example when that is run alone."""
    return MatchError(
        "each example's output must depend on that example alone, but the model gives something else when one is run "
        "alone. Does it mix examples (batch norm without running statistics), is something in it random, or has an "
        "input as many rows as the batch without being one row per example? Pass that one through forward=lambda "
        "model, batch: ... Or is there no batch dimension? A single example is "
        f"x[None]{'' if failure is None else f' ({failure})'}"
    )


def widened(tensor: Tensor) -> Tensor:
    """The same in float32 or wider."""
    if tensor.dtype is torch.float32:
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# --- evaluation -----------------------------------------------------------------------------------------------------


class _Shared:
    """A setting of the whole process: made as the first thread enters, undone as the last one leaves."""

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self.setting, self.guard, self.users, self.undo = setting, Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.guard:
            if not self.users:
                self.undo.enter_context(self.setting())
            self.users += 1
        try:
            yield
        finally:
            with self.guard:
                self.users -= 1
                if not self.users:
                    self.undo.close()


@contextmanager
def _off(get: Callable[[], bool], change: Callable[[bool], Any]) -> Iterator[None]:
    before = get()
    try:
        change(False)
        yield
    finally:
        change(before)


_mha, _onednn = torch.backends.mha, torch.backends.mkldnn
_by_layers = _Shared(lambda: _off(_mha.get_fastpath_enabled, _mha.set_fastpath_enabled))
_in_plain_mathematics = _Shared(lambda: sdpa_kernel(SDPBackend.MATH))
_uncompiled = _Shared(lambda: torch.compiler.set_stance("force_eager"))
_without_onednn = _Shared(lambda: _off(lambda: bool(_onednn.enabled), lambda on: setattr(_onednn, "enabled", on)))


@contextmanager
def evaluating(model: nn.Module, *, differentiable: bool = True) -> Iterator[None]:
    """Eval mode, and attention in plain mathematics, which every kind of differentiation supports; restored after.

    Within, gradients can be taken even where the caller is in inference mode, compiled models run eagerly, since they
    would be compiled anew for every hook, and other threads that use the same model wait. Recurrent layers do without
    oneDNN, whose LSTM in evaluation mode gives gradients that are memory never written to.
    """
    with in_eval_mode(model) as modules, ExitStack() as settings:
        settings.enter_context(_by_layers())
        if differentiable:
            settings.enter_context(_in_plain_mathematics())
        if any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in modules):
            settings.enter_context(_uncompiled())
        if any(isinstance(m, nn.RNNBase) for m in modules):
            settings.enter_context(_without_onednn())
        with torch.inference_mode(False):
            yield
