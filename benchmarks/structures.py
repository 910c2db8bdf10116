"""What a richer posterior is worth, beside laplace-torch and ensembles: the paper's toy problem, and four small tables.

    python benchmarks/structures.py [--quick] [--alone] [--only toy tables] [--seeds 10] [--first-seed 0]
        [--out out/bench]

All rows of a seed share one network, trained by Adam at a rate of 0.01
that a cosine takes to 0, with a `Recorder` beside the last 50 steps; SOAP's row has a network of its own, and the last
two rows four more by Adam, of other starts. Every posterior predicts linearised.

- toy: 200 points of the paper's regression in (0, 0.5), 50 more to calibrate; 500 score in range and 500 outside, in
  (−0.5, 0) and (0.5, 1.2). 1-50-50-1, batches of 20. "std in" is the mean standard deviation of f in range, "ratio"
  that at x = −0.4, 0.7 and 1.1 over it, γ the effective dimension Σ h/(h + δ).
- tables: scikit-learn's diabetes and its three made-up ones of Friedman, a fifth to test, a fifth of the rest to
  calibrate, anew for each split; 50-50 ReLU units, batches of 32. Each network was trained for 10, 30 and 100 epochs,
  and the one of least held-out error is kept.

Where nothing else is said a row has p = 1 and `ba.calibrate(..., method="evidence")`. The peer and the full
Gauss-Newton matrix, computed here, get the same held-out points: one prior precision, by the peer's own marginal
likelihood or MacKay's fixed point, and σ² from the held-out residuals as `ba.calibrate` has it, the two in turn until
σ² stands still. The ensemble's σ² is the mean residual less the mean variance. Settings were chosen with seeds from
1000 on.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, TensorDataset

import bayesadam as ba
from bayesadam import scores
from bayesadam.engine.network import Network, initial, member
from bayesadam.engine.stack import Stack
from bayesadam.likelihoods import Component, Predictive, likelihood
from bayesadam.likelihoods.predictive import CalibrationMethod
from experiments.baselines import Data, Problem, Training
from experiments.data import ToyData
from experiments.figure1 import RegressionSettings, drawn
from harness import arguments, import_peer, mean_and_error, parallel, setting, write_results

MEMBERS, KEEP, NOISE_ROUNDS = 5, 50, 8
FAR = torch.tensor([[-0.4], [0.7], [1.1]])
RATE, TOY_EPOCHS, EPOCHS = 1e-2, 300, (10, 30, 100)
DATA_FIELDS = ("x", "y", "x_held_out", "y_held_out")
ACTIVATIONS = ("tanh", "relu")
TABLES = ("diabetes", "friedman1", "friedman2", "friedman3")


# --- data and training ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trained:
    """A network, and what stood beside it while it was trained."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    recorder: ba.Recorder | None = None


@dataclass(frozen=True, eq=False)
class Task:
    """One seed's data, inputs (n, features) and targets (n, 1), and the networks trained on it, the shared one
    first.
    """

    x: Tensor
    y: Tensor
    x_held_out: Tensor
    y_held_out: Tensor
    batch_size: int
    members: Sequence[Trained]
    soap: Trained


def tasks(data: Data, activation: str, batch_size: int, epochs: Sequence[int], seeds: Sequence[int]) -> list[Task]:
    """Everything that is trained, for data of all seeds at once; of several lengths the one of least held-out error."""
    network = Network(data.x.shape[2], (50, 50), 1, activation)
    wide = replace(data, **{key: getattr(data, key).repeat_interleave(MEMBERS, 0) for key in DATA_FIELDS})
    starts = [MEMBERS * seed + member for seed in seeds for member in range(MEMBERS)]
    lengths = [Training(length, batch_size, RATE, 0.0, schedule="cosine") for length in epochs]
    stacks = [Problem(wide, network, training, tuple(starts)).optimum for training in lengths]
    found = []
    for i, _ in enumerate(seeds):
        x, y, x_held_out, y_held_out = (getattr(data, key)[i] for key in DATA_FIELDS)

        def best(of: Iterable[Trained], x: Tensor = x_held_out, y: Tensor = y_held_out) -> Trained:
            return min(of, key=lambda one: held_out_error(one.model, x, y))

        places = range(MEMBERS * i, MEMBERS * (i + 1))
        members = [best(recorded(stack, place, x, y, batch_size) for stack in stacks) for place in places]
        start = network.build(member(initial(network, [starts[places[0]]]), 0))
        soap = best(train_soap(copy.deepcopy(start), x, y, training) for training in lengths)
        found.append(Task(x, y, x_held_out, y_held_out, batch_size, members, soap))
    return found


def held_out_error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - y).square().mean())


def recorded(stack: Stack, place: int, x: Tensor, y: Tensor, batch_size: int) -> Trained:
    """One network of a stack with its own Adam, which goes on at the rate 0 of the cosine's end and is recorded
    there.
    """
    model = stack.network.build(member(stack.params, place))
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(stack.state_dict(place))
    optimizer.param_groups[0]["lr"] = 0.0
    recorder = ba.Recorder(optimizer, keep=KEEP, every=1)
    generator = torch.Generator().manual_seed(place)
    for _ in range(KEEP):
        step(model, optimizer, x, y, batch_size, generator)
    recorder.remove()
    return Trained(model, optimizer, recorder)


def train_soap(model: nn.Module, x: Tensor, y: Tensor, training: Training) -> Trained:
    # With its own averages of 20 steps: with 1,000, as Adam has, "ratio" was less than half of this on two other seeds.
    from pytorch_optimizer import SOAP

    optimizer = SOAP(model.parameters(), lr=training.lr, weight_decay=0.0)
    steps = training.steps(len(x))
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        step(model, optimizer, x, y, training.batch_size, generator)
        rate.step()
    return Trained(model, optimizer)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, size: int, generator: torch.Generator
) -> None:
    """One step on a random batch."""
    rows = torch.randint(len(x), (size,), generator=generator)
    optimizer.zero_grad()
    (model(x[rows]) - y[rows]).square().mean().backward()
    optimizer.step()


# --- the rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fitted:
    """A row's predictive distribution, and its γ, δ and σ² where they are known."""

    predict: Callable[[Tensor], Any]
    gamma: float | None = None
    delta: float = math.nan
    noise: float = math.nan


def read(
    trained: Trained, task: Task, structure: str = "diagonal", *, power: float = 1, recorder: ba.Recorder | None = None
) -> ba.Posterior:
    return ba.Posterior.from_optimizer(
        trained.model,
        trained.optimizer,
        len(task.x),
        structure=structure,
        recorder=recorder,
        power=power,
        batch_size=task.batch_size,
        prior_precision=1.0,
    )


def calibrated(posterior: Any, task: Task, method: CalibrationMethod = "evidence") -> Fitted:
    held_out = (task.x_held_out, task.y_held_out)
    tuned = ba.calibrate(posterior, held_out, likelihood="regression", method=method)
    return Fitted(partial(tuned.predict, likelihood="regression"), getattr(tuned, "effective_dimension", None))


def badam(task: Task) -> Fitted:
    return calibrated(read(task.members[0], task, power=0.5), task, "validation")


def diagonal(task: Task) -> Fitted:
    return calibrated(read(task.members[0], task), task)


def soaps_own(task: Task) -> Fitted:
    return calibrated(read(task.soap, task, "kronecker"), task)


def recorders(structure: str) -> Callable[[Task], Fitted]:
    return lambda task: calibrated(read(task.members[0], task, structure, recorder=task.members[0].recorder), task)


def mixture(task: Task) -> Fitted:
    parts = [read(member, task, "kronecker", recorder=member.recorder) for member in task.members]
    return calibrated(ba.Mixture(parts), task)


def ensemble(task: Task) -> Fitted:
    """The members' mean and variance, with noise for what they leave of the held-out residuals."""

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            outputs = torch.stack([member.model(x) for member in task.members])
        return outputs.mean(dim=0), outputs.var(dim=0)

    mean, variance = moments(task.x_held_out)
    square = (task.y_held_out - mean).square().mean()
    noise = (square - variance.mean()).clamp(min=0.05 * square)
    record = likelihood("regression")
    return Fitted(lambda x: record.predictive([Component(*moments(x), noise_variance=noise)]))


# --- the peers: a variance of f for every noise, and the noise from held-out residuals --------------------------------


class Fit(NamedTuple):
    """The variance of f, γ, and the δ they belong to."""

    variance: Callable[[Tensor], Tensor]
    gamma: float
    delta: float


def with_noise(model: nn.Module, task: Task, fit: Callable[[float], Fit]) -> Fitted:
    """σ² of greatest likelihood on the held-out points, r² ~ σ² (1 + Var[f]/σ²)."""
    with torch.no_grad():
        square = (model(task.x_held_out) - task.y_held_out).square()
    noise = float(square.mean())
    for _ in range(NOISE_ROUNDS):
        found, used = fit(noise), noise
        noise = float((square / (1 + found.variance(task.x_held_out) / used)).mean())
        if abs(noise - used) <= 0.01 * used:
            break
    return fitted(model, found, used)


def fitted(model: nn.Module, found: Fit, noise: float) -> Fitted:
    def predict(x: Tensor) -> Predictive:
        with torch.no_grad():
            mean = model(x)
        component = Component(mean, found.variance(x).to(mean), noise_variance=torch.tensor(noise))
        return likelihood("regression").predictive([component])

    return Fitted(predict, found.gamma, found.delta, noise)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """J, (n, weights), in float64."""
    params = {name: p.detach().double() for name, p in model.named_parameters()}
    parts: dict[str, Tensor] = jacrev(lambda p: functional_call(model, p, (x.double(),)).squeeze(1))(params)
    return torch.cat([part.flatten(1) for part in parts.values()], dim=1)


def full_ggn(task: Task) -> Fitted:
    """Σ = (JᵀJ/σ² + δ)⁻¹, δ = γ/|θ|², by way of the data's kernel J Jᵀ."""
    model = task.members[0].model
    rows = jacobian(model, task.x)
    kernel = rows @ rows.T
    values = torch.linalg.eigvalsh(kernel).clamp(min=0)
    square = sum(float(p.detach().double().square().sum()) for p in model.parameters())

    def fit(noise: float) -> Fit:
        delta, before = 1.0, 0.0
        while abs(delta - before) > 1e-8 * delta:
            gamma = float((values / (values + noise * delta)).sum())
            delta, before = gamma / square, delta
        factor = torch.linalg.cholesky(kernel + noise * delta * torch.eye(len(kernel), dtype=kernel.dtype))

        def variance(x: Tensor) -> Tensor:
            here = jacobian(model, x)
            cross = torch.linalg.solve_triangular(factor, rows @ here.T, upper=False)
            return ((here.square().sum(dim=1) - cross.square().sum(dim=0)) / delta).clamp(min=0).unsqueeze(1)

        return Fit(variance, gamma, delta)

    return with_noise(model, task, fit)


def laplace_of(task: Task, structure: str) -> Any:
    """The peer's curvature of the shared network, in float64."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    model = copy.deepcopy(task.members[0].model).double()
    # For the full matrix its default goes through all columns one by one.
    peer = Laplace(model, "regression", "all", structure, backend=BackPackGGN if structure == "full" else None)
    peer.fit(DataLoader(TensorDataset(task.x.double(), task.y.double()), batch_size=len(task.x)))
    return peer


def read_laplace(peer: Any, trace: float) -> Fit:
    """γ = tr(H Σ) = P − δ tr Σ."""
    delta = float(peer.prior_precision)
    return Fit(lambda x: peer(x.double())[1].squeeze(2).detach(), peer.n_params - delta * trace, delta)


def laplace_torch(structure: str) -> Callable[[Task], Fitted]:
    """The prior by the peer's own marginal likelihood."""

    def row(task: Task) -> Fitted:
        peer = laplace_of(task, structure)

        def fit(noise: float) -> Fit:
            peer.sigma_noise = math.sqrt(noise)
            peer.optimize_prior_precision(method="marglik", init_prior_prec=float(peer.prior_precision))
            if structure == "diag":
                return read_laplace(peer, float(peer.posterior_variance.sum()))
            blocks = zip(peer.posterior_precision.eigenvalues, peer.posterior_precision.deltas, strict=True)
            return read_laplace(peer, sum(float((1 / (_outer(values) + delta)).sum()) for values, delta in blocks))

        return with_noise(task.members[0].model, task, fit)

    return row


def laplace_full(task: Task) -> Fitted:
    """With δ and σ² of the first row: its marginal likelihood has the same optimum, and takes minutes to find it."""
    known, peer = full_ggn(task), laplace_of(task, "full")
    peer.sigma_noise, peer.prior_precision = math.sqrt(known.noise), known.delta
    return fitted(task.members[0].model, read_laplace(peer, float(peer.posterior_covariance.diag().sum())), known.noise)


def _outer(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.outer(*values)


ROWS: Mapping[str, Callable[[Task], Fitted]] = {
    "full GGN, float64": full_ggn,
    "laplace-torch full": laplace_full,
    "laplace-torch kron": laplace_torch("kron"),
    "laplace-torch diag": laplace_torch("diag"),
    "Badam, p = ½, validation": badam,
    "diagonal": diagonal,
    "Kronecker, SOAP's state": soaps_own,
    "Kronecker, recorder": recorders("kronecker"),
    f"low-rank, last {KEEP}": recorders("low-rank"),
    f"low-rank, last {KEEP}, + diagonal": recorders("low-rank+diagonal"),
    "mixture of 5 Kronecker": mixture,
    "ensemble of 5": ensemble,
}
# A matrix of (weights, weights) takes too long for the tables, and says what the first row says.
TABLE_ROWS = [name for name in ROWS if name not in ("laplace-torch full", "laplace-torch diag")]
Scores = dict[str, float]
Results = dict[str, dict[str, list[float]]]


# --- the toy problem ------------------------------------------------------------------------------------------------


def rows_of(names: Iterable[str], alone: bool) -> dict[str, Callable[[Task], Fitted]]:
    """The rows by name, without the peer's where it is left out."""
    return {name: ROWS[name] for name in names if not (alone and name.startswith("laplace-torch"))}


def toy(activation: str, seeds: Sequence[int], quick: bool, alone: bool) -> Results:
    """Every row's scores, one per seed."""
    sets = [drawn(seed, RegressionSettings()) for seed in seeds]
    parts = (torch.stack([getattr(one[i], key) for one in sets]) for i in (0, 1) for key in ("x", "y"))
    epochs = TOY_EPOCHS // 20 if quick else TOY_EPOCHS
    rows = rows_of(ROWS, alone)
    found = []
    for task, (_, _, inside, outside) in zip(
        tasks(
            Data(**dict(zip(DATA_FIELDS, parts, strict=True)), likelihood="regression"),
            activation,
            20,
            (epochs,),
            seeds,
        ),
        sets,
        strict=True,
    ):
        found.append({name: toy_scores(row(task), inside, outside) for name, row in rows.items()})
    return gathered(found)


def toy_scores(row: Fitted, inside: ToyData, outside: ToyData) -> Scores:
    near, far = row.predict(inside.x), row.predict(outside.x)
    std = float(near.variance.sqrt().mean())
    return {
        "nll_in": scores.nll(near, inside.y),
        "nll_out": scores.nll(far, outside.y),
        "std_in": std,
        "ratio": float(row.predict(FAR).variance.sqrt().mean()) / std,
    } | ({} if row.gamma is None else {"gamma": row.gamma})


# --- the tables -----------------------------------------------------------------------------------------------------


def table_data(name: str) -> tuple[Any, Any]:
    """(inputs, targets) of one of scikit-learn's sets, all of which are made or stored on this machine."""
    from sklearn import datasets

    if name == "diabetes":
        return datasets.load_diabetes(return_X_y=True)
    # A fifth to a third of the function's own deviation.
    noise = {"friedman1": 1.0, "friedman2": 125.0, "friedman3": 0.1}[name]
    return getattr(datasets, f"make_{name}")(500, noise=noise, random_state=0)


def tabular(name: str, splits: Sequence[int], quick: bool, alone: bool) -> Results:
    """Every row's scores, one per split, in the units of the targets."""
    from sklearn.model_selection import train_test_split

    X, y = (torch.as_tensor(part, dtype=torch.float32) for part in table_data(name))
    parts, tests, units = [], [], []
    for split in splits:
        rest, test = train_test_split(range(len(y)), test_size=0.2, random_state=split)
        rows, held_out = train_test_split(rest, test_size=0.2, random_state=split)
        x = (X - X[rows].mean(dim=0)) / X[rows].std(dim=0)
        z = ((y - y[rows].mean()) / y[rows].std()).unsqueeze(1)
        parts.append((x[rows], z[rows], x[held_out], z[held_out]))
        tests.append((x[test], z[test]))
        units.append(float(y[rows].std()))
    stacked = (torch.stack(part) for part in zip(*parts, strict=True))
    data = Data(**dict(zip(DATA_FIELDS, stacked, strict=True)), likelihood="regression")
    found = []
    for task, test, unit in zip(
        tasks(data, "relu", 32, EPOCHS[: 1 if quick else None], splits), tests, units, strict=True
    ):
        rows = rows_of(TABLE_ROWS, alone)
        found.append({name: tabular_scores(row(task), *test, unit) for name, row in rows.items()})
    return gathered(found)


def tabular_scores(row: Fitted, x: Tensor, y: Tensor, unit: float) -> Scores:
    predicted = row.predict(x)
    return {
        "nll": scores.nll(predicted, y) + math.log(unit),
        "rmse": scores.rmse(predicted.mean, y) * unit,
    } | ({} if row.gamma is None else {"gamma": row.gamma})


# --- what is told of it ---------------------------------------------------------------------------------------------

TOY_COLUMNS = {"nll_in": "NLL in", "nll_out": "NLL out", "std_in": "std in", "ratio": "ratio", "gamma": "γ"}
TABLE_COLUMNS = {"nll": "NLL", "less": "less diagonal's", "rmse": "RMSE", "gamma": "γ"}
TARGETS = (
    ("Kronecker, SOAP's state", "laplace-torch kron"),
    ("Kronecker, recorder", "laplace-torch kron"),
    (f"low-rank, last {KEEP}", "full GGN, float64"),
)


def cell(values: Iterable[float] | None) -> str:
    if values is None:
        return f"{'–':>16s}"
    mean, error = mean_and_error(values)
    digits = max(0, 3 - len(f"{abs(mean):.0f}")) if abs(mean) >= 1 else 3
    return f"{mean:8.{digits}f} ± {error:<5.{digits}f}"


def told(title: str, results: Results, columns: Mapping[str, str]) -> str:
    lines = [f"{title:34s}" + "".join(f"{heading:>16s}" for heading in columns.values())]
    lines += [f"  {row:32s}" + "".join(cell(found.get(key)) for key in columns) for row, found in results.items()]
    return "\n".join(lines)


def gathered(found: list[dict[str, Scores]]) -> Results:
    """Lists over the seeds, by row and score."""
    return {row: {key: [one[row][key] for one in found] for key in found[0][row]} for row in found[0]}


def beside_the_diagonal(results: Results) -> Results:
    """The same, with each row's NLL less the diagonal's, split by split."""
    base = results["diagonal"]["nll"]
    return {
        row: {**found, "less": [a - b for a, b in zip(found["nll"], base, strict=True)]}
        for row, found in results.items()
    }


def verdicts(results: Mapping[str, Results]) -> list[str]:
    """The two targets on the toy problem, seed by seed: ours less the peer's NLL outside."""
    lines = []
    for name in (name for name in ACTIVATIONS if name in results):
        for ours, theirs in TARGETS:
            if theirs not in results[name]:
                continue
            a, b = (results[name][row]["nll_out"] for row in (ours, theirs))
            gap, error = mean_and_error(x - y for x, y in zip(a, b, strict=True))
            wins = sum(x <= y for x, y in zip(a, b, strict=True))
            lines.append(
                f"{name}: NLL outside, {ours} less {theirs}: {gap:+.2f} ± {error:.2f}, no worse on {wins} of "
                f"{len(a)} seeds"
            )
    return lines


def main() -> None:
    parser = arguments(
        __doc__, quick="one seed, few epochs, one network function and one table", peer="laplace-torch", jobs=2
    )
    parser.add_argument("--only", nargs="+", choices=("toy", "tables"), default=["toy", "tables"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0, help="1000 and up are for choosing settings")
    options = parser.parse_args()
    import_peer("laplace.curvature", "laplace-torch", alone=options.alone)
    began = time.perf_counter()
    seeds = range(options.first_seed, options.first_seed + (1 if options.quick else options.seeds))
    work: list[tuple[Callable[..., Results], str]] = []
    few = 1 if options.quick else None
    work += [(toy, name) for name in ACTIVATIONS[:few] if "toy" in options.only]
    work += [(tabular, name) for name in TABLES[:few] if "tables" in options.only]
    results: dict[str, Results] = {}
    calls = [partial(part, name, seeds, options.quick, options.alone) for part, name in work]
    for (part, name), found in zip(work, parallel(calls, jobs=options.jobs), strict=True):
        results[name] = found
        if part is toy:
            print(told(f"toy, {name}", found, TOY_COLUMNS), end="\n\n", flush=True)
        else:
            print(told(name, beside_the_diagonal(found), TABLE_COLUMNS), end="\n\n", flush=True)
    print(f"Mean ± standard error over {len(seeds)} seeds or splits, in {(time.perf_counter() - began) / 60:.0f} min.")
    about = {**setting(), "seeds": list(seeds), "quick": options.quick}
    write_results(options.out, "structures", {**about, "results": results})
    print("\n".join(verdicts(results)))


if __name__ == "__main__":
    main()
