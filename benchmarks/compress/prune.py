"""Pruning an MNIST network by its optimiser's state: single weights from the checkpoint alone, and whole channels.

    BAYESADAM_DATA=... python -m benchmarks.compress.prune [--quick] [--alone] [--epochs 5] [--seeds 3]

A 784-400-400-10 network is trained with plain Adam and saved as a trainer would; `prune_checkpoint` sees that file
alone. A LeNet loses whole channels by Torch-Pruning, one threshold over all layers: by our importance of Adam's state
and by Torch-Pruning's own magnitude. Accuracy on the test images, no training step afterwards; for channels also the
parameters that are left and the time of a forward pass of 256 images over that of the whole network, in turns.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesadam as ba
from benchmarks.common.harness import arguments, import_peer, interleaved, number, ratio, write_results
from benchmarks.common.inputs import load
from benchmarks.common.networks import lenet, mlp, train_classifier

FRACTIONS, RANKINGS = (0.25, 0.5, 0.75, 0.8, 0.9, 0.95), ("snr", "saliency", "magnitude")
CHANNELS = (0.25, 0.5, 0.75)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model.eval()(x).argmax(dim=1) == y).double().mean())


def weights_of(model: nn.Module, adam: torch.optim.Optimizer, test: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Accuracy by ranking and fraction, out of a checkpoint's file."""
    rows = {"whole": accuracy(model, *test)}
    with tempfile.TemporaryDirectory() as name:
        path, out = Path(name) / "last.pt", Path(name) / "pruned.pt"
        torch.save({"model": model.state_dict(), "optimizer": adam.state_dict()}, path)
        for ranking in RANKINGS:
            for fraction in FRACTIONS:
                ba.compress.prune_checkpoint(path, out, fraction, ranking=ranking)
                pruned = copy.deepcopy(model)
                pruned.load_state_dict(torch.load(out, weights_only=True)["model"])
                rows[f"{ranking}, {fraction:g}"] = accuracy(pruned, *test)
    return rows


def channels_of(
    peer: Any, model: nn.Module, adam: torch.optim.Optimizer, n_data: int, test: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Accuracy, parameters and time by importance and share of channels."""
    posterior = ba.Posterior.from_optimizer(model, adam, n_data, prior_precision=1.0)
    batch, rows = test[0][:256], {"whole": accuracy(model, *test)}
    for share in CHANNELS:
        for importance in (*RANKINGS[:2], "Torch-Pruning's magnitude"):
            small = copy.deepcopy(model)
            if importance in RANKINGS:
                how = ba.compress.importance(posterior, small, ranking=importance)
            else:
                how = peer.importance.GroupMagnitudeImportance()
            head = [module for module in small.modules() if isinstance(module, nn.Linear)][-1]
            options = {"global_pruning": True, "pruning_ratio": share, "ignored_layers": [head]}
            peer.pruner.BasePruner(small, batch[:1], how, **options).step()
            small.zero_grad()
            label = f"{importance}, {share:g}"
            rows[label] = accuracy(small, *test)
            rows[f"{label}: parameters"] = sum(p.numel() for p in small.parameters())
            with torch.no_grad():
                times = interleaved({"before": lambda: model(batch), "after": lambda s=small: s(batch)}, rounds=20)  # type: ignore[misc]
            rows[f"{label}: time"] = ratio(times, "after", "before")
    return rows


def main() -> None:
    parser = arguments(__doc__, quick="one epoch of made-up images, one seed", peer="Torch-Pruning")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    peer = import_peer("torch_pruning", "Torch-Pruning", alone=options.alone)
    (x, y), test = (load("mnist", split, made_up=options.quick) for split in ("train", "test"))
    options.epochs, options.seeds = (1, 1) if options.quick else (options.epochs, options.seeds)
    results: dict[str, dict[str, list[float]]] = {"weights": {}, "channels": {}}
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), *mlp())
        adam = train_classifier(model, x, y, options.epochs)
        found = {"weights": weights_of(model, adam, test)}
        if peer is not None:
            net = lenet()
            adam = train_classifier(net, x, y, options.epochs)
            found["channels"] = channels_of(peer, net, adam, len(x), test)
        for kind, rows in found.items():
            for row, value in rows.items():
                results[kind].setdefault(row, []).append(value)
    for kind, columns in results.items():
        print(f"\n{kind}: accuracy on test images, {options.seeds} networks")
        for row, values in columns.items():
            print(f"  {row:44s} {number(values, 0 if row.endswith('parameters') else 4)}")
    write_results(options.out, "prune", results)
    print(f"nine tenths of the weights gone, by the state: {number(results['weights']['snr, 0.9'], 4)}")


if __name__ == "__main__":
    main()
