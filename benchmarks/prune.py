"""Pruning a real MNIST network: from its checkpoint without data, and whole units, with bytes and time before and
after.

    BAYESADAM_DATA=... python benchmarks/prune.py [--quick] [--epochs 5] [--out out/bench]

A 784-400-400-10 network is trained with plain Adam and saved as a trainer would. `prune_checkpoint` sees that file
alone. Then whole units are removed by signal to noise and the network is shrunk: the file's bytes, and the time of a
forward pass of 256 images, both networks in turn. Last, a network trained to be pruned (a Laplace prior) loses nine
tenths of its weights one by one, and `shrink` takes out the units that this left without any.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.engine.network import member
from experiments.baselines import Network, Training
from experiments.data import Images, load_images
from experiments.figure2 import problem_of
from harness import arguments, interleaved, ratio, write_results
from networks import mlp, train_classifier

FRACTIONS = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9)
UNITS = (0.25, 0.5, 0.75)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(dim=1) == y).double().mean())


def size_on_disk(model: nn.Module, folder: Path) -> int:
    save_file(model.state_dict(), folder / "weights.safetensors")
    return (folder / "weights.safetensors").stat().st_size


def shrunk(model: nn.Module, masks: dict[str, Tensor], test: tuple[Tensor, Tensor], folder: Path) -> dict[str, float]:
    """The network without the units that the masks leave without weights: accuracy, size and time."""
    small = ba.pruning.shrink(model, masks, example_input=test[0][:1])
    batch = test[0][:256]
    with torch.no_grad():
        times = interleaved({"before": lambda: model(batch), "after": lambda: small(batch)}, rounds=40)
    return {
        "accuracy": accuracy(small, *test),
        "weights": sum(p.numel() for p in small.parameters()),
        "bytes": size_on_disk(small, folder),
        "time ratio": ratio(times, "after", "before"),
    }


def trained_to_be_pruned(images: Images, epochs: int) -> ba.Posterior:
    training = Training(epochs, 128, 1e-3, 0.0, (0.9, 0.99999), sparsity=1e-4, schedule="cosine")
    problem = problem_of(images, Network(784, (400, 400), 10, dropout=0.2), training, (0,), "cpu")
    stack = problem.optimum
    model = problem.network.build(member(stack.params, 0)).eval()
    return ba.Posterior.from_state_dict(model, stack.state_dict(0), len(images.train_x), prior_precision=0.0)


def main() -> None:
    parser = arguments(__doc__, quick="one epoch of 2,000 images")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    images = load_images("mnist")
    if options.quick:
        options.epochs = 1
        images = replace(images, train_x=images.train_x[:2000], train_y=images.train_y[:2000])
    model = mlp()
    adam = train_classifier(model, images.train_x, images.train_y, options.epochs)
    test = images.test_x, images.test_y
    results: dict[str, Any] = {"accuracy": accuracy(model, *test)}
    print(f"784-400-400-10, {options.epochs} epochs of Adam: accuracy {results['accuracy']:.4f}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, folder / "last.pt")
        print("\nfrom the checkpoint alone, fraction: accuracy by signal to noise, by magnitude")
        for fraction in FRACTIONS:
            found = {}
            for ranking in ("snr", "magnitude"):
                ba.pruning.prune_checkpoint(folder / "last.pt", folder / "pruned.pt", fraction, ranking=ranking)
                pruned = mlp()
                pruned.load_state_dict(torch.load(folder / "pruned.pt", weights_only=True)["model"])
                found[ranking] = accuracy(pruned.eval(), *test)
            results[f"pruned {fraction}"] = found
            print(f"  {fraction:4.2f}: {found['snr']:.4f}  {found['magnitude']:.4f}")
        posterior = ba.Posterior.from_optimizer(model, adam, n_data=len(images.train_x), prior_precision=0.0)
        example = test[0][:1]
        before = size_on_disk(model, folder)
        print(
            f"\nwhole units, fraction: accuracy, weights, bytes ({before:,} before), time of a forward pass over before"
        )
        for fraction in UNITS:
            masks = ba.pruning.neuron_masks(posterior, fraction, example_input=example)
            row = results[f"units {fraction}"] = shrunk(model, masks, test, folder)
            print(
                f"  {fraction:4.2f}: {row['accuracy']:.4f}  {row['weights']:,}  {row['bytes']:,}  "
                f"{row['time ratio']:.2f}"
            )
        sparse = trained_to_be_pruned(images, 2 * options.epochs)
        masks = ba.pruning_masks(sparse, 0.9)
        row = results["sparse 0.9"] = shrunk(sparse.model, masks, test, folder)
        print(
            f"\ntrained to be pruned ({accuracy(sparse.model, *test):.4f}), nine tenths of its weights removed, "
            "then shrunk:"
        )
        print(f"  0.90: {row['accuracy']:.4f}  {row['weights']:,}  {row['bytes']:,}  {row['time ratio']:.2f}")
    write_results(options.out, "prune", results)
    half = results["units 0.5"]
    print(f"half of the units removed, time of a forward pass over before: {half['time ratio']:.2f}")


if __name__ == "__main__":
    main()
