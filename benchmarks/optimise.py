"""What to try next: the best value after 20, 50 and 100 evaluations, by networks, a Gaussian process and chance.

    python benchmarks/optimise.py [--quick] [--seeds 20] [--problems ...] [--methods ...] [--part 0/1]

Every method starts from the same ten random points and maximises the logarithm of the expected improvement, found the
same way: over 2,000 random points and points near the best ones, and 30 gradient steps from the best of these. Of a
table all rows are scored.

- badam: `bayesadam.botorch.surrogate.Process`, with its defaults; trained from scratch at every tenth step, and on from
  where it was in between.
- gp: BoTorch's SingleTaskGP: an RBF kernel with a length for each input and its dimension-scaled prior, a noise with a
  prior, standardised outcomes, fitted by L-BFGS. `--botorch` takes BoTorch's own, else it is built of gpytorch here.
- laplace: laplace-bayesopt's LaplaceBoTorch where it is asked for and installed, with its defaults and the shape of our
  networks, trained from scratch at every step, as it does.
- random.

Problems, all to be maximised: Hartmann-6; Ackley-10 on [-15, 25]; Branin with noise of standard deviation 2; a table of
the accuracies of 2,592 settings of random-feature classifiers of digits, made here; and images: out of scikit-learn's
1,797 digits find the 3 with most ink, where any other digit is worth 0 and the inputs are 64 pixels. Values are without
noise, and so is the best one. A cell, one problem, method and seed, is a JSON file under `--out`, and is not run again;
`--part i/n` runs every n-th of them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bayesadam.botorch.surrogate import Process
from harness import Cell, against, arguments, number, one_core, setting, shared_cells, write_results

FIRST, EVALUATIONS, REPORTED = 10, 100, (20, 50, 100)
METHODS = ("badam", "gp", "random")
RIVALS = ("laplace",)
# Moments at inputs (n, d): mean and variance, (n,).
Moments = Callable[[Tensor], tuple[Tensor, Tensor]]


# --- problems ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A function on the unit cube, or on the rows of a table."""

    value: Callable[[Tensor], Tensor]
    width: int
    noise: float = 0.0
    table: Tensor | None = None


def hartmann6(x: Tensor) -> Tensor:
    a = torch.tensor(
        [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
    )
    p = torch.tensor(
        [
            [1312, 1696, 5569, 124, 8283, 5886],
            [2329, 4135, 8307, 3736, 1004, 9991],
            [2348, 1451, 3522, 2883, 3047, 6650],
            [4047, 8828, 8732, 5743, 1091, 381],
        ]
    )
    heights = torch.tensor([1.0, 1.2, 3.0, 3.2], dtype=torch.float64)
    return (heights * torch.exp(-(a.double() * (x[:, None] - p.double() / 1e4).square()).sum(dim=-1))).sum(dim=-1)


def ackley(x: Tensor) -> Tensor:
    z = 40 * x - 15
    far, wave = z.square().mean(dim=-1).sqrt(), torch.cos(2 * math.pi * z).mean(dim=-1)
    return 20 * torch.exp(-0.2 * far) + torch.exp(wave) - 20 - math.e


def branin(x: Tensor) -> Tensor:
    a, b = 15 * x[:, 0] - 5, 15 * x[:, 1]
    valley = (b - 5.1 / (4 * math.pi**2) * a.square() + 5 / math.pi * a - 6).square()
    return -(valley + 10 * (1 - 1 / (8 * math.pi)) * torch.cos(a) + 10)


@cache
def settings_table() -> tuple[Tensor, Tensor]:
    """Settings of random-feature ridge classifiers of digits, and their accuracies on held-out digits."""
    data = load_digits()
    x, y = torch.tensor(data.data / 16), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    grid = itertools.product(range(3), (0.5, 1.0, 2.0), range(6), (25, 50, 100, 200), range(12))
    rows, values = [], []
    kinds = (torch.relu, torch.tanh, torch.cos)
    source = torch.randn(64, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shifts = 6 * torch.rand(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(y[:400]).double()
    for (kind, power, width, units), same in itertools.groupby(grid, key=lambda each: each[:4]):
        h = kinds[kind]((x**power - 0.3) @ source[:, :units] * 0.02 * 2.5**width + shifts[:units])
        values_, vectors = torch.linalg.eigh(h[:400].T @ h[:400])
        right = vectors.T @ (h[:400].T @ one_hot)
        for *_, ridge in same:
            weights = vectors @ (right / (values_.clamp(min=0) + 10.0 ** (ridge / 1.5 - 5))[:, None])
            accuracy = ((h[400:1400] @ weights).argmax(dim=1) == y[400:1400]).double().mean()
            rows.append(
                [
                    *(float(kind == k) for k in range(3)),
                    math.log2(power),
                    width / 5,
                    math.log2(units / 25) / 3,
                    ridge / 11,
                ]
            )
            values.append(float(accuracy))
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(values, dtype=torch.float64)


@cache
def images_table() -> tuple[Tensor, Tensor]:
    """Images of digits, and the ink of those that are a 3."""
    data = load_digits()
    x = torch.tensor(data.data / 16)
    return x, x.sum(dim=1) * torch.tensor(data.target == 3)


def tabular(make: Callable[[], tuple[Tensor, Tensor]]) -> Problem:
    rows, values = make()
    return Problem(lambda index: values[index.long().flatten()], rows.shape[1], table=rows)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "hartmann-6": lambda: Problem(hartmann6, 6),
    "ackley-10": lambda: Problem(ackley, 10),
    "noisy branin": lambda: Problem(branin, 2, noise=2.0),
    "settings": lambda: tabular(settings_table),
    "images": lambda: tabular(images_table),
}


# --- surrogates -------------------------------------------------------------------------------------------------------


def neural(x: Tensor, y: Tensor, before: Any, seed: int) -> tuple[Moments, Any]:
    process = Process.fit(x, y[:, None], seed=seed, start=None if len(x) % 10 == 0 else before)

    def moments(at: Tensor) -> tuple[Tensor, Tensor]:
        mean, covariance = process.moments(at[:, None])
        return mean.flatten(), covariance.flatten()

    return moments, process


def gaussian_process(x: Tensor, y: Tensor, *_: Any) -> tuple[Moments, Any]:
    """SingleTaskGP's model by gpytorch."""
    import gpytorch
    from gpytorch.constraints import GreaterThan
    from gpytorch.priors import LogNormalPrior

    centre, scale = y.mean(), y.std() if bool(y.std() > 0) else torch.ones((), dtype=y.dtype)
    target, d = (y - centre) / scale, x.shape[1]
    likelihood = gpytorch.likelihoods.GaussianLikelihood(
        noise_prior=LogNormalPrior(-4.0, 1.0), noise_constraint=GreaterThan(1e-4, initial_value=math.exp(-5))
    )
    length = LogNormalPrior(math.sqrt(2) + math.log(d) / 2, math.sqrt(3))

    class Model(gpytorch.models.ExactGP):
        """A constant and an RBF kernel."""

        def __init__(self) -> None:
            super().__init__(x, target, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            constraint = GreaterThan(2.5e-2, initial_value=length.mode)
            self.covar_module = gpytorch.kernels.RBFKernel(
                ard_num_dims=d, lengthscale_prior=length, lengthscale_constraint=constraint
            )

        def forward(self, at: Tensor) -> Any:
            """The prior."""
            return gpytorch.distributions.MultivariateNormal(self.mean_module(at), self.covar_module(at))

    model = Model().double()
    likelihood.double()
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -evidence(model(x), target)
        loss.backward()
        return loss

    model.train()
    optimizer.step(closure)
    model.eval()

    def moments(at: Tensor) -> tuple[Tensor, Tensor]:
        with gpytorch.settings.fast_pred_var(False):
            found = model(at[:, None])
            return centre + scale * found.mean.flatten(), scale.square() * found.variance.flatten()

    return moments, None


def single_task(x: Tensor, y: Tensor, *_: Any) -> tuple[Moments, Any]:
    """BoTorch's own."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    model = SingleTaskGP(x, y[:, None])
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))

    def moments(at: Tensor) -> tuple[Tensor, Tensor]:
        found = model.posterior(at[:, None])
        return found.mean.flatten(), found.variance.flatten()

    return moments, None


def laplace(x: Tensor, y: Tensor, _: Any, seed: int) -> tuple[Moments, Any]:
    """laplace-bayesopt's, in float32, which its marginal likelihood wants."""
    from botorch.models.transforms import Standardize
    from laplace_bayesopt.botorch import LaplaceBoTorch

    torch.manual_seed(seed)

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(x.shape[1], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    model = LaplaceBoTorch(network, x.float(), y[:, None].float(), outcome_transform=Standardize(1))
    # They keep the graph of their own optimisation, which a second gradient with respect to inputs would go through.
    model.bnn.prior_precision, model.bnn.sigma_noise = (
        t.detach() for t in (model.bnn.prior_precision, model.bnn.sigma_noise)
    )

    def moments(at: Tensor) -> tuple[Tensor, Tensor]:
        found = model.posterior(at[:, None].float())
        return found.mean.flatten().double(), found.variance.flatten().double()

    return moments, None


# --- optimisation -----------------------------------------------------------------------------------------------------


def log_improvement(mean: Tensor, variance: Tensor, best: Tensor) -> Tensor:
    """log E[(f − best)₊], also where that is nothing in floating point."""
    stddev = variance.clamp(min=1e-12).sqrt()
    z = (mean - best) / stddev
    density, below = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi), torch.special.ndtr(z)
    plain = (density + z * below).clamp(min=1e-300).log()
    # φ(z) + z Φ(z) → φ(z)/z² far below.
    far = -0.5 * z.square() - 0.5 * math.log(2 * math.pi) - 2 * z.abs().clamp(min=1.0).log()
    return torch.where(z > -6, plain, far) + stddev.log()


def propose(
    moments: Moments, problem: Problem, x: Tensor, y: Tensor, seen: set[int], source: torch.Generator
) -> Tensor:
    """The next point, (1, d), or row number, (1,)."""
    with torch.no_grad():
        best = moments(x)[0].max() if problem.noise else y.max()
    if problem.table is not None:
        with torch.no_grad():
            scores = torch.cat([log_improvement(*moments(part), best) for part in problem.table.split(500)])
        scores[list(seen)] = -math.inf
        return scores.argmax()[None]
    d = problem.width
    wide = torch.rand(1000, d, generator=source, dtype=torch.float64)
    tops = x[y.topk(min(5, len(y))).indices]
    near = tops[torch.randint(len(tops), (1000,), generator=source)]
    steps = (
        torch.randn(1000, d, generator=source, dtype=torch.float64) * 0.3 * 0.1 ** torch.rand(1000, 1, generator=source)
    )
    moved = torch.rand(1000, d, generator=source) < max(0.3, 2 / d)
    points = torch.cat([wide, (near + steps * moved).clamp(0, 1)])
    with torch.no_grad():
        scores = torch.cat([log_improvement(*moments(part), best) for part in points.split(500)])
    at = points[scores.topk(5).indices].clamp(1e-6, 1 - 1e-6).logit().requires_grad_()
    optimizer = torch.optim.Adam([at], lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        (-log_improvement(*moments(at.sigmoid()), best).sum()).backward()
        optimizer.step()
    with torch.no_grad():
        both = torch.cat([points[scores.argmax()][None], at.sigmoid()])
        return both[log_improvement(*moments(both), best).argmax()][None]


def optimise(name: str, method: str, seed: int, evaluations: int, *, botorch: bool) -> Cell:
    """The best value after every evaluation, and the seconds of a step."""
    problem, source = PROBLEMS[name](), torch.Generator().manual_seed(seed)
    rows = None if problem.table is None else torch.randperm(len(problem.table), generator=source)
    at = torch.rand(FIRST, problem.width, generator=source, dtype=torch.float64) if rows is None else rows[:FIRST]
    chance = torch.Generator().manual_seed(1000 + seed)
    fit = {"badam": neural, "gp": single_task if botorch else gaussian_process, "laplace": laplace}.get(method)
    noise = problem.noise * torch.randn(evaluations, generator=chance, dtype=torch.float64)
    before, seconds = None, []
    while len(at) < evaluations:
        began = time.perf_counter()
        if fit is None:
            new = (
                torch.rand(1, problem.width, generator=source, dtype=torch.float64)
                if rows is None
                else rows[len(at)][None]
            )
        else:
            x = at if problem.table is None else problem.table[at]
            y = problem.value(at) + noise[: len(at)]
            seen = set() if rows is None else set(at.tolist())
            moments, before = fit(x, y, before, seed)
            new = propose(moments, problem, x, y, seen, source)
        seconds.append(time.perf_counter() - began)
        at = torch.cat([at, new])
    best = problem.value(at).cummax(dim=0).values
    return {"best": best.tolist(), "seconds": statistics.median(seconds)}


# --- results ----------------------------------------------------------------------------------------------------------


def report(cells: dict[tuple[str, str], list[Cell]], problems: list[str], methods: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for problem in problems:
        print(f"\n{problem}: best value after {', '.join(map(str, REPORTED))} evaluations; seconds a step")
        for method in methods:
            own = cells.get((problem, method), [])
            if not own:
                continue
            at = {n: [c["best"][n - 1] for c in own] for n in REPORTED if n <= len(own[0]["best"])}
            pace = statistics.median(c["seconds"] for c in own)
            print(f"  {method:8s} {'  '.join(number(values) for values in at.values())}  {pace:.2f} s")
            results.setdefault(problem, {})[method] = {"best": at, "seconds": pace}
        ours, theirs = (cells.get((problem, method), []) for method in ("badam", "gp"))
        if ours and len(ours) == len(theirs):
            for n in (n for n in REPORTED if n <= len(ours[0]["best"])):
                pairs = ([c["best"][n - 1] for c in own] for own in (ours, theirs))
                word, gap, error = against(*pairs, larger_is_better=True)
                print(f"  after {n}: badam {word} the gp, {gap:+.4f} ± {error:.4f}")
    return results


def main() -> None:
    parser = arguments(__doc__, quick="14 evaluations of Branin and the images, one seed")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--evaluations", type=int, default=EVALUATIONS)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=(*METHODS, *RIVALS))
    parser.add_argument("--part", default="0/1", help="i/n: every n-th cell, from the i-th on")
    parser.add_argument("--botorch", action="store_true", help="the Gaussian process is BoTorch's SingleTaskGP itself")
    options: argparse.Namespace = parser.parse_args()
    one_core()
    warnings.filterwarnings("ignore")
    evaluations = options.evaluations
    if options.quick:
        options.seeds, options.problems, evaluations = 1, ["noisy branin", "images"], 14
    cells = shared_cells(
        options,
        "optimise",
        {"evaluations": evaluations},
        lambda problem, method, seed: optimise(problem, method, seed, evaluations, botorch=options.botorch),
        lambda cell: f"{cell['best'][-1]:.4f}, {cell['seconds']:.2f} s a step",
    )
    write_results(options.out, "optimise", {**setting(), "problems": report(cells, options.problems, options.methods)})


if __name__ == "__main__":
    main()
