"""Operations replayed on CUDA: the numbers without, whatever moved, changed or came at the same time."""

from __future__ import annotations

import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import bayesadam as ba
from bayesadam.calibrated.replaying import Replayed, _Recording
from calibrated.cases_calibrated import NAMES, RISKS, blobs, data, same_answers, trained

cuda = pytest.mark.cuda


def recordings(net: ba.Calibrated) -> int:
    return sum(isinstance(known, _Recording) for known in net._replayed._known.values())


def network(name: str) -> ba.Calibrated:
    return ba.calibrate(trained(name), data(name, 1200, 1), **RISKS[name]).cuda()


def plain(net: ba.Calibrated, x: Tensor) -> ba.Answer:
    """The answer of a copy, which has recorded nothing."""
    return copy.deepcopy(net)(x)


def test_a_copy_and_a_pickle_answer_alike():
    net = ba.calibrate(trained("classification"), blobs(200, 1))
    x = blobs(5, 2)[0]
    assert same_answers(pickle.loads(pickle.dumps(net))(x), net(x))
    assert same_answers(copy.deepcopy(net)(x), net(x))


def test_on_a_cpu_a_function_runs_as_it_is():
    replayed, x = Replayed(), torch.ones(3)
    for _ in range(4):
        assert replayed(lambda tensors: (tensors[0] + 1, None), [x], [], "kind")[1] is None
    assert not replayed._known


@cuda
@pytest.mark.parametrize("name", NAMES)
def test_replays_are_the_numbers_without_to_the_bit(name):
    net = network(name)
    for size in (1, 7, 64):
        for seed in range(5):
            x = data(name, size, 10 + seed)[0].cuda()
            x[0] *= 100 if seed == 3 else torch.nan if seed == 4 else 1
            with warnings.catch_warnings():
                # Some are out of the range by intent.
                warnings.simplefilter("ignore")
                assert same_answers(_comparable(net(x)), _comparable(plain(net, x)))
    assert recordings(net) == 3


@cuda
def test_what_moved_or_changed_is_recorded_again():
    net = network("classification")
    x = blobs(6, 2)[0].cuda()
    answers = [net(x) for _ in range(4)]
    assert recordings(net) == 1
    assert all(same_answers(one, answers[0]) for one in answers)
    # Answers have memory of their own.
    assert answers[2].probs.data_ptr() != answers[3].probs.data_ptr()
    net.cpu()
    assert torch.allclose(net(x.cpu()).probs, answers[0].probs.cpu(), atol=1e-6)
    net.cuda()
    other = network("classification")
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    state["novelties"] += 1
    net.load_state_dict(state, assign=True)
    del state
    for _ in range(4):
        assert same_answers(net(x), plain(net, x))
    net.novelties.sub_(1)
    assert same_answers(net(x), plain(net, x))
    assert net(x).p_value.equal(answers[0].p_value)


@cuda
def test_gradients_large_batches_and_inference_mode():
    net = network("classification")
    x = blobs(6, 2)[0].cuda().requires_grad_()
    for _ in range(4):
        (slope,) = torch.autograd.grad(net(x).novelty.sum(), x)
    assert bool(slope.any())
    assert recordings(net) == 0
    with torch.inference_mode():
        for _ in range(4):
            net(x.detach())
    assert recordings(net) == 1
    assert same_answers(net(x.detach()), plain(net, x.detach()))
    many = x.detach().repeat(1_000_000, 1)
    for _ in range(4):
        net(many)
    assert recordings(net) == 1


@cuda
def test_threads_and_streams():
    net = network("regression")
    inputs = [data("regression", 16, seed)[0].cuda() for seed in range(8)]
    expected = [plain(net, x) for x in inputs]

    def run(number: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            answers = [net(inputs[number]) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return all(same_answers(answer, expected[number]) for answer in answers)

    torch.cuda.synchronize()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(8)))


@cuda
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_it_compiles_whole_on_cuda(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).cuda()
    x, y = torch.randn(300, 1, 8, 8, device="cuda"), torch.randint(3, (300,), device="cuda")
    net = ba.calibrate(model, (x, y), likelihood="classification")
    compiled = torch.compile(net, fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(3):
            answer = compiled(x[:8])
        assert torch.allclose(answer.probs, net(x[:8]).probs, atol=1e-6)
        assert torch.allclose(answer.novelty, net(x[:8]).novelty, atol=1e-4)
    assert isinstance(answer, ba.Answer)


def _comparable(answer: ba.Answer) -> ba.Answer:
    """NaN, which equals nothing, as a number."""
    return ba.Answer(*(t.double().nan_to_num(-7.0) if isinstance(t, Tensor) else t for t in answer))
