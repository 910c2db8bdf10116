"""Detectors written from their papers against those papers' equations, one input and one class at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from benchmarks.doubt.rows import core, relative_mahalanobis


def features() -> tuple[torch.Tensor, torch.Tensor, nn.Linear]:
    torch.manual_seed(0)
    y = torch.arange(60) % 3
    return torch.randn(60, 5).double() + y[:, None], y, nn.Linear(5, 3).double()


def test_relative_mahalanobis_is_the_difference_of_two_distances():
    z, y, head = features()
    unit, new = (
        x / np.linalg.norm(x, axis=1, keepdims=True) for x in (z.numpy(), np.random.default_rng(0).normal(size=(4, 5)))
    )
    means, labels = [unit[y.numpy() == c].mean(axis=0) for c in range(3)], y.tolist()
    within, whole = (
        np.linalg.inv(sum(np.outer(d, d) for d in away) / 60)
        for away in ([u - means[c] for u, c in zip(unit, labels, strict=True)], [u - unit.mean(axis=0) for u in unit])
    )
    expected = [
        min((u - m) @ within @ (u - m) for m in means) - (u - unit.mean(axis=0)) @ whole @ (u - unit.mean(axis=0))
        for u in new
    ]
    assert np.allclose(relative_mahalanobis(z, y, head)(3 * torch.tensor(new)).numpy(), expected)


def test_core_adds_energy_and_the_cosine_of_the_residual():
    z, y, head = features()
    with torch.no_grad():
        f, doubts = head(z).numpy(), core(z, y, head)(z).numpy()
    w, x = head.weight.detach().numpy(), z.numpy()
    left = x - x @ np.linalg.pinv(w) @ w
    means = [left[y.numpy() == c].mean(axis=0) for c in range(3)]
    pairs = [(u, means[c]) for u, c in zip(left, f.argmax(axis=1), strict=True)]
    parts = np.log(np.exp(f).sum(axis=1)), np.array([u @ m / np.linalg.norm(u) / np.linalg.norm(m) for u, m in pairs])
    assert np.allclose(doubts, -sum((part - part.mean()) / part.std(ddof=1) for part in parts))
