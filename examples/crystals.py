"""A potential from the package index, without its data: what its state knows, a smaller one, odd crystals.

`pip install chgnet`, then `python examples/crystals.py`.
"""

from pathlib import Path

import chgnet
import torch
from ase import Atoms
from ase.build import bulk
from chgnet.model import CHGNet
from pymatgen.io.ase import AseAtomsAdaptor
from torch import Tensor, nn

import bayesadam as ba

model = CHGNet.load(use_device="cpu", verbose=False).eval()
(path,) = Path(chgnet.__file__).parent.glob("pretrained/0.3.0/*.tar")
print(ba.inspect(path))
posterior = ba.Posterior.from_checkpoint(path, model, n_data=1_580_395, likelihood="regression")


def energy(network: nn.Module, crystals: list[Atoms]) -> Tensor:
    """In eV an atom, a row for each crystal."""
    graphs = [model.graph_converter(AseAtomsAdaptor.get_structure(atoms)) for atoms in crystals]
    return network(graphs)["e"][:, None]


def salts(cations: str, anions: str) -> list[Atoms]:
    """Rocksalt at the distance of the ions, atoms moved by .05 Å as in a real one."""
    found = [bulk(x + y, "rocksalt", a=5.2) for x in cations.split() for y in anions.split()]
    for number, atoms in enumerate(found):
        atoms.rattle(0.05, seed=number)
    return found


given, others = salts("Li Na Mg Ca Mn Fe Ni Zn", "O S Cl"), salts("K Sr Ti Co", "O S Cl")
rest = ["embeddings", "site_wise*", *(name for name, w in posterior.mode.items() if w.dim() < 2)]
smaller = {
    "without data": ba.prune(posterior, 0.25, exclude=rest),
    f"given {len(given)} salts": ba.prune(posterior, 0.25, inputs=given, forward=energy, rounds=2),
}
for name, small in smaller.items():
    with torch.no_grad():
        moved = 1000 * (energy(small.model, others) - energy(model, others)).abs()
    print(f"a quarter pruned {name}: energies of other salts move by {moved.mean():.1f} meV an atom")

weights, doubts = [model.get_parameter(name) for name in posterior.variance], []
for name, a in {"NaCl": 5.64, "NaCl, squeezed": 4.2, "RaS": 6.58}.items():
    crystal = bulk(name.partition(",")[0], "rocksalt", a=a)
    grads = torch.autograd.grad(energy(model, [crystal]).sum(), weights, allow_unused=True)
    pairs = zip(grads, posterior.variance.values(), strict=True)
    doubts.append(sum(float((g.square() * v).sum()) for g, v in pairs if g is not None) ** 0.5)
    print(f"{name}: {doubts[-1] / doubts[0]:.1f} times the doubt")
