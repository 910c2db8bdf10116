"""What a release says about itself agrees with the package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import bayesadam

ROOT = Path(__file__).parents[1]


def test_the_citation_names_this_version_and_the_papers_authors():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == bayesadam.__version__
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Kessler", "Salas", "Tan", "Zohren", "Roberts"]


def test_the_workflow_runs_targets_that_there_are_on_the_pythons_that_are_promised():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]["make"]["strategy"]
    matrix = matrix["matrix"]
    assert matrix["python"] == promised
    assert project["requires-python"] == f">={promised[0]}"
    targets = set(matrix["target"]) | {extra["target"] for extra in matrix["include"]}
    assert targets >= {"check", "test-all", "docs", "build"}
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.slow
def test_what_a_release_is_tried_with_runs_without_the_tests_around_it():
    script = ROOT / "tests" / "smoke.py"
    done = subprocess.run([sys.executable, "-I", str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"bayesadam {bayesadam.__version__}")
