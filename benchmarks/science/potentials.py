"""Potentials of the package index, CHGNet and SevenNet: pruned, odd structures told, sizes mixed.

    python -m benchmarks.science.potentials chgnet|sevennet [--quick] [--questions pruned odd sizes] [--out out/bench]

No setting is chosen by what it reports but the kinds of crystals that condition, see the README.

- pruned: |E − E'| in meV an atom, over elemental crystals and compounds that condition nothing. Matrices of layers are
  pruned, without the embedding; "Wanda from the state" scores |w_ij| (Σ_i v̂_ij Σ_j v̂_ij)^¼; "permuted" has the second
  moments of each matrix in random order. SevenNet's layers, e3nn's, keep their matrices in one vector: none of them is
  conditioned.
- odd, of CHGNet: AUROC of scores, by set, against ordinary compounds, with standard errors by bootstrap.
- sizes, of CHGNet: novelty of five crystals of five sizes in one batch, one by one, in another order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from ase import Atoms
from ase.build import bulk
from ase.data import chemical_symbols
from torch import Tensor, nn

import bayesadam as ba
from bayesadam import scores
from benchmarks.common.harness import arguments, at_most, setting, write_results
from benchmarks.science.crystals import conditioning, elements, geometry, odd, ordinary

FRACTIONS, RANKINGS = (0.1, 0.25, 0.5, 0.75, 0.9), ("snr", "between", "saliency", "magnitude")
QUESTIONS = ("pruned", "odd", "sizes")
N_DATA = 1_580_395  # structures of MPtrj
Crystal = tuple[Atoms, Any]  # with its graph
Score = Callable[[Sequence[Crystal]], Tensor]


@dataclass(frozen=True, eq=False)
class Potential:
    """A network with the posterior of the Adam state that its wheel ships.

    `graph` is of a crystal, as the network takes it, `energy(model, graphs)` in eV an atom, (crystals, 1); `matrices`
    gives views of those that a tensor of a parameter's shape holds, by the parameter's name. `trained` are symbols of
    the elements of the training data, `rest` parameters that are never pruned.
    """

    posterior: ba.Posterior
    graph: Callable[[Atoms], Any]
    energy: Callable[[nn.Module, Sequence[Any]], Tensor]
    matrices: Callable[[str, Tensor], list[Tensor]]
    trained: list[str]
    rest: list[str]

    @torch.no_grad()
    def energies(self, model: nn.Module, graphs: Sequence[Any]) -> Tensor:
        """eV an atom, of any number of crystals."""
        return torch.cat([self.energy(model, graphs[i : i + 24]) for i in range(0, len(graphs), 24)]).flatten()


def chgnet_of(version: str = "0.3.0") -> Potential:
    """CHGNet, of layers of torch."""
    import chgnet
    from chgnet.model import CHGNet
    from pymatgen.io.ase import AseAtomsAdaptor

    model = CHGNet.load(model_name=version, use_device="cpu", verbose=False).eval()
    (path,) = (Path(chgnet.__file__).parent / "pretrained" / version).glob("*.tar")
    q = ba.Posterior.from_checkpoint(path, model, n_data=N_DATA, likelihood="regression")
    seen = q.curvature.second_moment["atom_embedding.embedding.weight"].any(dim=1).tolist()
    return Potential(
        q,
        lambda atoms: model.graph_converter(AseAtomsAdaptor.get_structure(atoms)),
        lambda model, graphs: model(graphs)["e"][:, None],
        lambda name, x: [x] if x.dim() == 2 else [],
        [chemical_symbols[z + 1] for z in range(94) if seen[z]],
        ["embeddings", *(name for name, w in q.mode.items() if w.dim() < 2)],
    )


def sevennet_of(version: str = "SevenNet_0__11Jul2024") -> Potential:
    """SevenNet, of e3nn's layers, without its forces."""
    import sevenn
    from sevenn.atom_graph_data import AtomGraphData
    from sevenn.checkpoint import SevenNetCheckpoint
    from sevenn.train.dataload import unlabeled_atoms_to_graph
    from torch_geometric.data import Batch

    (path,) = (Path(sevenn.__file__).parent / "pretrained_potentials" / version).glob("*.pth")
    model = SevenNetCheckpoint(path).build_model().eval()
    model.set_is_batch_data(True)
    model.delete_module_by_key("force_output")

    def energy(model: nn.Module, graphs: Sequence[Any]) -> Tensor:
        out = model(Batch.from_data_list(list(graphs)))
        return (out["inferred_total_energy"] / out["num_atoms"])[:, None]  # type: ignore[no-any-return]

    def matrices(name: str, x: Tensor) -> list[Tensor]:
        layer: Any = model.get_submodule(name.rpartition(".")[0])
        return list(layer.weight_views(x)) if hasattr(layer, "weight_views") else [x] if x.dim() == 2 else []

    return Potential(
        ba.Posterior.from_checkpoint(path, model, n_data=N_DATA, likelihood="regression"),
        lambda atoms: AtomGraphData.from_numpy_dict(unlabeled_atoms_to_graph(atoms, model.cutoff)),
        energy,
        matrices,
        [chemical_symbols[z] for z in sorted(model.type_map)],
        ["edge_embedding.*", "onehot_to_feature_x.*"],
    )


def only(crystals: Sequence[Crystal]) -> list[Any]:
    """Their graphs."""
    return [graph for _, graph in crystals]


def permuted(q: ba.Posterior) -> ba.Posterior:
    """Of the second moments of each parameter in random order."""
    g, moments = torch.Generator().manual_seed(0), q.curvature.second_moment
    v = {n: v.flatten()[torch.randperm(v.numel(), generator=g)].view_as(v) for n, v in moments.items()}
    return ba.Posterior.from_second_moment(q.model, v, N_DATA, "regression", mean=q.mode)


def from_rows_and_columns(potential: Potential) -> dict[str, Tensor]:
    """ "Wanda from the state", |w_ij| (Σ_i v̂_ij Σ_j v̂_ij)^¼ of every matrix; 0 of what is none."""
    q, ranking = potential.posterior, dict[str, Tensor]()
    for name, v in q.curvature.second_moment.items():
        ranking[name] = torch.zeros_like(v)
        for part, of_v in zip(potential.matrices(name, ranking[name]), potential.matrices(name, v), strict=True):
            part.copy_((of_v.sum(dim=0) * of_v.sum(dim=1, keepdim=True)).pow(0.25))
        ranking[name] *= q.mode[name].abs()
    return ranking


def pruned(potential: Potential, sets: dict[str, list[Crystal]], inputs: list[Any], quick: bool) -> dict[str, Any]:
    """meV an atom moved, by method, set and fraction, and the crystals that move most."""
    q, rest = potential.posterior, {"exclude": potential.rest}
    before = {which: potential.energies(q.model, only(crystals)) for which, crystals in sets.items()}
    methods: dict[str, tuple[ba.Posterior, dict[str, Any]]] = {by: (q, {"ranking": by, **rest}) for by in RANKINGS}
    methods["Wanda from the state"] = q, {"ranking": from_rows_and_columns(potential), **rest}
    methods["permuted"] = permuted(q), rest
    if any(isinstance(layer, nn.Linear) for layer in q.model.modules()):
        methods["conditioned"] = q, {"inputs": inputs, "forward": potential.energy, "rounds": 4}
    rows: dict[str, Any] = {}
    for name, (posterior, how) in methods.items():
        for fraction in (0.5,) if quick else FRACTIONS:
            began, worst = time.process_time(), dict[str, int]()
            small = ba.prune(posterior, fraction, **how).model
            told = f"{time.process_time() - began:5.1f} s"
            row = rows.setdefault(name, {}).setdefault(fraction, {})
            for which, crystals in sets.items():
                moved = 1000 * (potential.energies(small, only(crystals)) - before[which]).abs()
                row[which] = float(moved.mean()), float(moved.median())
                worst |= {crystals[i][0].get_chemical_formula(): round(float(moved[i])) for i in moved.topk(3).indices}
                told += f"  {which} {row[which][0]:7.1f} (median {row[which][1]:6.1f})"
            print(f"{name:22}{fraction:5} {told}  worst {worst}", flush=True)
    return rows


def auroc(inside: Tensor, outside: Tensor, draws: int = 300) -> tuple[float, float]:
    """AUROC, and its standard error by bootstrap of both sets."""
    g = torch.Generator().manual_seed(0)
    again = [[t[torch.randint(len(t), (len(t),), generator=g)] for t in (inside, outside)] for _ in range(draws)]
    return scores.auroc(inside, outside), statistics.stdev(scores.auroc(*both) for both in again)


def jacobian_variances(potential: Potential, variances: Mapping[str, Any], graph: Any) -> dict[str, float]:
    """J Σ Jᵀ of a crystal by one backward pass, for some Σ by name, which is what `predict` gives.

    `predict` first finds out whose gradients layer by layer, which takes a minute of this network.
    """
    model, names = potential.posterior.model, list(potential.posterior.mode)
    energy = potential.energy(model, [graph]).sum()
    grads = torch.autograd.grad(energy, [model.get_parameter(name) for name in names], allow_unused=True)
    squares = {name: g.square() for name, g in zip(names, grads, strict=True) if g is not None}
    return {title: sum(float((g * v[name]).sum()) for name, g in squares.items()) for title, v in variances.items()}


def odd_scores(potential: Potential, inputs: list[Any]) -> dict[str, Score]:
    """What may tell odd crystals, controls last."""
    q, energy, energies = potential.posterior, potential.energy, potential.energies
    other = chgnet_of("0.2.0").posterior.model
    flat = {name: torch.ones_like(w) for name, w in q.mode.items()}
    variances = {"JΣJᵀ": q.variance, "|J|²": flat, "JΣJᵀ, v̂ permuted": permuted(q).variance}
    spreads = cache(partial(jacobian_variances, potential, variances))
    net = ba.calibrate(q, (inputs, energies(other, inputs)[:, None]), forward=energy)

    of_graphs: dict[str, Callable[[list[Any]], Tensor]] = {
        "novelty, inputs": lambda graphs: net(graphs).novelty,
        "novelty, 20 crystals": lambda graphs: q.novelty(graphs, reference=inputs[::5][:20], forward=energy),
        **{name: lambda graphs, n=name: torch.tensor([spreads(graph)[n] for graph in graphs]) for name in variances},
        "two versions apart": lambda graphs: (energies(q.model, graphs) - energies(other, graphs)).abs(),
    }
    of_crystals = {name: lambda some, f=f: f(only(some)).detach().flatten() for name, f in of_graphs.items()}
    return of_crystals | {"smallest distance": lambda some: torch.tensor([geometry(atoms) for atoms, _ in some])}


def main() -> None:
    parser = arguments(__doc__, quick="half pruned and a few crystals")
    parser.add_argument("potential", choices=("chgnet", "sevennet"))
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    options = parser.parse_args()
    potential = chgnet_of() if options.potential == "chgnet" else sevennet_of()
    trained, questions = potential.trained, options.questions if options.potential == "chgnet" else ["pruned"]
    untrained = [symbol for symbol in chemical_symbols[1:95] if symbol not in trained]

    def graphed(crystals: list[Atoms], quick_step: int = 12) -> list[Crystal]:
        return [(atoms, potential.graph(atoms)) for atoms in crystals[:: quick_step if options.quick else 1]]

    inputs, usual = only(graphed(conditioning(trained), 3)), graphed(ordinary())
    metals = graphed(elements(trained))
    print(f"{len(inputs)} inputs, {len(metals)} elements, {len(usual)} compounds; never trained on: {untrained}")
    results: dict[str, Any] = {"settings": {**setting(), "inputs": len(inputs)}}
    if "odd" in questions:
        scored, rows = odd_scores(potential, inputs), results.setdefault("odd", {})
        sets = {name: graphed(crystals) for name, crystals in odd(untrained).items()}
        for name, score in scored.items():
            inside = score(usual)
            rows[name] = {which: auroc(inside, score(some)) for which, some in sets.items()}
            print(f"{name:26}", *(f"{which} {a:.2f} ± {e:.2f} " for which, (a, e) in rows[name].items()), flush=True)
        deviation = 1000 * scored["JΣJᵀ"](usual).sqrt()
        print(f"√(JΣJᵀ) of ordinary compounds: {deviation.median():.0f} meV an atom (median)")
    if "sizes" in questions:
        five = only(graphed([bulk("Cu").repeat((n, 1, 1)) for n in (1, 2, 3, 5, 8)], 1))
        novelty = partial(potential.posterior.novelty, reference=inputs[:20], forward=potential.energy)
        together, alone = novelty(five), torch.cat([novelty([graph]) for graph in five])
        apart = max(float((other / together - 1).abs().max()) for other in (alone, novelty(five[::-1]).flip(0)))
        results["sizes"] = [*map(vars, at_most("novelty of five sizes, the largest difference", 1e-6, apart))]
    if "pruned" in questions:
        sets = {"elements": metals, "compounds": usual}
        results["pruned"] = rows = pruned(potential, sets, inputs, options.quick)
        if "conditioned" in rows:
            moved = rows["conditioned"][0.5]["elements"][0]
            results["targets"] = [*map(vars, at_most("half pruned with crystals, meV an atom", 10, moved))]
    write_results(options.out, options.potential, results)


if __name__ == "__main__":
    main()
