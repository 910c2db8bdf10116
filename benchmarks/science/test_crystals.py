"""Crystals that condition are none of those reported; `make science-test` has ase."""

import numpy as np
import pytest

pytest.importorskip("ase")

from ase.build import bulk
from ase.data import chemical_symbols
from ase.neighborlist import neighbor_list

from benchmarks.science.crystals import conditioning, elements, geometry, odd, ordinary

UNTRAINED = ("Po", "At", "Rn", "Fr", "Ra")
TRAINED = [symbol for symbol in chemical_symbols[1:95] if symbol not in UNTRAINED]


def kind(atoms):
    """Formula and mean number of nearest neighbours."""
    apart = neighbor_list("d", atoms, 4.0)
    return atoms.get_chemical_formula(), round((apart < 1.2 * apart.min()).sum() / len(atoms))


def test_no_crystal_reported_is_among_those_that_condition():
    inputs = conditioning(TRAINED)
    assert all(len(set(atoms.symbols)) > 1 for atoms in inputs)
    formulas = {atoms.get_chemical_formula() for atoms in ordinary()}
    alike = [atoms for atoms in inputs if atoms.get_chemical_formula() in formulas]
    assert not {kind(atoms) for atoms in alike} & {kind(atoms) for atoms in ordinary()}
    assert len(elements(TRAINED)) > 60
    assert not {s for atoms in (*inputs, *ordinary(), *elements(TRAINED)) for s in atoms.symbols} & {*UNTRAINED}


def test_odd_crystals_are_what_their_sets_say():
    sets = odd(UNTRAINED)
    pairs = zip(sets["compressed to 70 % of the volume"], ordinary(), strict=True)
    ratios = [a.get_volume() / b.get_volume() for a, b in pairs]
    np.testing.assert_allclose(ratios, 0.7)
    assert all({*atoms.symbols} & {*UNTRAINED} for atoms in sets["elements never trained on"])
    np.testing.assert_allclose([geometry(atoms) for atoms in sets["dimers"]], -1)


def test_geometry_is_the_smallest_distance_over_radii():
    np.testing.assert_allclose(geometry(bulk("NaCl", "rocksalt", a=5.64)), -5.64 / 2 / (1.66 + 1.02))
