"""The language model of `doubt.py`: the GPT of `language.py`, whose documents are what is doubted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import bayesadam as ba
import language
from doubt_data import NoData, Suite, folder
from doubt_networks import Trained
from doubt_rows import HELD_OUT, NOTHING, TEN, Answer, Case, Row, Scorer

Posteriors = Callable[[language.Case, Any], ba.Posterior]


@dataclass(frozen=True, eq=False)
class Gpt:
    """Texts, the sizes of the network, and where it runs."""

    texts: language.Texts
    sizes: language.Sizes
    device: str

    def suite(self) -> Suite:
        """Held-out blocks of the text trained on, with the next byte of every place, and documents of others."""
        held_out, test = (
            (documents[:, :-1], documents[:, 1:])
            for documents in (self.texts.calibration, self.texts.documents[language.INSIDE])
        )
        outside = {name: self.texts.documents[name][:, :-1] for name in language.OUTSIDE}
        return Suite(language.INSIDE, test, held_out, test, outside)

    def trained(self, path: Path, seed: int, new: bool) -> Trained:
        """The network of a seed, out of its file where there is one: nothing was recorded that a new one would have."""
        one: Any = language.trained(path, self.texts, self.sizes, seed, self.device)
        return Trained(one.model, one.optimizer, None)

    def case(self, case: Case) -> language.Case:
        """The same networks as `language.py` takes them."""
        networks: Any = case.networks
        return language.Case(networks, self.texts, self.sizes, self.device)

    def rows(self) -> Mapping[str, Row]:
        """By name."""
        held_out, several = "held-out documents", "held-out documents; several networks"
        return {
            "network alone": Row(self._tempered(False), NOTHING),
            "temperature": Row(self._tempered(True), held_out),
            "ours, held-out inputs": Row(self._ours, HELD_OUT),
            "ours, Adam's state": Row(self._by_state(_diagonal), TEN),
            "ours, gradients of 50 batches": Row(self._by_state(language.kronecker), f"{TEN}; 50 training batches"),
            "perplexity": Row(_perplexity, NOTHING),
            "ours, mixture": Row(self._ours, several, joint=True),
            "ensemble": Row(self._tempered(True), several, joint=True),
        }

    def _tempered(self, tempered: bool) -> Callable[[Case], Scorer]:
        """A document's doubt is the mean entropy of its places."""

        def row(case: Case) -> Scorer:
            scorer, _ = language.of_networks(self.case(case), tempered=tempered)

            def score(x: Tensor) -> Answer:
                probs = scorer(x).probs
                return Answer(probs.flatten(0, 1), language.entropies(probs).mean(dim=1))

            return score

        return row

    def _ours(self, case: Case) -> Scorer:
        """Of one network its posterior, of several the mixture of theirs, calibrated as in `language.py`; members are
        asked one by one, in a forward pass each.
        """
        own = self.case(case)
        each = [_diagonal(own, one) for one in own.networks]
        posterior: Any = language.calibrated(each[0] if len(each) == 1 else ba.Mixture(each), own)

        members = posterior.members if isinstance(posterior, ba.Mixture) else (posterior,)

        def score(x: Tensor) -> Answer:
            each = [one.predict(x, likelihood="classification", memory_budget=own.budget) for one in members]
            probs, novelty = (
                torch.stack(parts).mean(dim=0) for parts in zip(*((f.probs, f.novelty) for f in each), strict=True)
            )
            return Answer(probs.flatten(0, 1), novelty)

        return score

    def _by_state(self, posterior_of: Posteriors) -> Callable[[Case], Scorer]:
        """Novelty by the optimiser's state or gradients, ten held-out documents as reference."""

        def row(case: Case) -> Scorer:
            own = self.case(case)
            posterior = posterior_of(own, own.networks[0]).relative_to([case.suite.held_out[0][:10]])
            return lambda x: Answer(None, posterior.novelty(x, likelihood="classification"))

        return row


def _diagonal(case: language.Case, one: Any) -> ba.Posterior:
    return language.diagonal(case, one, power=1.0)


def _perplexity(case: Case) -> Scorer:
    """The mean negative log-likelihood of a document's own bytes."""

    def score(x: Tensor) -> Answer:
        with torch.no_grad():
            logits = case.model(x[:, :-1])
        return Answer(None, F.cross_entropy(logits.mT, x[:, 1:], reduction="none").mean(dim=1))

    return score


def gpt(device: str, *, quick: bool) -> Gpt:
    """What trains and scores the language model."""
    if not (folder() or Path()).joinpath("text").is_dir():
        raise NoData("manual: the environment variable BAYESADAM_DATA must name the folder that has text/*.txt.gz")
    sizes = language.QUICK if quick else language.Sizes()
    return Gpt(language.texts_of(sizes, device), sizes, device)
