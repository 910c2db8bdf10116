"""The documentation is code: every page's Python runs as shown, every command parses, every file and name is there.

The blocks of a page are a script: they run in order, in a fresh interpreter and an empty folder, with what is shown and
nothing else.
"""

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

import bayesadam as ba
from bayesadam.cli import app
from processes import PATIENCE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
# `make science-test` has it.
NEEDS = {"from-the-package-index": "chgnet"}
BLOCK = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One piece of code of a page, with the line it begins at."""

    line: int
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, found.start("text")) + 1, found["language"], found["text"])
        for found in BLOCK.finditer(text)
    ]


def script(page: Path) -> str:
    """The page's Python blocks one after another, each on the lines that it has there."""
    code = ""
    for block in blocks(page):
        if block.language == "python":
            code += "\n" * (block.line - 1 - code.count("\n")) + block.text
    return code


def _contents() -> dict[str, Any]:
    """The pages of each part of the site."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    return {part: pages for entry in config["nav"] for part, pages in entry.items()}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line in a page's unlabelled or shell blocks, and every `bayesadam …` in its prose and tables."""
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("", "sh", "bash", "console"):
                for number, line in enumerate(block.text.replace("\\\n", " ").splitlines()):
                    words = shlex.split(line.removeprefix("$ "), comments=True)
                    if words:
                        yield f"{page.name}:{block.line + number}", words
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for found in re.finditer(r"`((?:bayesadam|bash|make|pytest|python|\.venv-peers/bin/python) [^`]*)`", prose):
            words = shlex.split(found[1].replace("\n", " "))
            if "…" not in found[1]:
                yield f"{page.name}: {found[1]}", words


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=() if page.stem == "README" else pytest.mark.slow)
        for page in PAGES
        if script(page)
    ],
)
def test_every_page_runs_as_it_is_shown(page, tmp_path):
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    (tmp_path / "page.py").write_text(script(page), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": PATIENCE}
    done = subprocess.run([sys.executable, "page.py"], check=False, **run)
    assert done.returncode == 0, done.stderr
    # Which probabilities the held-out data prefer is for them to say; any other warning of ours is a fault of the page.
    assert "BayesAdamWarning: " not in done.stderr


# A page of a use, and the lines of code that it may begin with.
USES, MOST = "Tasks", 12


@pytest.mark.parametrize("name", [name for entry in _contents()[USES] for name in entry.values()])
def test_a_use_begins_with_its_code(name):
    """Title, a sentence or two, then a few lines that show the use; all else comes after them."""
    first = blocks(DOCS / name)[0]
    assert first.line <= 8
    assert len([line for line in first.text.splitlines() if line and not line.startswith("#")]) <= MOST


@pytest.mark.parametrize(("where", "words"), [pytest.param(*c, id=c[0]) for c in commands()])
def test_every_command_is_one(where, words):
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE) for word in words[1:] if "=" not in word)
    elif words[0] == "bayesadam":
        _parse(words[1:])
    elif words[0].endswith("python"):
        # A file, a benchmark, whose harness has the options that all share, or a package.
        path = ROOT / (words[2].replace(".", "/") if words[1] == "-m" else words[1])
        shared = ROOT / "benchmarks" / "common" / "harness.py"
        files = list(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py"), shared]
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        options = [word for word in words[2:] if word.startswith("--")]
        # typer names an option by its parameter.
        assert all(f'"{word}"' in text or f"{word[2:].replace('-', '_')}: " in text for word in options)
    elif words[0] == "pytest":
        assert all((ROOT / word).exists() for word in words[1:] if not word.startswith("-"))
    else:
        assert words[0] in ("pip", "torchrun", "bash"), f"{where}: what is {words[0]}?"


def _parse(words: list[str]) -> None:
    """Parse as the command line would, and stop before anything is done."""
    command, context = typer.main.get_command(app), None
    while isinstance(command, TyperGroup):
        if not words or words[0] in ("--help", "--version", "--install-completion"):
            return
        context = command.make_context(command.name, list(words), parent=context)
        _, command, words = command.resolve_command(context, list(words))
    # Of a bare name in prose, such as `bayesadam prune`, the arguments are left to the reader.
    command.make_context(command.name, list(words), resilient_parsing=not words)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((DOCS / "developer").glob("*.md"))], ids=lambda page: page.stem
)
def test_every_file_named_is_there(page):
    # But for the files that a reader is to write.
    text = re.sub(r"^```py\n# src/.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"\b(?:benchmarks|contrib|examples|tests|src|docs)/[\w/.]+\.(?:py|sh|md)\b", text):
        assert "NAME" in name or (ROOT / name).is_file(), name
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (page.parent / name).is_file(), name


def test_the_sites_contents_are_its_pages():
    """The generator does not tell of a page without an entry, nor of an entry without a page."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def listed(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from listed(value)
        elif isinstance(entry, list):
            for value in entry:
                yield from listed(value)

    found = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "results"}
    assert sorted(listed(config["nav"])) == sorted(found)
    for name in (*config["extra_css"], config["theme"]["logo"], config["theme"]["favicon"]):
        assert (DOCS / name).is_file()


def _resolved(path: str) -> object:
    """The module or object of a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(_resolved(module), name)


_ENTRY = r"^::: (?!bayesadam\.(?:trainers|botorch\.model)\.)([\w.]+)\n((?:    .*\n)*)"


def _reference() -> dict[str, list[str]]:
    """What the pages of the reference show, by its path, with the members that are named.

    The trainers' callbacks, which need half a minute of imports, and BoTorch's model, which needs BoTorch, are left to
    the site's builder, which fails without them.
    """
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    found = {}
    for entry in re.finditer(_ENTRY, text + "\n", re.MULTILINE):
        options = (yaml.safe_load(entry[2]) or {}).get("options", {})
        found[entry[1]] = options.get("members") or []
    return found


def _public(module: ModuleType) -> list[str]:
    own = [name for name, member in vars(module).items() if getattr(member, "__module__", "") == module.__name__]
    return list(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


PUBLIC = ("bayesadam", *(f"bayesadam.{name}" for name in ba.__all__ if isinstance(getattr(ba, name), ModuleType)))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module):
    """As an entry of its own, under whatever path, or with its module; constants by name."""
    entries = [_resolved(path) for path in _reference()]
    modules = {entry.__name__ for entry in entries if isinstance(entry, ModuleType)}
    told = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    for name in _public(_resolved(module)):
        member = getattr(_resolved(module), name)
        assert (
            isinstance(member, ModuleType)
            or any(member is entry for entry in entries)
            or getattr(member, "__module__", None) in modules
            or re.search(rf"`(?:{re.escape(module)}\.)?{name}`", told)
        ), name


def test_the_reference_names_what_is_there():
    """Members are listed by hand, constructors first; one that is gone would vanish without a word."""
    listed = _reference()
    for path, members in listed.items():
        assert not [member for member in members if not hasattr(_resolved(path), member)], path


def test_formulas_become_mathml(monkeypatch):
    """Both notations, and no code; needs what `make docs` installs."""
    pytest.importorskip("latex2mathml")
    markdown = pytest.importorskip("markdown")
    monkeypatch.syspath_prepend(str(DOCS / "theme"))
    monkeypatch.delitem(sys.modules, "maths", raising=False)
    for text, formulas in (
        ("a $x^2$ b", 1),
        (":math:`\\mathcal N`", 1),
        (".. math::\n    a &= b \\\\\n    c &= d\n\nend", 1),
        ("$$\na\n$$", 1),
        ("```\n$$\na\n$$\n.. math::\n```\n\n`$x$` and 5 $ and 6 $ more", 0),
    ):
        html = markdown.markdown(text, extensions=["maths", "fenced_code"])
        assert html.count("<math") == formulas, text
        assert ("<p>end</p>" in html) == ("end" in text)
