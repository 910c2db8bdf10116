"""Draws of the network's outputs: from weight draws, from activations, or from the linearised network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jvp, vmap

from bayesadam.gaussian.noise import fresh_seed, stream_seed
from bayesadam.gaussian.structure import Named
from bayesadam.predict.call import Call, batch_size, examples, in_tf32, repeated
from bayesadam.predict.layers import MatrixUse, SumUse
from bayesadam.predict.moments import one_jacobian
from bayesadam.predict.plan import Plan, recorded

Draw = Callable[[], dict[str, Tensor]]
# Activations that a CPU works on at a time, in bytes: beyond its cache, every operation waits for the memory.
_CACHED = 1 << 27


def output_draws(
    gaussian: Any,
    call: Call,
    params: Named,
    inputs: Any,
    plan: Plan,
    kind: str,
    generator: torch.Generator | None,
    budget: int,
    n: int,
) -> tuple[Tensor, Tensor]:
    """n draws of f, (n, batch, ...), and f(x; μ), in float32 or wider, within a budget of bytes."""

    def draw() -> dict[str, Tensor]:
        return {name: value.to(params[name].device) for name, value in gaussian.sample(generator=generator).items()}

    with torch.no_grad():
        # Nothing is kept for a way back: what counts is the largest of the activations.
        parts = list(_parts(inputs, 4 * plan.widest, next(iter(params.values())), budget))
        centre = torch.cat([call(params, part) for part in parts])
        centre = centre.to(torch.promote_types(centre.dtype, torch.float32))
        diagonal = not gaussian.structure.bases and gaussian.directions is None
        if kind == "linearised-sampled":
            drawn = centre + linearised_draws(call, params, draw, inputs, n, plan, budget)
        elif diagonal and draws_activations(call, plan, params, inputs):
            variances = {name: v.to(params[name]) for name, v in gaussian.coordinate_variance.items()}
            drawn = activation_draws(call, params, variances, inputs, n, fresh_seed(generator), plan.widest, budget)
        else:
            entries = 4 * plan.widest * batch_size(parts[0])
            drawn = _over_draws(lambda theta: torch.cat([call(theta, p) for p in parts]), draw, n, entries, budget)
    return drawn.to(centre.dtype), centre


def linearised_draws(call: Call, params: Named, draw: Draw, inputs: Any, n: int, plan: Plan, budget: int) -> Tensor:
    """J (θ − μ) for n draws of θ, by forward-mode products, (n, batch, ...)."""
    means = {name: tensor.detach() for name, tensor in params.items()}
    like = next(iter(means.values()))

    def product(theta: dict[str, Tensor], part: Any) -> Tensor:
        tangent = {name: theta[name] - mean for name, mean in means.items()}
        with in_tf32(like):
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
        return torch.stack(rows, dim=1).reshape(n, -1, *plan.shape)
    parts = list(_parts(inputs, 8 * plan.widest, like, budget))
    entries = 8 * plan.widest * batch_size(parts[0])
    return _over_draws(lambda theta: torch.cat([product(theta, p) for p in parts]), draw, n, entries, budget)


def _parts(inputs: Any, entries: int, like: Tensor, budget: int) -> Iterator[Any]:
    """The batch in parts that a forward pass may take, with `entries` numbers for each example."""
    size = batch_size(inputs)
    at_a_time = max(1, min(size, budget // max(1, 2 * entries * like.element_size())))
    for start in range(0, size, at_a_time):
        yield inputs if at_a_time >= size else examples(inputs, start, start + at_a_time)


def _over_draws(outputs: Callable[[Any], Tensor], draw: Draw, n: int, entries: int, budget: int) -> Tensor:
    """`outputs` of n draws, vectorised over as many as fit; one at a time where the model cannot be vectorised."""
    first = draw()
    element = next(iter(first.values())).element_size()
    one = element * (entries + 2 * sum(tensor.numel() for tensor in first.values()))
    at_once = max(1, min(n, budget // max(one, 1)))
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


# --- activations ----------------------------------------------------------------------------------------------------


def draws_activations(call: Call, plan: Plan, params: Named, inputs: Any) -> bool:
    """Whether every weight sits in an `nn.Linear` that is used once, on one row per example."""
    linear = [prefix for prefix, module in call.model.named_modules() if type(module) is nn.Linear]
    if plan.generic or plan.silent or not all(name.rpartition(".")[0] in linear for name in params):
        return False
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    with torch.enable_grad():
        uses, _ = recorded(call, leaves, repeated(examples(inputs, 0, 1), 2))
    flat = all(
        (isinstance(use, MatrixUse) or (isinstance(use, SumUse) and not use.channel and use.scale is None))
        and use.rows is None
        and len(use.shape) == 2
        and use.shape[0] == 2
        for use in uses
    )
    return flat and sorted(use.name for use in uses) == sorted(leaves)


def activation_draws(
    call: Call, params: Named, variances: Named, inputs: Any, n: int, seed: int, activations: int, budget: int
) -> Tensor:
    """Local reparameterisation: z ~ N(a μᵀ + b, a² Sᵀ + s) instead of weights; (n, batch, ...).

    Each example has weights of its own, so the draws have the right distribution example by example, at lower variance
    and far fewer random numbers than weight draws.
    """
    like = next(iter(params.values()))
    layers = count()

    def noise(shape: torch.Size) -> Tensor:
        generator = torch.Generator(device=like.device).manual_seed(stream_seed(seed, "layer", next(layers)))
        return torch.empty(shape, dtype=like.dtype, device=like.device).normal_(generator=generator)

    # Where the draws part at the first layer, its matrix products are shared by all of them.
    late = _may_part_at_first_layer(call, params, examples(inputs, 0, 2))
    if like.device.type == "cpu":
        budget = min(budget, _CACHED)
    found = []
    for part in _parts(inputs, 4 * n * activations, like, budget):
        size = batch_size(part)
        with _noisy_layers(call.model, params, variances, noise, *((size, n) if late else (size * n, 1))):
            output = call(params, part if late else repeated(part, n))
        found.append(output.reshape(n, size, *output.shape[1:]))
    return torch.cat(found, dim=1)


def _may_part_at_first_layer(call: Call, params: Named, probe: Any) -> bool:
    """Whether the model's batch may grow threefold in the first layer: each copy must come out as if it were alone.

    It may not where the model joins what comes before with what comes after, or has kept the length of its input.
    """
    size = batch_size(probe)
    units = {name: torch.ones_like(tensor) for name, tensor in params.items()}

    def outputs(copies: int, *offsets: float) -> Tensor:
        # Instead of noise, each copy has a constant number of standard deviations everywhere.
        steps = torch.tensor(offsets).repeat_interleave(size)

        def noise(shape: torch.Size) -> Tensor:
            return steps.view(shape[0], shape[1], *[1] * (len(shape) - 2)).expand(shape)

        with _noisy_layers(call.model, params, units, noise, size, copies):
            return call(params, probe)

    try:
        found = outputs(3, -1.0, 0.0, 1.0)
    except RuntimeError:
        return False
    expected = torch.cat([outputs(1, offset) for offset in (-1.0, 0.0, 1.0)])
    return found.shape == expected.shape and bool((found - expected).norm() <= 1e-2 * expected.norm())


@contextmanager
def _noisy_layers(
    model: nn.Module, params: Named, variances: Named, noise: Callable[[torch.Size], Tensor], rows: int, copies: int
) -> Iterator[None]:
    """Linear layers whose outputs are drawn, `copies` of each where there are `rows` of them."""
    names = {id(tensor): name for name, tensor in params.items()}

    def hook(module: nn.Linear, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], z: Tensor) -> Tensor | None:
        weight, bias = (names.get(id(p)) if p is not None else None for p in (module.weight, module.bias))
        if weight is None and bias is None:
            return None
        variance = None if bias is None else variances[bias]
        if weight is not None:
            given = args[0] if args else kwargs["input"]
            variance = F.linear(given.square(), variances[weight], variance)
        assert variance is not None
        drawn = noise(torch.Size((copies if z.shape[0] == rows else 1, *z.shape))).to(z)
        return torch.addcmul(z, drawn, variance.sqrt()).flatten(0, 1)

    handles = [
        module.register_forward_hook(hook, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
