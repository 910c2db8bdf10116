"""The documentation is code: every Python block runs, every command parses, every file named is there.

The blocks of a page run in order, in one namespace and in an empty folder. What a page needs and does not show stands in it as a
comment, `<!-- example … -->`, and runs in its place; a block behind `<!-- not run: reason -->` is compiled only.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType

import pytest
import torch
import typer
import yaml
from typer.core import TyperGroup

import bayesadam as ba
from bayesadam.cli import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(
    r"^<!-- example\n(?P<hidden>.*?)^-->$"
    r"|(?:^<!-- not run: (?P<reason>[^\n]*) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<shown>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# What the README's examples take as given, in the words of its reader: a model in training, data, a checkpoint.
README_SETUP = """
import torch
from functools import partial
from lightning.pytorch import LightningModule, Trainer as LightningTrainer
from pathlib import Path
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

def build():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = build()

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, _):
        pass

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

x = torch.randn(80, 4)
y = (x[:, 0] > 0).long()
train_loader = val_loader = DataLoader(TensorDataset(x, y), batch_size=40)
model, module = build(), Module()
x_new, context, reward = x, torch.zeros(20), 1.0
Trainer = partial(LightningTrainer, accelerator="cpu", logger=False, enable_progress_bar=False,
                  enable_model_summary=False, enable_checkpointing=False, default_root_dir=".")

def trained(model, optimizer=None):
    model = model.train()
    if optimizer is None or optimizer.param_groups[0]["params"][0] is not next(model.parameters()):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer

Path("run").mkdir()
for name in ("last.pt", "checkpoint-500"):
    torch.save({"model": model.state_dict(), "optimizer": trained(model).state_dict()}, f"run/{name}")
"""


@dataclass(frozen=True)
class Block:
    """One piece of a page, with the line it begins at; `reason` where it is not run."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None = None

    def compiled(self) -> CodeType:
        """Its code, with the page's own line numbers in a traceback; dots on a line of their own stand for training."""
        text = re.sub(
            r"^\.\.\.$", "optimizer = trained(model, globals().get('optimizer'))", self.text, flags=re.MULTILINE
        )
        return compile("\n" * (self.line - 1) + text, str(self.page), "exec")


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        group = "shown" if found["hidden"] is None else "hidden"
        line = text.count("\n", 0, found.start(group)) + 1
        yield Block(
            page, line, found["language"] or ("python" if group == "hidden" else ""), found[group], found["reason"]
        )


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
        for found in re.finditer(r"`((?:bayesadam|make|pytest|python|\.venv-peers/bin/python) [^`]*)`", prose):
            words = shlex.split(found[1].replace("\n", " "))
            if "…" not in found[1]:
                yield f"{page.name}: {found[1]}", words


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny networks gain nothing from a second thread, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Which probabilities made-up data prefer is no matter of the page.
@pytest.mark.filterwarnings("ignore::bayesadam.errors.UnusedPosteriorWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_example_runs(page, tmp_path, monkeypatch):
    """In order, one namespace a page; what may not run is compiled, and says why."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem.replace('-', '_')}"}
    if page.name == "README.md":
        exec(README_SETUP, namespace)
        # Twenty thousand epochs are the default there.
        monkeypatch.setattr(ba.methods, "fit", partial(ba.methods.fit, epochs=5))
    try:
        for block in blocks(page):
            if block.language == "python":
                code = block.compiled()
                if page.name == "README.md" and "fully_shard(" in block.text:
                    _one_process()
                if block.reason is None:
                    exec(code, namespace)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _one_process() -> None:
    """A group of a single process, where the example is run by torchrun."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)


def test_blocks_are_found_and_reasons_are_given():
    found = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    assert len(found) > 30
    assert len({block.page for block in found}) == len(
        [page for page in PAGES if "```python" in page.read_text("utf-8")]
    )
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown = [block for block in blocks(page) if block.language == "python"]
        assert len(shown) == text.count("\n```python\n") + text.count("<!-- example\n"), page
        assert all(block.reason is None or len(block.reason) > 20 for block in shown)


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
        # Options that all benchmarks share are the harness's.
        text = "".join(
            path.read_text(encoding="utf-8") for path in (ROOT / words[1], ROOT / "benchmarks" / "harness.py")
        )
        assert all(f'"{word}"' in text for word in words[2:] if word.startswith("--"))
    elif words[0] == "pytest":
        assert all((ROOT / word).exists() for word in words[1:] if not word.startswith("-"))
    else:
        assert words[0] in ("pip", "torchrun"), f"{where}: what is {words[0]}?"


def _parse(words: list[str]) -> None:
    """Parse as the command line would, and stop before anything is done."""
    command, context = typer.main.get_command(app), None
    while isinstance(command, TyperGroup):
        if not words or words[0] in ("--help", "--version"):
            return
        context = command.make_context(command.name, list(words), parent=context)
        _, command, words = command.resolve_command(context, list(words))
    # Of a bare name in prose, such as `bayesadam prune`, the arguments are left to the reader.
    command.make_context(command.name, list(words), resilient_parsing=not words)


@pytest.mark.parametrize(
    "line",
    [
        "prune last.pt --fractoin 0.5 -o x.pt",
        "prune last.pt --fraction 0.5",
        "prune last.pt --fraction 2 -o x.pt",
        "no-such-command x",
        "data no-such-command",
    ],
)
def test_a_wrong_command_is_found(line):
    # Of whichever click typer brings: its errors have an exit code.
    with pytest.raises(Exception, match=r"(?i)no such|missing|should be less") as caught:
        _parse(shlex.split(line))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_named_is_there(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\b(?:benchmarks|tests|src)/[\w/]+\.py\b", text):
        assert (ROOT / name).is_file(), name
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


def test_every_public_name_is_in_the_api():
    """By the page of its module, or of the one it comes from."""
    told = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    for name in ba.__all__:
        member = getattr(ba, name)
        if isinstance(member, type) or callable(member):
            module = member.__module__
            assert re.search(rf"\.{name}\b", told) or f"::: {module}\n" in told, name


def test_formulas_become_mathml(monkeypatch):
    """Both notations, and doctests as code; needs what `make docs` installs."""
    pytest.importorskip("latex2mathml")
    markdown = pytest.importorskip("markdown")
    monkeypatch.syspath_prepend(str(DOCS / "theme"))
    monkeypatch.delitem(sys.modules, "maths", raising=False)
    html = partial(markdown.markdown, extensions=["maths", "fenced_code"])
    assert html("a $x^2$ b").count("<math") == 1
    assert html(":math:`\\mathcal N`").count("𝒩") == 1
    assert html(".. math::\n    a &= b \\\\\n    c &= d\n\nend").count("<mtr>") == 2
    assert "<p>end</p>" in html(".. math::\n    a\n\nend")
    assert html("$$\na\n$$").count('display="block"') == 1
    assert "<math" not in html("```\n$$\na\n$$\n.. math::\n```\n\n`$x$` and 5 $ and 6 $ more")
    assert "<pre>" in html(">>> 1 + 1\n2\n\ntext")
