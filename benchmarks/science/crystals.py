"""Crystals by ase alone: elements, compounds at the distances that covalent radii give, and what is odd."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import product

import numpy as np
from ase import Atoms
from ase.build import bulk
from ase.data import atomic_numbers, covalent_radii


def radii(*symbols: str) -> float:
    """The sum of covalent radii, in Å."""
    return float(sum(covalent_radii[atomic_numbers[symbol]] for symbol in symbols))


def pair(x: str, y: str, kind: str) -> Atoms:
    """A compound of two elements at the distance that covalent radii give."""
    return bulk(x + y, kind, a=radii(x, y) * {"rocksalt": 2, "zincblende": 4 / 3**0.5}[kind])


def perovskite(a: str, b: str, x: str) -> Atoms:
    """ABX₃, cubic."""
    places = [(0, 0, 0), (0.5, 0.5, 0.5), (0.5, 0.5, 0), (0.5, 0, 0.5), (0, 0.5, 0.5)]
    edge = 1.74 * radii(b, x)
    return Atoms([a, b, x, x, x], scaled_positions=places, cell=[edge] * 3, pbc=True)


def strained(atoms: Atoms, volume: float) -> Atoms:
    """The same at another volume."""
    new: Atoms = atoms.copy()
    new.set_cell(new.cell * volume ** (1 / 3), scale_atoms=True)
    return new


def elements(trained: Sequence[str]) -> list[Atoms]:
    """The elemental crystals that ase knows the structure of."""
    made = []
    for symbol in trained:
        # Some are molecules, or have no reference state.
        with suppress(ValueError, KeyError, RuntimeError, NotImplementedError):
            made.append(bulk(symbol))
    return made


def conditioning(trained: Sequence[str]) -> list[Atoms]:
    """192 compounds, moved by .05 Å and up to 3 % of the volume, none of them an element.

    Of every third element a salt, rocksalt or zincblende; 20 perovskites; and of each element that crystallises
    ordered alloys with the next one and the third, half and half, on the lattice of the first.
    """
    anions, rng = ("O", "S", "F", "Cl", "N", "Se", "P", "Br"), random.Random(0)
    made = [perovskite(*names, "O") for names in product(("Li", "Rb", "Cs", "Mg", "Y"), ("V", "Mn", "Sn", "Ta"))]
    for i, x in enumerate(trained[::3]):
        y = anions[i % 8] if x != anions[i % 8] else "Mg"
        made.append(pair(x, y, ("rocksalt", "zincblende")[i // 8 % 2]))
    for step, atoms in [(step, atoms) for step in (1, 3) for atoms in elements(trained)]:
        alloy = atoms if len(atoms) > 1 else atoms.repeat((1, 1, 2))
        alloy.symbols[len(alloy) // 2 :] = trained[(trained.index(str(alloy.symbols[0])) + step) % len(trained)]
        made.append(alloy)
    made = [strained(atoms, 1 + rng.uniform(-0.03, 0.03)) for atoms in made]
    for atoms in made:
        atoms.rattle(0.05, seed=rng.randrange(10**6))
    return made


def perovskites(order: tuple[int, int, int] = (0, 1, 2)) -> list[Atoms]:
    """24 of them; in another order A, B and X change places, in the cell of the right one."""
    made = []
    for names in product(("Ca", "Sr", "Ba", "La", "K", "Na"), ("Ti", "Zr", "Nb", "Fe"), ("O",)):
        atoms, (a, b, x) = perovskite(*names), (names[i] for i in order)
        atoms.symbols = [a, b, x, x, x]
        made.append(atoms)
    return made


def ordinary() -> list[Atoms]:
    """48 compounds of elements that were trained on, none of which conditions anything."""
    salts = [pair(x, y, "rocksalt") for x, y in product(("Na", "Mg", "Ca", "Sr"), ("O", "S", "Se"))]
    semiconductors = [pair(x, y, "zincblende") for x, y in product(("Al", "Ga", "In"), ("N", "P", "As", "Sb"))]
    return salts + semiconductors + perovskites()


def odd(untrained: Sequence[str]) -> dict[str, list[Atoms]]:
    """What an ordinary crystal is not, by set."""
    some = list(product(("Na", "Mg", "Al", "Ti", "Fe", "Si"), ("O", "S", "F", "Cl")))
    return {
        "compressed to 70 % of the volume": [strained(atoms, 0.7) for atoms in ordinary()],
        "species swapped": perovskites((2, 1, 0)) + perovskites((1, 2, 0)),
        "elements never trained on": [pair(x, y, "rocksalt") for x, y in product(untrained, ("O", "S", "F", "Cl"))],
        "dimers": [Atoms([x, y], [(0, 0, 0), (0, 0, radii(x, y))], cell=[12] * 3, pbc=True) for x, y in some],
    }


def geometry(atoms: Atoms) -> float:
    """Minus the smallest distance between atoms, relative to the sum of their covalent radii."""
    many = atoms.repeat(2)
    names = many.get_chemical_symbols()
    apart = many.get_all_distances(mic=True) / [[radii(a, b) for b in names] for a in names]
    return -float(apart[~np.eye(len(many), dtype=bool)].min())
