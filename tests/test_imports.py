"""What may import what: the library from outside, and its floors from each other."""

import ast
import importlib
import importlib.util
import re
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest

import bayesadam
from bayesadam._extras import EXTRA_OF, require
from bayesadam.errors import MissingExtraError
from processes import run_python

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"

# Everything is refused but the standard library, safetensors, numpy, torch and what `import torch` alone brings.
BARE = """
import sys
started = set(sys.modules)
import bayesadam
print({name.partition(".")[0] for name in {*sys.modules} - started} - {*sys.stdlib_module_names})
import torch
allowed = {name.partition(".")[0] for name in sys.modules} | set(sys.stdlib_module_names)
allowed |= {"numpy", "safetensors"}
refused = []

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            refused.append(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""


def modules() -> dict[str, Path]:
    package = SOURCE / "bayesadam"
    return {str(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}


def test_the_library_needs_torch_numpy_and_safetensors_only():
    # A refusal that was caught counts too: what is optional is asked for when it is needed, not on import.
    done = run_python(BARE + "from bayesadam import *\nprint(Posterior.__name__, refused)\nimport bayesadam.cli")
    # And torch is imported with the first name, not before.
    assert done.stdout == "{'bayesadam'}\nPosterior []\n", done.stderr
    # The refusal is real.
    assert done.returncode == 1
    assert "No module named 'typer'" in done.stderr


def public_modules() -> list[str]:
    parts = [Path(relative.removesuffix("/__init__.py")).with_suffix("").parts for relative in modules()]
    return [".".join(("bayesadam", *path)) for path in parts if not any(part.startswith("_") for part in path)]


def test_every_public_module_is_what_its_name_gives():
    # Those of other packages take long to import, and hide behind no function.
    for name in public_modules():
        if name.startswith(("bayesadam.trainers.", "bayesadam.botorch.")):
            continue
        module = importlib.import_module(name)
        # As `import a.b.c as x` finds it: a function of the same name, imported by the parent, would come instead.
        assert reduce(getattr, name.split(".")[1:], bayesadam) is module, name


def test_no_public_name_is_a_function_and_a_module():
    assert {"bayesadam.calibrated", "bayesadam.compress", "bayesadam.diagnosis"} <= set(public_modules())
    for name in bayesadam.__all__:
        is_module = f"bayesadam.{name}" in public_modules()
        assert isinstance(getattr(bayesadam, name), ModuleType) == is_module, name


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'bayesadam' has no attribute 'Posteriour'"):
        _ = bayesadam.Posteriour
    assert not hasattr(bayesadam, "__wrapped__")
    assert set(bayesadam.__all__) <= set(dir(bayesadam))
    assert bayesadam.__all__ == sorted(bayesadam.__all__)


@pytest.mark.parametrize(("package", "extra"), EXTRA_OF.items())
def test_a_missing_package_names_its_extra(package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    target = f"bayesadam[{extra}]" if extra else "bayesadam"
    for module in (package, f"{package}.inner"):
        with pytest.raises(MissingExtraError, match=re.escape(f"pip install '{target}'")) as caught:
            require(module)
        assert caught.value.name == package


def test_a_package_that_is_there_but_broken_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_inside.py").write_text("import not_to_be_found_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_to_be_found_anywhere") as caught:
        require("broken_inside")
    assert not isinstance(caught.value, MissingExtraError)


def test_extras_agree_with_the_packaging():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.match(r"[\w-]+", requirement).group() for requirement in requirements}

    imported = {"scikit-learn": "sklearn", "torch-pruning": "torch_pruning"}
    declared = {
        imported.get(name, name): extra
        for extra, requirements in project["optional-dependencies"].items()
        if extra not in ("dev", "docs")
        for name in names(requirements)
    }
    library = {"torch", "numpy", "safetensors"}
    declared |= dict.fromkeys(names(project["dependencies"]) - library)
    assert declared == EXTRA_OF


# Lowest first; "" is the package's own __init__. A module may import from floors below its own, and from itself.
FLOORS = (
    {"errors", "_version"},
    {"_alone", "_checks", "_extras", "_files", "_options", "_progress", "_shards", "_tables", "_warnings"},
    {"_schema"},
    {"_storage"},
    {"readers"},
    {"likelihoods", "weights"},
    {"engine", "lora", "predict"},
    {"weights.posterior"},
    {"weights.mixture"},
    {"compress"},
    {"calibrated", "diagnosis", "merging", "optim"},
    {"anchoring", "inspecting", "monitoring", "scores"},
    {"acquiring", "auditing"},
    {"bandits", "sklearn", "trainers"},
    {"botorch"},
    {"_public"},
    {""},
    {"cli"},
    {"__main__"},
)
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}


def imports(tree: ast.AST, package: str) -> set[str]:
    """The parts of bayesadam that a module imports, anywhere in it; "" for names of the package itself."""
    found = set()
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            # `from bayesadam import readers` is the floor; `from bayesadam import Posterior` is the package.
            targets = [f"{origin}.{alias.name}" for alias in node.names] if origin == "bayesadam" else [origin]
        for target in targets:
            root, _, rest = target.partition(".")
            if root == "bayesadam":
                part = part_of(rest.replace(".", "/"))
                found.add(part if part in FLOOR else "")
    return found


def part_of(relative: str) -> str:
    """The part that a module belongs to, by its path in the package; some modules are on floors of their own."""
    parts = relative.removesuffix(".py").split("/")
    whole = ".".join(parts[:2])
    return whole if whole in FLOOR else parts[0].removesuffix("__init__")


def test_no_floor_imports_a_higher_one():
    for relative, path in modules().items():
        part = part_of(relative)
        assert part in FLOOR, f"{relative} has no floor: give it one in FLOORS"
        package = ".".join(path.relative_to(SOURCE).parts[:-1])
        found = imports(ast.parse(path.read_text(encoding="utf-8")), package) - {part}
        above = sorted(other or "bayesadam itself" for other in found if FLOOR[other] >= FLOOR[part])
        assert not above, f"{relative} is on floor {FLOOR[part]} and imports {above} from its own floor or above"
