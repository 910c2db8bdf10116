"""Merging by mergekit with the methods in contrib is merging by bayesadam.

mergekit has an environment of its own, `make mergekit-test`; elsewhere these tests are skipped.
"""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import bayesadam as ba
from floats import assert_close
from processes import PATIENCE

pytest.importorskip("mergekit", reason="needs mergekit: make mergekit-test")
transformers = pytest.importorskip("transformers")

from mergekit.config import MergeConfiguration  # noqa: E402
from mergekit.merge import run_merge  # noqa: E402
from mergekit.options import MergeOptions  # noqa: E402

import curvature  # noqa: E402
import mergekit_fisher  # noqa: E402

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def build(tied):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied))


def train(model, step, steps=120, lr=3e-3):
    """Numbers that go on by `step`: one task for each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(step)
    for _ in range(steps):
        start = torch.randint(32, (8, 1), generator=generator)
        text = (start + step * torch.arange(12)) % 32
        optimizer.zero_grad()
        model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
    return optimizer


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def trained(request):
    """The base and two fine-tunes, each with its optimiser."""
    base = build(request.param)
    found = [(base, train(base, 1))]
    for step in (3, 5):
        model = build(request.param)
        model.load_state_dict(base.state_dict())
        found.append((model, train(model, step)))
    return found


def published(folder, trained, compress=None, base=True):
    """The folders of the base and of the fine-tunes, as one publishes them."""
    sizes = ((400, 8), (1000, 4), (300, 16))
    for name, (model, optimizer), (n, b) in zip(("base", "a", "b"), trained, sizes, strict=True):
        model.save_pretrained(folder / name)
        if name != "base" or base:
            posterior = ba.Posterior.from_optimizer(model, optimizer, n, batch_size=b)
            posterior.save(folder / name / "posterior.safetensors", weights=False, compress=compress)
    return [folder / name for name in ("base", "a", "b")]


def configured(folder, method, weights=(None, None), base=None, **more):
    models = [
        {"model": str(folder / name), **({} if weight is None else {"parameters": {"weight": weight}})}
        for name, weight in zip("ab", weights, strict=True)
    ]
    return {"merge_method": method, "models": models, **({"base_model": str(base)} if base else {}), **more}


def merged(folder, config):
    out = folder / "merged"
    run_merge(MergeConfiguration.model_validate(config), str(out), MergeOptions(quiet=True, copy_tokenizer=False))
    return load_file(out / "model.safetensors")


def same(found, expected, atol=1e-6):
    assert found.keys() == expected.keys()
    for name, theta in expected.items():
        assert float((found[name] - theta).abs().max()) <= atol, name


@pytest.mark.parametrize("weights", [(None, None), (2.0, 0.5)])
@pytest.mark.parametrize("compress", [None, "bfloat16", "factored"])
def test_fisher_is_that_of_bayesadam(tmp_path, trained, compress, weights):
    _, a, b = published(tmp_path, trained, compress)
    found = merged(tmp_path, configured(tmp_path, "bayesadam_fisher", weights))
    sources, counts = [a / "model.safetensors", b / "model.safetensors"], None if weights[0] is None else weights
    ba.merging.merge_checkpoints(sources, tmp_path / "ours.safetensors", method="fisher", weights=counts)
    same(found, load_file(tmp_path / "ours.safetensors"))
    # It is no average, and not one of the two.
    one, two = (load_file(path)["model.layers.0.mlp.up_proj.weight"] for path in sources)
    mix = found["model.layers.0.mlp.up_proj.weight"]
    assert all(float((mix - other).abs().max()) > 1e-3 for other in (one, two, (one + two) / 2))


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("weights", [(None, None), (2.0, 0.5)])
def test_gradient_matching_is_that_of_bayesadam(tmp_path, trained, weights, with_base):
    base, a, b = (folder / "model.safetensors" for folder in published(tmp_path, trained, "factored", base=with_base))
    found = merged(tmp_path, configured(tmp_path, "bayesadam_gradient_matching", weights, base.parent))
    expected = ba.merge([a, b], base=base, weights=None if weights[0] is None else weights)
    assert expected.report.method == "gradient-matching"
    same(found, expected)


def test_the_command_and_the_merged_model_run(tmp_path, trained):
    published(tmp_path, trained, "factored")
    expected = merged(tmp_path, configured(tmp_path, "bayesadam_fisher"))
    (tmp_path / "merge.yml").write_text(yaml.safe_dump(configured(tmp_path, "bayesadam_fisher")))
    script, out = ROOT / "contrib" / "mergekit_fisher.py", tmp_path / "out"
    command = [sys.executable, script, tmp_path / "merge.yml", out, "--no-copy-tokenizer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    same(load_file(out / "model.safetensors"), expected, 0.0)
    model, text = transformers.LlamaForCausalLM.from_pretrained(out), torch.arange(12)[None] * 3 % 32
    assert torch.isfinite(model(input_ids=text, labels=text).loss)


def test_what_no_model_trained_is_averaged_and_told(tmp_path, trained, caplog):
    _, a, b = published(tmp_path, trained)
    for folder, (model, optimizer) in zip((a, b), trained[1:], strict=True):
        model.model.norm.weight.requires_grad_(False)
        posterior = ba.Posterior.from_optimizer(model, optimizer, 100)
        model.model.norm.weight.requires_grad_(True)
        posterior.save(folder / "posterior.safetensors", weights=False)
    with caplog.at_level(logging.WARNING):
        found = merged(tmp_path, configured(tmp_path, "bayesadam_fisher"))["model.norm.weight"]
    plain = [load_file(folder / "model.safetensors")["model.norm.weight"] for folder in (a, b)]
    assert_close(found, (plain[0] + plain[1]) / 2, rtol=1e-6)
    assert "model.norm.weight is averaged" in caplog.text


def test_what_cannot_be_merged_is_told(tmp_path, trained):
    base, a, b = published(tmp_path, trained)
    fisher = configured(tmp_path, "bayesadam_fisher")
    with pytest.raises(ValueError, match="does not accept a base"):
        merged(tmp_path, configured(tmp_path, "bayesadam_fisher", base=base))
    with pytest.raises(ValueError, match="requires a base"):
        merged(tmp_path, configured(tmp_path, "bayesadam_gradient_matching"))
    with pytest.raises(ValueError, match="weight must be a positive number"):
        merged(tmp_path, configured(tmp_path, "bayesadam_fisher", (1.0, -1.0)))
    # Layers in another order have the names of others.
    layers = [{"sources": [{"model": str(each), "layer_range": [n, n + 1]} for each in (a, b)]} for n in (1, 0)]
    with pytest.raises(curvature.Fault, match="does not belong to"):
        merged(tmp_path, {"merge_method": "bayesadam_fisher", "slices": layers})
    for number, (change, message) in enumerate(
        (
            (lambda path: path.unlink(), "no posterior.safetensors beside.*bayesadam export"),
            (lambda path: path.write_bytes(path.read_bytes()[:-5]), "truncated"),
            (lambda path: shutil.copy(a / "posterior.safetensors", path), "does not belong to"),
        )
    ):
        other = shutil.copytree(b, tmp_path / f"other{number}")
        change(other / "posterior.safetensors")
        with pytest.raises(curvature.Fault, match=message):
            merged(tmp_path, {**fisher, "models": [{"model": str(a)}, {"model": str(other)}]})


def test_the_equations():
    """Against float64, with moments at the end of float32."""
    torch.manual_seed(0)
    thetas, v = torch.randn(3, 4, 5), torch.rand(3, 4, 5) * 1e-30
    v[:, 0] = 0
    v[1:, 1] = 0
    alpha = torch.tensor([1.0, 2.0, 0.5])
    found = mergekit_fisher.fisher(thetas, v, alpha)
    weighted = alpha.double()[:, None, None] * v.double()
    expected = (weighted * thetas.double()).sum(0) / weighted.sum(0)
    expected[0] = (alpha.double()[:, None] * thetas[:, 0].double()).sum(0) / alpha.sum()
    assert_close(found, expected, rtol=1e-6)
    assert torch.equal(found[1], thetas[0, 1])
    assert_close(found, ba.merging.methods.fisher(thetas, alpha[:, None, None] * v, alpha), rtol=1e-6)
