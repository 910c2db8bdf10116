"""The novelty of an example does not depend on the others in its batch, or it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.errors import BayesAdamWarning, MatchError
from floats import assert_close
from predict.cases_networks import Lambda, posterior_over

# --- models whose layers have rows that are not the examples, or may be taken for them ------------------------------


def pair(width: int = 3) -> dict[str, nn.Module]:
    return {"a": nn.Linear(width, 5), "b": nn.Linear(5, 2)}


def sequence_first(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x.transpose(0, 1)).tanh()).mean(dim=0)


def folded_before(self: Any, x: Tensor) -> Tensor:
    b, t, _ = x.shape
    return self.b(self.a(x.transpose(0, 1).flatten(0, 1)).tanh().view(t, b, -1).mean(dim=0))


def folded_behind(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x.flatten(0, 1)).tanh().unflatten(0, x.shape[:2]).mean(dim=1))


def folded_frames(self: Any, x: Tensor) -> Tensor:
    """Two frames of so many positions, which may be as many as the examples."""
    frames = torch.stack([x, x.sin()], dim=1).flatten(0, 1)
    return self.b(self.a(frames).tanh().unflatten(0, (len(x), 2)).mean(dim=(1, 2)))


def packed(self: Any, x: Tensor) -> Tensor:
    lengths = torch.full((len(x),), x.shape[1])
    whole = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    z = whole._replace(data=self.a(whole.data).tanh())
    return self.b(nn.utils.rnn.pad_packed_sequence(z, batch_first=True)[0].mean(dim=1))


def sorted_rows(self: Any, x: Tensor) -> Tensor:
    """As `enforce_sorted=False` does."""
    order = x[:, 0, 0].argsort()
    return self.b(self.a(x[order]).tanh()[order.argsort()].mean(dim=1))


def recurrent(self: Any, x: Tensor) -> Tensor:
    return self.b(self.rnn(x.transpose(0, 1))[0].transpose(0, 1).mean(dim=1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    f.__name__: (lambda f=f: Lambda(f, **pair()))  # type: ignore[misc]
    for f in (sequence_first, folded_before, folded_behind, folded_frames, packed, sorted_rows)
} | {"recurrent": lambda: Lambda(recurrent, rnn=nn.LSTM(3, 5), b=nn.Linear(5, 2))}


def batches(size: int, steps: int, number: int = 8) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, steps, 3) + torch.randn(size, 1, 3), torch.randn(size, 2)) for _ in range(number)]


@pytest.mark.parametrize("held_out", [(6, 3), (3, 3), (6, 1)], ids=["6x3", "as-long-as-wide", "one-step"])
@pytest.mark.parametrize("name", MODELS)
def test_novelty_does_not_depend_on_the_others_in_a_batch(name: str, held_out: tuple[int, int]):
    """Of calibrated networks and of posteriors: of a batch, permuted, and one by one."""
    model = MODELS[name]().eval()
    q = posterior_over(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayesAdamWarning)
        net = ba.calibrate(q, batches(*held_out), likelihood="regression")
        for size, steps in ((3, 3), (4, 1), (4, 2), (3, 6)):
            ((x, _),) = batches(size, steps, 1)
            order = torch.randperm(size)
            reference = batches(5, steps, 2)
            for scores in (
                lambda z: net(z).novelty,
                lambda z, reference=reference: q.novelty(z, reference=reference, likelihood="regression"),
            ):
                whole = scores(x)
                assert_close(scores(x[order]), whole[order], rtol=1e-4)
                assert_close(torch.cat([scores(x[i : i + 1]) for i in range(size)]), whole, rtol=1e-4)


def test_a_batch_whose_rows_are_not_the_examples_is_run_one_by_one_with_a_warning():
    net = ba.calibrate(Lambda(sequence_first, **pair()), batches(6, 3), likelihood="regression")
    (x, _), (like, _) = batches(3, 3, 2)
    with pytest.warns(BayesAdamWarning, match="the rows of layer 'a' are not the examples in their order"):
        net(x)
    net(like)


def mixes(self: Any, x: Tensor) -> Tensor:
    return self.b(F.batch_norm(self.a(x), None, None, training=True))


def graph(self: Any, nodes: Tensor, crystal: Tensor) -> Tensor:
    z = self.a(nodes).tanh()
    return self.b(z.new_zeros(int(crystal.max()) + 1, z.shape[1]).index_add(0, crystal, z))


@pytest.mark.parametrize(
    ("function", "inputs"), [(mixes, lambda x: x[:, 0]), (graph, lambda x: (x[:, 0], torch.arange(len(x))))]
)
def test_a_model_that_mixes_examples_is_refused(function: Any, inputs: Any):
    """Also where the rows are nodes, and each graph happens to have one."""
    held_out = [(inputs(x), y) for x, y in batches(6, 1)]
    with pytest.raises(MatchError, match="must depend on that example alone"):
        ba.calibrate(Lambda(function, **pair()), held_out, likelihood="regression")


def routed(self: Any, x: Tensor) -> Tensor:
    z = x.sin() @ x.new_ones(3, 2)
    rows = x[:, 0] > 0
    z[rows] = self.b(self.a(x[rows]).tanh())
    return z


def test_outputs_that_are_not_of_the_examples_are_refused():
    net = ba.calibrate(
        Lambda(lambda self, x: self.b(self.a(x).mean(dim=1)), **pair()), batches(6, 3), likelihood="regression"
    )
    net.tapped.call = lambda model, x: model(x)[:1]
    with pytest.raises(MatchError, match="returned 1 rows for 4 examples"):
        net(torch.randn(4, 3, 3))


def test_a_layer_that_some_examples_alone_reach_is_refused():
    held_out = [(x[:, 0].abs(), y) for x, y in batches(6, 1)]
    net = ba.calibrate(Lambda(routed, **pair()), held_out, likelihood="regression")
    x = torch.randn(6, 3).abs()
    net(x)
    x[0] = -x[0]
    with pytest.raises(MatchError, match="layer 'a' has no row of inputs for every example"):
        net(x)


def test_examples_that_are_alike_prove_nothing():
    """A first batch of zeros must not vouch for later ones."""
    net = ba.calibrate(Lambda(sequence_first, **pair()), batches(6, 3), likelihood="regression")
    net(torch.zeros(3, 3, 3))
    with pytest.warns(BayesAdamWarning, match="not the examples in their order"):
        net(batches(3, 3, 1)[0][0])


@pytest.mark.filterwarnings("ignore:4 different inputs:bayesadam.errors.BayesAdamWarning")
def test_a_category_that_counts_up_is_not_taken_for_a_position():
    model = Lambda(lambda self, x: self.b(self.table(x)[:, 0].tanh()), table=nn.Embedding(4, 5), b=nn.Linear(5, 2))
    q, reference = posterior_over(model), torch.randint(4, (12, 1))
    zeros = torch.zeros(2, 1, dtype=torch.long)
    scores = q.novelty(zeros, reference=reference, likelihood="classification")
    assert_close(scores[:1], q.novelty(zeros[:1], reference=reference, likelihood="classification"))


def test_a_model_that_drops_a_dimension_of_one_is_calibrated():
    """It cannot be run on one example, which proves nothing against it."""
    model = Lambda(lambda self, x: self.a(x).squeeze(), a=nn.Linear(3, 1))
    held_out = [(x[:, 0], y[:, 0]) for x, y in batches(6, 1)]
    assert ba.calibrate(model, held_out, likelihood="regression")(held_out[0][0]).novelty.shape == (6,)
