"""`bayesadam demo`: a small network trained by AdamW on the toy regression, and what its optimiser's state tells."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from bayesadam import Posterior, calibrate, doctor, pruning_masks, readers, scores
from bayesadam.commands import plots
from bayesadam.commands.running import Run, Table, Track, generator
from bayesadam.data.toy import N_TRAIN, TEST_INTERVAL, TRAIN_INTERVAL, ToyData, toy_grid, toy_points
from bayesadam.diagnosis import Diagnosis
from bayesadam.inspecting import quantiles
from bayesadam.pruning import Ranking

_FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
# A point with this p-value or less counts as novel.
_FLAGGED = 0.05


@dataclass(frozen=True)
class DemoSettings:
    """What the results depend on besides the seed; `n_held_out` of `n_points` calibrate and are not trained on."""

    n_points: int = N_TRAIN
    n_held_out: int = 50
    n_test: int = 1000
    width: int = 50
    steps: int = 2000
    batch_size: int = 32
    lr: float = 1e-2
    weight_decay: float = 1e-2
    draws: int = 30


@dataclass(frozen=True, eq=False)
class Demo:
    """What the demo found; `predictive` is on the grid, `draws` are functions drawn there."""

    train: ToyData
    grid: ToyData
    predictive: Any
    draws: Tensor
    posterior: Posterior
    diagnosis: Diagnosis
    results: dict[str, Any]


def train_network(data: ToyData, settings: DemoSettings, seed: int, track: Track) -> tuple[nn.Module, Any]:
    """1-width-width-1 with ReLU, trained as anyone would; returns it with the optimiser, whose state is the point."""
    # torch's global random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "network").initial_seed())
        first, second = nn.Linear(1, settings.width), nn.Linear(settings.width, settings.width)
        layers = {"hidden1": first, "relu1": nn.ReLU(), "hidden2": second, "relu2": nn.ReLU()}
        model = nn.Sequential(OrderedDict(layers, output=nn.Linear(settings.width, 1)))
    batches = generator(seed, "batches")
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    for _ in track(range(settings.steps), "training with AdamW"):
        batch = torch.randint(len(data), (settings.batch_size,), generator=batches)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data.x[batch]), data.y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return model, optimizer


@torch.no_grad()
def pruned_rmse(posterior: Posterior, data: ToyData, ranking: Ranking, fractions: Sequence[float]) -> tuple[float, ...]:
    """RMSE of the mean network after the given fractions of its weights, lowest score first, are set to 0."""
    errors = []
    for fraction in fractions:
        masks = pruning_masks(posterior, fraction, ranking=ranking)
        weights = {name: mean * masks[name] for name, mean in posterior.mean.items()}
        prediction = torch.func.functional_call(posterior.model, weights, (data.x,))
        errors.append(float((prediction - data.y).square().mean().sqrt()))
    return tuple(errors)


def compute(settings: DemoSettings, seed: int, track: Track = lambda items, description: items) -> Demo:
    """The whole demo but for its output; the same settings and seed give the same numbers."""
    points = generator(seed, "data")
    held_out, train = toy_points(settings.n_points, generator=points).split(settings.n_held_out)
    test, grid = toy_points(settings.n_test, generator=points), toy_grid()

    model, optimizer = train_network(train, settings, seed, track)
    posterior = Posterior.from_optimizer(model, optimizer, n_data=len(train))
    posterior = calibrate(posterior, (held_out.x, held_out.y), likelihood="regression")
    asked: Any = {"likelihood": "regression", "predictive": "linearised-sampled", "n_samples": settings.draws}
    drawn: Any = posterior.predict(grid.x, generator=generator(seed, "draws"), **asked)
    on_grid: Any = posterior.predict(grid.x, likelihood="regression")
    tested: Any = posterior.predict(test.x, likelihood="regression")

    second_moment, parameters = readers.read_optimizer(model, optimizer).second_moment, []
    for name, snr in posterior.snr().items():
        shape = {"name": name, "shape": tuple(snr.shape), "weights": snr.numel(), "snr": quantiles(snr.flatten())}
        parameters.append({**shape, "share_v_zero": float((second_moment[name] == 0).float().mean())})
    outside = ((grid.x < TRAIN_INTERVAL[0]) | (grid.x > TRAIN_INTERVAL[1])).squeeze(1)
    diagnosis = doctor(model, optimizer, n_data=len(train))
    rmse = {ranking: pruned_rmse(posterior, test, ranking, _FRACTIONS) for ranking in ("snr", "magnitude")}
    results = {
        "in_range": {
            "rmse": scores.rmse(tested.mean, test.y),
            "nll": scores.nll(tested, test.y),
            "coverage95": scores.coverage(tested, test.y),
            "function_std": float(tested.variance.sqrt().mean()),
            "flagged_in_range": float((tested.novelty_pvalue <= _FLAGGED).double().mean()),
            "flagged_outside": float((on_grid.novelty_pvalue[outside] <= _FLAGGED).double().mean()),
        },
        "noise_std": math.sqrt(float(on_grid.noise_variance)),
        "n_data": posterior.n_data,
        "scale": posterior.settings.scale,
        "prior_precision": posterior.prior_precision,
        "parameters": parameters,
        "pruning": {"fractions": _FRACTIONS, "rmse": rmse},
        "doctor": diagnosis.codes(),
    }
    return Demo(train, grid, on_grid, drawn.draws.squeeze(-1), posterior, diagnosis, results)


def table(demo: Demo) -> Table:
    """One row per parameter."""
    rows = []
    for found in demo.results["parameters"]:
        cells = found["name"], " × ".join(map(str, found["shape"])), f"{found['weights']:,}"
        rows.append((*cells, *(f"{value:.3g}" for value in found["snr"]), f"{found['share_v_zero']:.0%}"))
    columns = ("parameter", "shape", "weights", "5 %", "median", "95 %", "v = 0")
    return Table("Signal-to-noise ratio |μ|/σ of the weights", columns, rows)


def score_line(demo: Demo) -> str:
    """The scores in words."""
    found, delta = demo.results["in_range"], float(next(iter(demo.posterior.prior_precision.values())))
    return (
        f"On fresh points in the range of the data: RMSE {found['rmse']:.3f}, NLL {found['nll']:.2f} nats, "
        f"{found['coverage95']:.1%} in the 95 % interval. Flagged as novel (p ≤ {_FLAGGED:g}): "
        f"{found['flagged_in_range']:.0%} of these, {found['flagged_outside']:.0%} of points outside. Calibrated: "
        f"noise {demo.results['noise_std']:.3f}, scale {demo.results['scale']:.3g}, prior precision {delta:.3g}"
    )


def picture(demo: Demo) -> Figure:
    """Predictions, novelty, signal-to-noise ratios and pruning, in four panels."""
    title = f"A posterior over {demo.posterior.n_weights:,} weights, read off the state of AdamW"
    with plots.house_style():
        figure = plots.new_figure(12, 7.2, title, 13)
        rows: Any = [["functions", "snr"], ["functions", "snr"], ["functions", "pruning"], ["novelty", "pruning"]]
        panels = figure.subplot_mosaic(rows, width_ratios=[1.4, 1])
        _draw_functions(panels["functions"], panels["novelty"], demo)
        plots.spread_rows(panels["snr"], {found["name"]: found["snr"] for found in demo.results["parameters"]})
        panels["snr"].set(title="(c) Signal-to-noise ratio of the weights", xlabel="|μ| / σ: median, 5 to 95 %")
        axes = panels["pruning"]
        for ranking, label in (("snr", "signal-to-noise ratio"), ("magnitude", "magnitude")):
            style: Any = {"color": plots.colour(ranking), "markersize": 3, "linewidth": 1.5, "label": label}
            rmse = demo.results["pruning"]["rmse"][ranking]
            axes.plot([100 * fraction for fraction in _FRACTIONS], rmse, "o-", **style)
        axes.set(title="(d) Removing weights", xlabel="weights set to 0 (%)", ylabel="test RMSE", ylim=(0, None))
        axes.legend(loc="upper left", title="lowest first by", alignment="left")
    return figure


def _draw_functions(axes: Axes, below: Axes, demo: Demo) -> None:
    """The predictions, and their novelty below."""
    for one in (axes, below):
        one.axvspan(*TRAIN_INTERVAL, color=plots.FAINT, alpha=0.35, linewidth=0)
    curves = (part.squeeze(1) for part in (demo.grid.x, demo.predictive.mean, demo.predictive.stddev))
    points = (demo.train.x.squeeze(1), demo.train.y.squeeze(1))
    plots.predictive_panel(axes, *curves, draws=list(demo.draws), truth=demo.grid.y.squeeze(1), points=points)
    axes.set(title="(a) Functions drawn from the posterior", xlabel="x", ylabel="y", xlim=TEST_INTERVAL)
    axes.legend(loc="upper left")
    note = "Grey: the range of the data. Beyond it the band\ngrows with leverage, and need not hold the truth."
    where: Any = {"transform": axes.transAxes, "ha": "right", "va": "bottom"}
    axes.text(0.985, 0.02, note, color=plots.MUTED, fontsize=8, **where)
    below.plot(demo.grid.x.squeeze(1), demo.predictive.novelty, color=plots.colour("badam"), linewidth=1.5)
    usual = float(demo.predictive.guarantee["novelty"].double().quantile(1 - _FLAGGED))
    below.axhline(usual, color=plots.MUTED, linewidth=1, linestyle="--", label="exceeded by 5 % of held-out points")
    below.set(title="(b) Novelty", xlabel="x", yscale="log", xlim=TEST_INTERVAL)
    below.legend(loc="upper center")


def run_demo(*, seed: int, out: Path, quiet: bool, settings: DemoSettings | None = None) -> tuple[Path, ...]:
    """The `demo` command."""
    settings = settings or DemoSettings()
    run = Run("demo", seed, out, asdict(settings), quiet=quiet)
    with run.prepared():
        demo = compute(settings, seed, run.track)
        run.show(str(demo.diagnosis), table(demo), score_line(demo))
        return run.finish({"demo.png": plots.png(picture(demo))}, demo.results)
