"""Batches of examples that are no rows: graphs, crystals and mappings of several sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.compress import condition, masks
from bayesadam.errors import MatchError, SettingError
from bayesadam.predict import linearised, plan
from bayesadam.predict.matrices import layers_of
from bayesadam.predict.tap import observed
from floats import assert_close
from predict.cases_networks import posterior_over

SIZES = (2, 3, 5, 7, 11)


@dataclass(frozen=True, eq=False)
class Graph:
    """As a crystal of chgnet's."""

    x: Tensor
    edge_index: Tensor
    y: Tensor


class Batch:
    """As PyTorch Geometric has it: nodes of all graphs, and the graph of each."""

    def __init__(self, graphs: Sequence[Graph]) -> None:
        self.graphs, self.num_graphs = list(graphs), len(graphs)
        starts = [sum(len(g.x) for g in graphs[:i]) for i in range(len(graphs))]
        self.x, self.y = torch.cat([g.x for g in graphs]), torch.cat([g.y for g in graphs])
        self.edge_index = torch.cat([g.edge_index + start for g, start in zip(graphs, starts, strict=True)], dim=1)
        self.batch = torch.repeat_interleave(torch.tensor([len(g.x) for g in graphs]))

    def __getitem__(self, index: int) -> Graph:
        return self.graphs[index]

    def to_data_list(self) -> list[Graph]:
        return self.graphs

    @classmethod
    def from_data_list(cls, graphs: Sequence[Graph]) -> Batch:
        return cls(graphs)

    def to(self, device: torch.device) -> Batch:
        return self


class Network(nn.Module):
    """Messages along edges, sums over nodes: (graphs, 2) of a `Batch`, as data.x, data.edge_index, data.batch."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.edges, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, data: Any) -> Tensor:
        h, (source, target) = self.nodes(data.x).tanh(), data.edge_index
        h = h.index_add(0, target, self.edges(h[source] - h[target]).tanh())
        return self.head(h.new_zeros(data.num_graphs, 6).index_add(0, data.batch, h).tanh())


class Crystals(Network):
    """A list of graphs → a mapping, as chgnet has it."""

    def forward(self, graphs: list[Graph]) -> Any:
        return {"e": super().forward(Batch(graphs))}


def graph(n: int, edges: int | None = None) -> Graph:
    ends = torch.randint(n, (2, 2 * n + 1 if edges is None else edges))
    return Graph(torch.randn(n, 4) + torch.randn(1, 4), ends, torch.randn(1, 2))


def graphs_of(n: int, seed: int = 0) -> list[Graph]:
    torch.manual_seed(seed)
    return [graph(SIZES[i % 5]) for i in range(n)]


# A model, how its batch is made of graphs, and its forward=.
FORMS: dict[str, tuple[type[Network], Callable[[list[Graph]], Any], Any]] = {
    "crystals": (Crystals, list, lambda model, graphs: model(graphs)["e"]),
    "mappings": (Network, lambda graphs: list(map(vars, graphs)), lambda m, some: m(Batch([Graph(**g) for g in some]))),
    "tuples": (
        Network,
        lambda graphs: [(g.x, g.edge_index, g.y) for g in graphs],
        lambda m, some: m(Batch([Graph(*g) for g in some])),
    ),
    "geometric": (Network, Batch, None),
}


def setting(name: str) -> tuple[ba.Posterior, Callable[[list[Graph]], Any], Any]:
    torch.manual_seed(0)
    kind, batch, forward = FORMS[name]
    return posterior_over(kind().eval()), batch, forward


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", FORMS)
def test_pooled_inputs_are_means_over_the_rows_of_a_graph(name: str) -> None:
    q, batch, forward = setting(name)
    some, layers = graphs_of(5), layers_of(q.model, q.mode)
    f, pooled = observed(q, layers, batch(some), forward)
    for i, g in enumerate(some):
        h = (g.x @ q.mean["nodes.weight"].T + q.mean["nodes.bias"]).tanh()
        differences = h[g.edge_index[0]] - h[g.edge_index[1]]
        assert_close(pooled["nodes"][i], g.x.mean(dim=0))
        assert_close(pooled["edges"][i], differences.mean(dim=0))
        assert_close(f[i], pooled["head"][i] @ q.mean["head.weight"].T + q.mean["head.bias"])


@pytest.mark.parametrize("name", FORMS)
def test_novelty_of_graphs_does_not_depend_on_the_others(name: str) -> None:
    """Of a batch, permuted, and one by one; calibrated by one batch or by a loader."""
    q, batch, forward = setting(name)
    held_out, some = graphs_of(40), graphs_of(5, seed=1)
    y = torch.cat([g.y for g in held_out])
    net = ba.calibrate(q, (batch(held_out), y), likelihood="regression", forward=forward)
    loader = [(batch(held_out[:15]), y[:15]), (batch(held_out[15:]), y[15:])]
    again = ba.calibrate(q, loader, likelihood="regression", forward=forward)
    assert net.layers == ["nodes", "edges", "head"]
    how = {"reference": [batch(held_out)], "likelihood": "regression", "forward": forward}
    for novelty in (lambda x: net(x).novelty, lambda x: again(x).novelty, lambda x: q.novelty([x], **how)):
        whole = novelty(batch(some))
        assert whole.unique().shape == (5,)
        assert_close(novelty(batch(some[::-1])), whole.flip(0), rtol=1e-6)
        assert_close(torch.cat([novelty(batch([g])) for g in some]), whole, rtol=1e-6)
    assert_close(again(batch(some)).novelty, net(batch(some)).novelty, rtol=1e-6)


def test_targets_of_a_batch_of_graphs_are_its_own():
    q, batch, _ = setting("geometric")
    held_out, some = graphs_of(40), graphs_of(5, seed=1)
    loader = (batch(held_out[start : start + 20]) for start in range(0, 40, 20))
    net = ba.calibrate(q, loader, likelihood="regression")
    given = ba.calibrate(q, (batch(held_out), torch.cat([g.y for g in held_out])), likelihood="regression")
    assert_close(net(batch(some)).stddev, given(batch(some)).stddev)


@pytest.mark.parametrize(("nodes", "edges"), [(1, 1), (3, 3), (4, 1)], ids=["all ones", "as nodes", "as graphs"])
def test_rows_that_may_be_of_either_are_told_apart(nodes: int, edges: int) -> None:
    """Where nodes, edges or graphs are equally many, and where a layer has other rows: graphs are run alone."""
    q, batch, _ = setting("geometric")
    torch.manual_seed(1)
    some, layers = [graph(nodes, edges) for _ in range(4)], layers_of(q.model, q.mode)

    def triplets(model: nn.Module, data: Any) -> Tensor:
        model.edges(torch.cat([data.x, data.x])[:, [0, 1, 2, 3, 0, 1]])
        return model(data)

    for forward in (None, triplets):
        _, pooled = observed(q, layers, batch(some), forward)
        for i, g in enumerate(some):
            assert_close({n: a[i : i + 1] for n, a in pooled.items()}, observed(q, layers, batch([g]), forward)[1])


@pytest.mark.parametrize("name", FORMS)
def test_a_layer_that_a_graph_does_not_run_is_left_out_of_its_mean(name: str) -> None:
    q, batch, forward = setting(name)
    held_out, some = graphs_of(80), graphs_of(5, seed=1)
    held_out[::16], some[3] = [graph(3, 0) for _ in range(5)], graph(4, 0)
    data = batch(held_out), torch.cat([g.y for g in held_out])
    net = ba.calibrate(q, data, likelihood="regression", forward=forward)
    how = {"reference": [batch(held_out)], "likelihood": "regression", "forward": forward}
    for novelty in (lambda x: net(x).novelty, lambda x: q.novelty([x], **how)):
        whole = novelty(batch(some))
        assert bool(whole.isfinite().all())
        assert_close(torch.cat([novelty(batch([g])) for g in some]), whole, rtol=1e-6)
    leverage = net.fit.leverage
    assert [layer.module for layer in leverage.layers] == ["nodes", "edges", "head"]
    _, pooled = observed(q, leverage.layers, batch(some[3:4]), forward)
    assert bool(pooled["edges"].isnan().all())
    log_h = [(pooled[m][0] @ leverage.factors[i][0]).square().sum().log() for i, m in ((0, "nodes"), (2, "head"))]
    r = (torch.stack(log_h) - leverage.medians[[0, 2]]).exp().mean() / leverage.medians[-1].exp()
    assert_close(net(batch(some)).leverage[3], r, rtol=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_networks_of_graphs_are_made_smaller(name: str) -> None:
    q, batch, forward = setting(name)
    inputs = [batch(graphs_of(40))]
    small = ba.prune(q, 0.5, inputs=inputs, forward=forward)
    matrices = [name for name in q.mode if name.endswith("weight")]
    assert sum(int((small.mode[name] == 0).sum()) for name in matrices) == (24 + 36 + 12) // 2
    moved = ba.quantise(q, 8, inputs=inputs, forward=forward).moved
    assert sorted(moved) == sorted(matrices)
    assert max(moved.values()) < 1e-3


def test_nodes_are_positions_of_a_layer():
    """A layer of nodes is conditioned on all of them, as if each were an example."""
    q, some = posterior_over(nn.Linear(4, 3)), graphs_of(40)
    kept = masks(q, 0.5)
    by_nodes = condition(q, kept, torch.cat([g.x for g in some]))
    by_graphs = condition(q, kept, some, forward=lambda m, graphs: torch.stack([m(g.x).sum(dim=0) for g in graphs]))
    assert_close(by_graphs.mode, by_nodes.mode, rtol=1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_variances_of_graphs_are_those_of_their_gradients(name: str) -> None:
    """Of lists of several lengths, which take the plan of the first."""
    q, batch, forward = setting(name)
    some = graphs_of(5)
    parts = [linearised(q, batch(part), forward=forward) for part in (some[:2], some[2:])]
    assert len(plan._plans[q.model]) == 1
    mean, variance = torch.cat([p.mean for p in parts]), torch.cat([p.variance for p in parts])
    for i, g in enumerate(some):
        f = (forward or type(q.model).__call__)(q.model, batch([g]))[0]
        assert_close(mean[i], f)
        for k in range(2):
            gradients = torch.autograd.grad(f[k], list(q.model.parameters()), retain_graph=True)
            pairs = zip(gradients, q.coordinate_variance.values(), strict=True)
            assert_close(variance[i, k], sum((d.square() * v).sum() for d, v in pairs))


@pytest.mark.parametrize("name", FORMS)
def test_input_sides_are_means_over_the_rows_of_graphs(name: str) -> None:
    q, batch, forward = setting(name)
    some = graphs_of(6)
    sides = q.with_inputs([batch(some)], forward=forward).curvature.inputs
    assert sides.keys() == {"nodes.weight", "edges.weight", "head.weight"}
    x = [torch.cat([g.x, torch.ones(len(g.x), 1)], dim=1) for g in some]
    side = sides["nodes.weight"]
    a = torch.stack([rows.T @ rows / len(rows) for rows in x]).mean(dim=0)
    assert_close((side.basis * side.spectrum) @ side.basis.mT, a)


@pytest.mark.parametrize("name", FORMS)
def test_graphs_of_several_batches_are_acquired(name: str) -> None:
    q, batch, forward = setting(name)
    q, pool = q.replace(noise_variance=torch.ones(2)), graphs_of(9)
    how = {"k": 3, "likelihood": "regression", "forward": forward}
    assert torch.equal(ba.acquire(q, [batch(pool[:4]), batch(pool[4:])], **how), ba.acquire(q, [batch(pool)], **how))


def test_calibrated_networks_of_graphs_are_saved_and_loaded(tmp_path):
    q, _, forward = setting("crystals")
    held_out, some = graphs_of(40), graphs_of(5, seed=1)
    y = torch.cat([g.y for g in held_out])
    net = ba.calibrate(q, (held_out, y), likelihood="regression", forward=forward)
    net.save(tmp_path / "net.safetensors")
    again = ba.load(tmp_path / "net.safetensors", copy.deepcopy(q.model), forward=forward)
    assert_close(again(some).novelty, net(some).novelty)
    for example in (some, list(map(vars, some))):
        with pytest.raises(SettingError, match=r"save a \.safetensors, which takes lists of examples"):
            net.save(tmp_path / "net.pt2", example)


def test_forces_need_gradients():
    """A forward that differentiates energies by positions works where it turns gradients on, and is told where not."""
    q, batch, _ = setting("geometric")
    held_out = graphs_of(40)

    def forces(model: nn.Module, data: Any) -> Tensor:
        moved = copy.copy(data)
        moved.x = data.x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(moved).sum(), moved.x)
        return slope.new_zeros(data.num_graphs, 4).index_add(0, data.batch, slope)

    def enabled(model: nn.Module, data: Any) -> Tensor:
        with torch.enable_grad():
            return forces(model, data)

    data = batch(held_out), torch.randn(40, 4)
    with pytest.raises(MatchError, match=r"put it under torch\.enable_grad"):
        ba.calibrate(q, data, likelihood="regression", forward=forces)
    assert ba.calibrate(q, data, likelihood="regression", forward=enabled)(batch(held_out[:3])).mean.shape == (3, 4)
    assert ba.quantise(q, 8, inputs=data[0], forward=enabled).moved


def test_an_example_of_several_rows_is_no_batch():
    """A mapping in a list is a batch; and a forward gives a row for each example, and not for each of its nodes."""
    q, _, _ = setting("mappings")
    some = list(map(vars, graphs_of(20)))

    def by_nodes(model: nn.Module, data: Any) -> Tensor:
        return model.nodes(data[0]["x"]) if isinstance(data, list) else model.nodes(data["x"]).sum(dim=0, keepdim=True)

    for inputs in (some, [some]):
        with pytest.raises(MatchError, match=r"given as a list of them.*\[examples\] or \(examples, targets\)"):
            q.novelty(inputs, reference=some[:1], likelihood="regression", forward=by_nodes)
