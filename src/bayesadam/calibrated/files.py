"""Calibrated networks in safetensors files."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor, nn

from bayesadam import _storage as storage
from bayesadam._files import damage_named
from bayesadam._schema import Check, Count, NotNegative, Positive
from bayesadam.calibrated.fit import Fit, Report
from bayesadam.calibrated.ranges import InputRange
from bayesadam.errors import SettingError
from bayesadam.likelihoods import likelihood as likelihood_of
from bayesadam.predict.leverage import Leverage
from bayesadam.predict.matrices import layers_of

AnyPath = str | os.PathLike[str]
_Range = Annotated[
    InputRange, Check(lambda one: isinstance(getattr(torch, one.dtype, None), torch.dtype), "of a type of torch")
]


class _LeverageHeader(TypedDict):
    source: str
    modules: list[str]


class _Header(TypedDict, total=False):
    exponent: NotNegative
    temperature: Positive
    likelihood: str
    dims: tuple[Count, Count]
    class_dim: int
    forward: bool
    ranges: tuple[_Range, ...]
    report: Report
    leverage: _LeverageHeader


_KIND = storage.Kind(
    "bayesadam.calibrated",
    "a calibrated network",
    ": give the file that net.save wrote; Posterior.load(path, model) reads that of posterior.save",
    schema=_Header,
)
_MODEL, _PROBE = "model.", "probe"
_TABLES = ("spread", "noise_variance", "novelties", "leverages", "scores")


def write(path: AnyPath, fit: Fit, model: nn.Module, with_forward: bool, probe: Tensor | None) -> None:
    """Write the tensors of a network, of what held-out data added, and f of an example, to a safetensors file."""
    tensors = {} if probe is None else {_PROBE: probe}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise SettingError(
                f"the state dict has {name!r}, a {type(tensor).__name__}, and such files hold tensors: save a .pt2"
            )
        tensors[f"{_MODEL}{name}"] = tensor.contiguous()
    tensors |= {name: tensor for name in _TABLES if (tensor := getattr(fit, name)) is not None}
    header: dict[str, Any] = {name: getattr(fit, name) for name in ("exponent", "temperature")}
    header |= {"likelihood": fit.likelihood.name, "dims": list(fit.dims), "forward": with_forward}
    header["class_dim"] = fit.class_dim
    header["ranges"] = [vars(one) for one in fit.ranges]
    rule = fit.report.abstention
    about = {**vars(fit.report), "nll": dict(fit.report.nll), "abstention": None if rule is None else vars(rule)}
    header["report"] = about
    if (leverage := fit.leverage) is not None:
        assert leverage.medians is not None
        header["leverage"] = {"source": leverage.source, "modules": [layer.module for layer in leverage.layers]}
        names = _factor_names(header["leverage"]["modules"], len(leverage.means))
        tensors |= {"medians": leverage.medians} | dict(zip(names, leverage.factors, strict=True))
        tensors |= {f"mean{n}": mean for n, mean in enumerate(leverage.means)}
    storage.write(path, tensors, header, _KIND)


def read(path: AnyPath, model: nn.Module, with_forward: bool) -> tuple[nn.Module, Fit, Tensor | None]:
    """A copy of the model with the weights of a file, what held-out data added, and f of an example."""
    tensors, header = storage.read(path, _KIND)
    had = bool(header.get("forward"))
    if had != with_forward:
        given = "with forward=, pass the same" if had else "without forward=, leave it out"
        raise SettingError(f"{path} was calibrated {given}: code is not in the file")
    with damage_named(path, "net.save, or of another model"):
        network, weights = copy.deepcopy(model), storage.under(_MODEL, tensors)
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            # In the types of the file, such as bfloat16: in others the answers would be another network's.
            if name in weights:
                tensor.data = tensor.data.to(weights[name].dtype)
        network.load_state_dict(weights)
        return network, _unpacked_fit(header, tensors, network), tensors.get(_PROBE)


def _factor_names(modules: Sequence[str], near: int) -> list[str]:
    """Of the layers, and of the last ones within their class."""
    return [f"factor.{name}" for name in modules] + [f"within.{name}" for name in modules[len(modules) - near :]]


def _unpacked_fit(header: Mapping[str, Any], tensors: Mapping[str, Tensor], model: nn.Module) -> Fit:
    leverage = None
    if "leverage" in header:
        by_module = {layer.module: layer for layer in layers_of(model, dict(model.named_parameters()))}
        modules = header["leverage"]["modules"]
        means = tuple(tensors[f"mean{n}"] for n in range(len(modules)) if f"mean{n}" in tensors)
        factors = tuple(tensors[name] for name in _factor_names(modules, len(means)))
        layers, medians = tuple(by_module[m] for m in modules), tensors["medians"]
        # Files of 0.3 have the medians of two means; the third is the second where no classes are known.
        medians = torch.cat([medians, medians[-1:]]) if len(medians) == len(factors) + 2 else medians
        leverage = Leverage(layers, factors, header["leverage"]["source"], medians, means)
    return Fit(
        likelihood_of(header["likelihood"]),
        leverage,
        header["exponent"],
        header["temperature"],
        **{name: tensors.get(name) for name in _TABLES},
        dims=header["dims"],
        class_dim=header.get("class_dim", -1),
        ranges=header["ranges"],
        report=header["report"],
    )
