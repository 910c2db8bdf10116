"""What an audit found: a column for each measure, an entry for each example, in the order in which they came."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bayesadam._extras import require
from bayesadam.errors import SettingError

Column = Literal["suspicion", "novelty", "influence", "loss"]
COLUMNS: tuple[Column, ...] = get_args(Column)


@dataclass(frozen=True)
class Suspect:
    """One example: its number in the data, its label or target, what the network predicts, and its measures."""

    index: int
    label: Any
    predicted: Any
    suspicion: float
    novelty: float
    influence: float
    loss: float


@dataclass(frozen=True, eq=False)
class Audit:
    """Measures of every example, on the CPU; what is larger is stranger. Those of class −100 are NaN.

    Attributes:
        likelihood: of the targets.
        suspicion: how strongly the network, and what it does not know, speak against the label: look at the largest first.
        novelty: how unlike the training data the input is, as `posterior.novelty`.
        influence: |Δf|, how far the network's outputs at the example would move if it were left out; the order counts, the
            size is too large.
        loss: −log p(y) of the network at the posterior's mean.
        labels: the targets.
        predicted: the likeliest class, or the expected target.
        change: Δf itself, (n, outputs).
        noise_variance: σ² that a regression's residuals were held against, by output; None for other likelihoods.
        noise_estimated: whether that comes from the residuals, the posterior having none.
    """

    likelihood: str
    suspicion: Tensor
    novelty: Tensor
    influence: Tensor
    loss: Tensor
    labels: Tensor
    predicted: Tensor
    change: Tensor
    noise_variance: Tensor | None = None
    noise_estimated: bool = False

    def suspects(self, n: int = 20, *, by: Column = "suspicion") -> list[Suspect]:
        """The n examples that are largest in a column, the first the largest; NaN never counts, ties keep their order."""
        if by not in COLUMNS:
            raise SettingError(f"by must be one of {COLUMNS}, got {by!r}")
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise SettingError(f"n must be a positive number of examples, got {n!r}")
        column: Tensor = getattr(self, by)
        known = (~column.isnan() & ~self.suspicion.isnan()).nonzero().flatten()
        order = known[column[known].argsort(descending=True, stable=True)]
        return [self[index] for index in order[:n].tolist()]

    def __getitem__(self, index: int) -> Suspect:
        """One example's row, by its number."""
        measures = (float(getattr(self, name)[index]) for name in COLUMNS)
        number = range(len(self))[index]
        return Suspect(number, self.labels[number].tolist(), self.predicted[number].tolist(), *measures)

    def __len__(self) -> int:
        return len(self.suspicion)

    def __repr__(self) -> str:
        noise = ""
        if self.noise_variance is not None:
            where = "estimated from the residuals" if self.noise_estimated else "the posterior's"
            noise = f", noise variance {where}"
        return f"Audit({len(self):,} examples, {self.likelihood}{noise})"

    def to_pandas(self) -> Any:
        """A table with a row per example, its number as the index; needs pandas."""
        columns: dict[str, Any] = {name: getattr(self, name).numpy() for name in COLUMNS}
        targets = {"label": self.labels, "predicted": self.predicted}
        table: dict[str, Any] = {name: t.numpy() if t.dim() == 1 else t.tolist() for name, t in targets.items()}
        return require("pandas").DataFrame(table | columns).rename_axis("index")

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        inputs: Any = None,
        names: Sequence[str] | Mapping[int, str] | None = None,
        n: int = 60,
        by: Column = "suspicion",
        title: str = "Which labels to look at",
    ) -> None:
        """Write the n largest of a column as one HTML page that needs nothing else.

        Args:
            path: the file, which is replaced once the page is complete.
            inputs: the examples by number: a tensor, a list or a data set. Images, (H, W), (1, H, W) or (3, H, W), bytes or
                other numbers, which are then scaled to the range of all that are shown; texts; or numbers, as rows of
                pixels are.
            names: of the classes.
            title: of the page.
        """
        from bayesadam.auditing.page import write_page

        write_page(path, self, self.suspects(n, by=by), inputs=inputs, names=names, by=by, title=title)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts of a column as one, on the CPU, float64 as float32."""
    column = torch.cat([part.cpu() for part in parts])
    return column.float() if column.is_floating_point() else column
