"""What a published posterior loses in fewer bytes: pruning, novelty and merging with v̂ in float32, in 8 bits and
factored.

    BAYESADAM_DATA=... python benchmarks/publish.py [--only mlp lenet merge] [--seeds 1000 1001 …] [--quick] [--out
    out/bench]

Networks are trained on MNIST by Adam. Each posterior is saved without weights and loaded again: bytes, test accuracy
after pruning by signal-to-noise ratio, and AUROC of the novelty of Fashion-MNIST, of the diagonal posterior and of the
Kronecker-factored one of recorded gradients. For merging, experts on rotated digits are fine-tuned from one network and
merged from the files that would be published: weights, and posteriors beside them. Finished cells are kept in
`out/publish`.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import scores
from bayesadam.merging import merge
from experiments.data import load_images, load_split
from harness import Cell, Target, arguments, at_most, number, read_cell, setting, write_cell, write_results
from networks import lenet, mlp

FORMS: Mapping[str, str | None] = {"float32": None, "8bit": "8bit", "factored": "factored"}
FRACTIONS = (0.5, 0.75, 0.9, 0.95)
BATCH, RATE, KEEP = 100, 1e-3, 50
ANGLES = (-45.0, -15.0, 15.0, 45.0)
METHODS = ("fisher", "gradient-matching")


@dataclass(frozen=True, eq=False)
class Data:
    """MNIST for training and testing, and Fashion-MNIST's test images, (n, 1, 28, 28) on one device."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    other_x: Tensor

    @classmethod
    def load(cls, device: str, images: int, tests: int) -> Data:
        """So many images for training, and at most so many of each kind for testing."""
        digits, (clothes, _) = load_images("mnist"), load_split("fashion-mnist", "test")
        pictures = (digits.train_x[:images], digits.test_x[:tests], clothes[:tests])
        x, test_x, other_x = (part.reshape(-1, 1, 28, 28).to(device) for part in pictures)
        return cls(x, digits.train_y[:images].to(device), test_x, digits.test_y[:tests].to(device), other_x)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> tuple[torch.optim.Adam, ba.Recorder]:
    """Adam with a cosine, whole batches alone; the last gradients are recorded."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    steps = len(x) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    model.train()
    with ba.Recorder(optimizer, keep=KEEP) as recorder:
        for _ in range(epochs):
            for rows in torch.randperm(len(x), device=x.device)[: steps * BATCH].split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                schedule.step()
    optimizer.zero_grad()
    model.eval()
    return optimizer, recorder


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(dim=1) == y).double().mean())


def reloaded(posterior: ba.Posterior, folder: Path, compress: str | None) -> tuple[ba.Posterior, int]:
    """The posterior through a file without weights, and the bytes of its tensors other than the probes."""
    path = folder / "posterior.safetensors"
    posterior.save(path, weights=False, compress=compress)
    tensors, _ = posterior.packed(weights=False, compress=compress)
    size = sum(t.numel() * t.itemsize for key, t in tensors.items() if not key.startswith("probe."))
    return ba.Posterior.load(path, posterior.model), size


def novelty(posterior: ba.Posterior, data: Data) -> float:
    posterior = posterior.relative_to([data.x[:10]])
    return scores.auroc(*(posterior.novelty(x, likelihood="classification") for x in (data.test_x, data.other_x)))


def one_network(build: Callable[[], nn.Module], data: Data, seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """Bytes and scores by the form of the file."""
    torch.manual_seed(seed)
    model = build().to(data.x.device)
    optimizer, recorder = train(model, data.x, data.y, epochs)
    n_data = len(data.x)
    diagonal = ba.Posterior.from_optimizer(model, optimizer, n_data, batch_size=BATCH, prior_precision=1.0)
    kronecker = ba.Posterior.from_recorder(model, recorder, n_data, batch_size=BATCH)
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for form, compress in FORMS.items():
            found, size = reloaded(diagonal, Path(name), compress)
            row = rows[form] = {"bytes": float(size), "not pruned": accuracy(model, data.test_x, data.test_y)}
            for fraction in FRACTIONS:
                pruned = copy.deepcopy(model)
                ba.compress.apply_masks(pruned, ba.compress.masks(found, fraction))
                row[f"pruned {fraction:g}"] = accuracy(pruned, data.test_x, data.test_y)
            row["novelty"] = novelty(found, data)
            rotated, row["Kronecker bytes"] = reloaded(kronecker, Path(name), compress)
            row["novelty, Kronecker"] = novelty(rotated, data)
    return rows


def turned(x: Tensor, degrees: float) -> Tensor:
    """Images rotated about their middle."""
    angle = torch.deg2rad(torch.tensor(degrees))
    matrix = torch.tensor([[angle.cos(), -angle.sin(), 0.0], [angle.sin(), angle.cos(), 0.0]], device=x.device)
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def experts(data: Data, seed: int, epochs: int) -> dict[str, dict[str, float]]:
    """The accuracy, over all angles, of experts on rotated digits merged from files, by the form of their
    posteriors.
    """
    torch.manual_seed(seed)
    start = nn.Sequential(nn.Flatten(), *mlp((784, 100, 100, 10))).to(data.x.device)
    half = len(data.x) // 2
    trained = [(start, train(start, data.x[:half], data.y[:half], epochs)[0], half)]
    parts = zip(ANGLES, data.x[half:].chunk(len(ANGLES)), data.y[half:].chunk(len(ANGLES)), strict=True)
    for degrees, x, y in parts:
        model = copy.deepcopy(start)
        trained.append((model, train(model, turned(x, degrees), y, epochs)[0], len(x)))
    tests = [turned(data.test_x, degrees) for degrees in ANGLES]

    def score(model: nn.Module) -> float:
        return statistics.fmean(accuracy(model, x, data.test_y) for x in tests)

    average = copy.deepcopy(start)
    states = [model.state_dict() for model, _, _ in trained[1:]]
    average.load_state_dict({name: torch.stack([s[name] for s in states]).mean(dim=0) for name in states[0]})
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for form, compress in FORMS.items():
            files = []
            for number_, (model, optimizer, n_data) in enumerate(trained):
                pair = Path(name) / f"model-{number_}.safetensors", Path(name) / f"posterior-{number_}.safetensors"
                save_file(model.state_dict(), pair[0])
                posterior = ba.Posterior.from_optimizer(model, optimizer, n_data, batch_size=BATCH)
                posterior.save(pair[1], weights=False, compress=compress)
                files.append(pair)
            row = rows[form] = {"average": score(average)}
            for method in METHODS:
                base: Any = files[0] if method == "gradient-matching" else None
                merged = copy.deepcopy(start)
                merged.load_state_dict(dict(merge(files[1:], method, base=base)))
                row[f"merged, {method}"] = score(merged)
    return rows


def table(title: str, cells: Sequence[Cell]) -> str:
    columns = list(cells[0]["rows"]["float32"])
    lines = [f"| {title} | {' | '.join(FORMS)} |", "|---" * (1 + len(FORMS)) + "|"]
    for column in columns:
        values = [[cell["rows"][form][column] for cell in cells] for form in FORMS]
        digits = 0 if "bytes" in column else 4
        lines.append(f"| {column} | {' | '.join(number(held, digits) for held in values)} |")
    return "\n".join(lines)


def judged(title: str, cells: Sequence[Cell]) -> list[Target]:
    """Bytes over float32's, and the mean change beside the spread over seeds."""
    found: list[Target] = []
    for column in cells[0]["rows"]["float32"]:
        before, after = ([cell["rows"][form][column] for cell in cells] for form in ("float32", "8bit"))
        if column == "bytes":
            found += at_most(f"{title}: bytes, 8 bits over float32", 0.26, sum(after) / sum(before))
        elif "bytes" not in column and len(cells) > 1 and column not in ("not pruned", "average"):
            change = abs(statistics.fmean(a - b for a, b in zip(after, before, strict=True)))
            error = statistics.stdev(before) / len(before) ** 0.5
            found += at_most(
                f"{title}: {column}, change by 8 bits over the standard error", 1.0, change / max(error, 1e-9)
            )
    return found


PARTS: Mapping[str, Callable[..., dict[str, dict[str, float]]]] = {
    "mlp": partial(one_network, lambda: nn.Sequential(nn.Flatten(), *mlp())),
    "lenet": partial(one_network, lenet),
    "merge": experts,
}


def main() -> None:
    parser = arguments(__doc__, quick="two seeds, one epoch of 1,000 images", device=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(1000, 1010)))
    parser.add_argument("--images", type=int, default=60_000, help="for training")
    parser.add_argument("--tests", type=int, default=10_000, help="images of each kind for testing")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    seeds = options.seeds[:2] if options.quick else options.seeds
    images, epochs, tests = (1000, 1, 200) if options.quick else (options.images, options.epochs, options.tests)
    data = Data.load(options.device, images, tests)
    about = {"images": images, "epochs": epochs, "tests": tests}
    results: dict[str, Any] = {**setting(), **about, "seeds": seeds, "quick": options.quick}
    targets: list[Target] = []
    for part in options.only:
        cells = []
        for seed in seeds:
            path = options.out / "publish" / f"{part}-{seed}.json"
            cell = read_cell(path, about)
            if cell is None:
                cell = {"settings": about, "rows": PARTS[part](data, seed=seed, epochs=epochs)}
                write_cell(path, cell)
            cells.append(cell)
        results[part] = cells
        print(f"\n{table(part, cells)}\n", flush=True)
        targets += judged(part, cells)
    write_results(options.out, "publish", {**results, "targets": [asdict(target) for target in targets]})
    print(f"Mean ± standard error over {len(seeds)} seeds.")
    for target in targets:
        print(target)


if __name__ == "__main__":
    main()
