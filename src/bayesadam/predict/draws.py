"""Draws of the network's outputs: from weight draws, from activations, or from the linearised network."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vmap

from bayesadam.gaussian.noise import fresh_seed, stream_seed
from bayesadam.predict.call import batch_size, examples, has_graph, in_tf32, repeated
from bayesadam.predict.layers import MatrixUse, SumUse
from bayesadam.predict.moments import one_jacobian
from bayesadam.predict.plan import recorded

if TYPE_CHECKING:
    from bayesadam.predict.prediction import Network

Draw = Callable[[], dict[str, Tensor]]
# Activations that a CPU works on at a time, in bytes: beyond its cache, every operation waits for the memory.
_CACHED = 1 << 27


def output_draws(net: Network, n: int) -> tuple[Tensor, Tensor]:
    """n draws of f, (n, batch, ...), each of one θ for the whole batch where `joint`, and f(x; μ), float32 or wider."""
    gaussian, call, params, inputs = net.gaussian, net.call, net.params, net.inputs
    generator, widest = net.options.generator, net.plan.widest

    def draw() -> dict[str, Tensor]:
        return {name: value.to(params[name].device) for name, value in gaussian.sample(generator=generator).items()}

    with torch.set_grad_enabled(has_graph(inputs)):
        # Nothing is kept for a way back: what counts is the largest of the activations.
        parts = list(_parts(net, 4 * widest))
        centre = torch.cat([call(params, part) for part in parts])
        centre = centre.to(torch.promote_types(centre.dtype, torch.float32))
        diagonal = gaussian.structure.independent
        if net.options.predictive == "linearised-sampled":
            drawn = centre + linearised_draws(net, draw, n)
        elif diagonal and not net.options.joint and draws_activations(net):
            drawn = activation_draws(net, n)
        else:
            entries = 4 * widest * batch_size(parts[0])
            drawn = _over_draws(net, lambda theta: torch.cat([call(theta, p) for p in parts]), draw, n, entries)
    return drawn.to(centre.dtype), centre


def linearised_draws(net: Network, draw: Draw, n: int) -> Tensor:
    """J (θ − μ) for n draws of θ, by forward-mode products, (n, batch, ...)."""
    call, inputs = net.call, net.inputs
    means = {name: tensor.detach() for name, tensor in net.params.items()}

    def product(theta: dict[str, Tensor], part: Any) -> Tensor:
        tangent = {name: theta[name] - mean for name, mean in means.items()}
        with in_tf32(net.like):
            found: Tensor = jvp(lambda p: call(p, part), (means,), (tangent,))[1]
        return found

    try:
        product(means, examples(inputs, 0, 1))
    except (RuntimeError, NotImplementedError):
        # Some operation has no forward mode: example by example, one gradient for each output.
        thetas, rows = [draw() for _ in range(n)], []
        steps = {name: torch.stack([theta[name] - mean for theta in thetas]) for name, mean in means.items()}
        for i in range(batch_size(inputs)):
            gradients = one_jacobian(call, means, {}, examples(inputs, i, i + 1))
            shares = [steps[name].reshape(n, -1) @ g.reshape(len(g), -1).T for name, g in gradients.items()]
            rows.append(torch.stack(shares).sum(dim=0))
        return torch.stack(rows, dim=1).reshape(n, -1, *net.plan.shape)
    parts = list(_parts(net, 8 * net.plan.widest))
    entries = 8 * net.plan.widest * batch_size(parts[0])
    return _over_draws(net, lambda theta: torch.cat([product(theta, p) for p in parts]), draw, n, entries)


def _parts(net: Network, entries: int, most: int = sys.maxsize) -> Iterator[Any]:
    """The batch in parts that a forward pass may take, of `entries` numbers an example and `most` bytes."""
    size, budget = batch_size(net.inputs), min(net.options.memory_budget, most)
    at_a_time = max(1, min(size, budget // max(1, 2 * entries * net.like.element_size())))
    for start in range(0, size, at_a_time):
        yield net.inputs if at_a_time >= size else examples(net.inputs, start, start + at_a_time)


def _over_draws(net: Network, outputs: Callable[[Any], Tensor], draw: Draw, n: int, entries: int) -> Tensor:
    """`outputs` of n draws, vectorised over as many as fit; one at a time where the model cannot be vectorised."""
    first = draw()
    element = next(iter(first.values())).element_size()
    one = element * (entries + 2 * sum(tensor.numel() for tensor in first.values()))
    at_once = max(1, min(n, net.options.memory_budget // max(one, 1)))
    results: list[Tensor] = []
    vectorised = at_once > 1
    for done in range(0, n, at_once):
        pending = [first if k == 0 else draw() for k in range(done, min(done + at_once, n))]
        if vectorised:
            try:
                results.append(vmap(outputs)({name: torch.stack([p[name] for p in pending]) for name in first}))
            except RuntimeError:
                vectorised = False
        if not vectorised:
            results.extend(outputs(p).unsqueeze(0) for p in pending)
    return torch.cat(results)


def draws_activations(net: Network) -> bool:
    """Whether every weight sits in an `nn.Linear` that is used once, on one row per example."""
    linear = [prefix for prefix, module in net.call.model.named_modules() if type(module) is nn.Linear]
    if net.plan.generic or net.plan.silent or not all(name.rpartition(".")[0] in linear for name in net.params):
        return False
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in net.params.items()}
    with torch.enable_grad():
        uses, _ = recorded(net.call, leaves, repeated(examples(net.inputs, 0, 1), 2))
    flat = all(
        (isinstance(use, MatrixUse) or (isinstance(use, SumUse) and not use.channel and use.scale is None))
        and use.rows is None
        and len(use.shape) == 2
        and use.shape[0] == 2
        for use in uses
    )
    return flat and sorted(use.name for use in uses) == sorted(leaves)


def activation_draws(net: Network, n: int) -> Tensor:
    """Local reparameterisation: z ~ N(a μᵀ + b, a² Sᵀ + s), weights of its own for each example; (n, batch, ...)."""
    call, params, like = net.call, net.params, net.like
    variances = {name: v.to(params[name]) for name, v in net.gaussian.coordinate_variance.items()}
    seed, layers = fresh_seed(net.options.generator), count()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Draws that have the same input, as in the first layer, share its matrix products.
        a = args[0] if args else kwargs["input"]
        copies = a.view(n, -1, a.shape[-1])
        return (copies[0] if bool((copies == copies[0]).all()) else a,), {}

    def leave(own: Sequence[Tensor | None], rows: int, module: nn.Module, args: Any, z: Tensor) -> Tensor:
        weight, bias = own
        variance: Any = bias if weight is None else F.linear(args[0].square(), weight, bias)
        generator = torch.Generator(device=like.device).manual_seed(stream_seed(seed, "layer", next(layers)))
        noise = torch.empty(rows // len(z), *z.shape, dtype=like.dtype, device=like.device).normal_(generator=generator)
        return torch.addcmul(z, noise.to(z), variance.sqrt()).flatten(0, 1)

    found = []
    for part in _parts(net, 4 * n * net.plan.widest, _CACHED if like.device.type == "cpu" else sys.maxsize):
        rows = n * batch_size(part)
        with ExitStack() as hooks:
            for prefix, module in call.model.named_modules():
                own = [variances.get(f"{prefix}.{kind}".lstrip(".")) for kind in ("weight", "bias")]
                if any(tensor is not None for tensor in own):
                    hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                    hooks.callback(module.register_forward_hook(partial(leave, own, rows)).remove)
            output = call(params, repeated(part, n))
        found.append(output.reshape(n, -1, *output.shape[1:]))
    return torch.cat(found, dim=1)
