"""`load`: a calibrated network out of its file."""

from __future__ import annotations

import os
from functools import partial
from typing import cast, overload

import torch
from torch import Tensor, nn

from bayesadam._files import damage_named
from bayesadam.calibrated import files, programs
from bayesadam.calibrated.module import Calibrated
from bayesadam.calibrated.tapped import Tapped
from bayesadam.compress.packing import is_packed, load_network
from bayesadam.errors import FileError, SettingError
from bayesadam.predict.batches import numbers_of
from bayesadam.predict.network import Forward


@overload
def load(path: str | os.PathLike[str], model: nn.Module, *, forward: Forward | None = None) -> Calibrated: ...
@overload
def load(path: str | os.PathLike[str]) -> programs.Program: ...
def load(
    path: str | os.PathLike[str], model: nn.Module | None = None, *, forward: Forward | None = None
) -> Calibrated | programs.Program:
    """The calibrated network that `net.save` wrote: to a `.pt2`, which holds the program, or to a `.safetensors`.

    Of a pruned or quantised network's file it is a copy of the model with the weights, an ordinary module.
    A program is code: take it from whom you would take code. One that holds a pickle is refused.

    Args:
        model: for a `.safetensors`: of the same architecture; a copy of it gets the weights of the file.
        forward: the one that it was calibrated with, where there was one: code is not in that file.
    """
    suffix = os.path.splitext(os.fspath(path))[1]
    if suffix == ".onnx":
        raise SettingError(f"{os.fspath(path)!r} is run by onnxruntime.InferenceSession: ba.load takes .pt2 files")
    if suffix == ".pt2":
        if model is not None or forward is not None:
            raise SettingError(f"{os.fspath(path)!r} holds the program: ba.load(path), without a model or forward=")
        return programs.Program(*programs.read_program(path))
    if suffix in (".pt", ".pth", ".ckpt", ".tar", ".bin"):
        raise SettingError(
            f"{os.fspath(path)!r} is a checkpoint by its name, which Posterior.from_checkpoint(path, model, n_data=…) "
            "reads"
        )
    if model is None:
        raise SettingError(
            f"{os.fspath(path)!r} holds weights and not the model: ba.load(path, model). A file of net.save('….pt2') "
            "needs none"
        )
    if not isinstance(model, nn.Module):
        raise SettingError(f"ba.load(path, model) takes the model, not its class or a function: got {model!r}")
    if is_packed(path):
        return cast(Calibrated, load_network(path, model))
    network, fit, probe = files.read(path, model, forward is not None)
    with damage_named(os.fspath(path), "net.save"):
        net = Calibrated(Tapped(network, (), forward), fit)
        # What the file holds goes together if it makes an answer out of zeros.
        (dimensions, last), zeros = fit.dims, partial(torch.zeros, device=numbers_of(network).device)
        # As many examples as there are outputs would hide that a tensor has the shape of the other.
        n = 3 + (last == 3)
        f = zeros(n) if dimensions == 1 else zeros(n, *[1] * (dimensions - 2), last)
        seen = {} if fit.leverage is None else {one.module: zeros(n, one.width) for one in fit.leverage.layers}
        answer, _ = net.judged(net.answer(f, seen)), str(net.report)
        if fit.scores is not None:
            _ = answer.set() if fit.likelihood.is_classes else answer.interval()
    if probe is not None and not _same(probe, net):
        raise FileError(
            f"{os.fspath(path)} is of another network: with its weights this model has other outputs. Pass the same "
            "forward=, and a model with the same settings, activations and buffers that no state dict holds"
        )
    return net


def _same(probe: Tensor, net: Calibrated) -> bool:
    """Whether outputs are what they were, but for the rounding of another machine."""
    try:
        f = net.probe()
    except Exception:
        return False
    if f is None or f.shape != probe.shape:
        return False
    few_digits = numbers_of(net.model).dtype in (torch.float16, torch.bfloat16)
    away, unit = (f.cpu() - probe).abs(), 1 + probe.abs().nan_to_num(0, 0, 0).amax()
    return bool((away <= (0.05 if few_digits else 1e-3) * unit)[probe.isfinite()].all())
