"""The released code's recipes against their equations."""

from dataclasses import replace

import torch

from bayesadam.engine.network import Network, forward
from bayesadam.engine.streams import Streams
from experiments import released
from experiments.baselines import Data, Problem, Training
from experiments.released import NOTEBOOK, SCRIPT, fit_letter, fit_script, glorot
from experiments.running import generator
from floats import assert_close

N = 200


def toy(epochs: int = 3, n: int = N) -> Problem:
    x = torch.linspace(0, 0.5, n)[None, :, None].expand(2, -1, -1)
    y = x.sin() + torch.arange(2)[:, None, None]
    return Problem(Data(x, y, x[:, ::5], y[:, ::5], "regression"), Network(1, (4, 3), 1), Training(epochs), (5, 6))


def test_adam_without_correction_follows_its_recursion():
    problem = toy()
    _, weights, moments = released.trained(problem, SCRIPT)
    source = generator(6, "initial")
    network = replace(problem.network, activation="tanh")
    params = {name: glorot(shape, source).double().requires_grad_() for name, shape in network.shapes().items()}
    m, v = ({name: torch.zeros_like(p) for name, p in params.items()} for _ in range(2))
    batches = list(released._batches(N, (5, 6), 3, one_order=False))
    assert [rows.shape for rows in batches] == 3 * [(2, 128), (2, 72)]
    for rows in batches:
        x, y = (part[1, rows[1]].double() for part in (problem.data.x, problem.data.y))
        out = forward(network, {name: p[None] for name, p in params.items()}, x)[0]
        penalty = sum(p.square().sum() for p in params.values())
        grads = torch.autograd.grad((out - y).square().mean() + 1e-4 / 2 * penalty, list(params.values()))
        for (name, p), g in zip(params.items(), grads, strict=True):
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g.square()
            params[name] = (p - 1e-3 * m[name] / v[name].sqrt()).detach().requires_grad_()
    for name, p in params.items():
        assert_close(weights[name][1].double(), p.detach(), rtol=1e-3, atol=1e-5)
        assert_close(moments[name][1].double(), v[name], rtol=1e-3, atol=1e-10)


def test_the_script_divides_by_n_twice_and_the_text_once(monkeypatch):
    problem, seen = toy(), []
    monkeypatch.setattr(released, "with_noise", lambda _, posteriors: seen.append(posteriors[0]))
    _, _, moments = released.trained(problem, SCRIPT)
    fit_script(problem)
    fit_letter(problem)
    script, letter = seen
    for name, v in moments.items():
        assert_close(script.variance[name], 1 / (N * N * v[0].sqrt()), rtol=1e-3)
    state = problem.optimum.state_dict(0)["state"]
    corrected = state[0]["exp_avg_sq"] / (1 - 0.999 ** float(state[0]["step"]))
    live = corrected > 0
    assert_close(letter.variance["layer0.weight"][live], 1 / (N * corrected[live].sqrt()), rtol=1e-3)


def test_the_notebook_drops_pre_activations_in_one_order():
    first, second = (list(released._batches(300, (1,), 2, one_order=True))[k::3] for k in (0, 1))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], second[0])
    params = {"layer0.weight": torch.zeros(1, 50, 1), "layer0.bias": torch.full((1, 50), 3.0)}
    params |= {"layer1.weight": torch.eye(50)[None], "layer1.bias": torch.zeros(1, 50)}
    streams = Streams((0,), "dropout")
    out = released._outputs(params, torch.zeros(1, 40, 1), NOTEBOOK, streams)
    # What is dropped is sigmoid's ½, not 0.
    assert set(out.flatten().tolist()) <= {0.5, float(torch.tensor(3.75).sigmoid())}
    assert 0.15 < float((out == 0.5).float().mean()) < 0.25
