"""One of several processes of test_distributed: every check, against what a process without any distribution has."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import bayesadam as ba
from bayesadam._shards import own_part, whole
from bayesadam.errors import FileError, MatchError, SettingError
from bayesadam.weights import draws as noise
from bayesadam.weights.networks import copy_into
from bayesadam.weights.settings import PrecisionRule
from floats import assert_close
from ranks import run_checks

N_DATA = 321
SETTINGS = {"prior_precision": 1.5}
NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    # Five rows are uneven over two processes, one row leaves a process with nothing.
    "linear": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)),
    "norm": lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1)),
}


def inputs() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(9))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def train(model: nn.Module, steps: int = 5, seed: int = 3) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()
    return optimizer


def fresh(network: str) -> nn.Sequential:
    torch.manual_seed(1)
    return NETWORKS[network]()


def priors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.rand(p.shape, generator=generator) + 0.5 for n, p in fresh("linear").named_parameters()}


def split(model: nn.Sequential) -> nn.Sequential:
    fully_shard([model[0], model[1]])
    fully_shard(model)
    return model


def breaking(model: nn.Module, batch: Tensor) -> Tensor:
    model(batch)
    raise ValueError("on purpose")


def statistics(posterior: ba.Posterior) -> dict[str, Any]:
    """Everything a posterior says, in whole tensors."""
    draws = posterior.sample(3, generator=seeded())
    named = {
        "mean": posterior.mean,
        "variance": posterior.variance,
        "snr": posterior.snr(),
        "draws": draws,
        "draw": posterior.sample(generator=seeded()),
    }
    found: dict[str, Any] = {key: {n: whole(t).detach() for n, t in value.items()} for key, value in named.items()}
    return found | {"log_prob": posterior.log_prob(draws)}


def plain(network: str = "linear") -> tuple[ba.Posterior, torch.optim.Optimizer]:
    """What one process without any distribution has, in the form in which all of the equation counts."""
    model = fresh(network)
    optimizer = train(model)
    posterior = ba.Posterior.from_optimizer(model, optimizer, N_DATA, **SETTINGS)
    return posterior.replace(form="likelihood"), optimizer


def same(found: dict[str, Any], expected: dict[str, Any], *, exactly: bool = True) -> None:
    """Sums over many weights depend on their order, but for rounding."""
    exact, rounded = {"rtol": 1e-300}, {"rtol": 2e-5, "atol": 1e-6}
    for key, value in found.items():
        assert_close(value, expected[key], msg=key, **(exact if exactly and key != "log_prob" else rounded))


class Checks:
    """Each method is one check, against the posterior of one plain process."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        self.rank = dist.get_rank()

    def read(self, network: str) -> ba.Posterior:
        """The posterior of the plain process, over shards of the same weights."""
        posterior, optimizer = plain(network)
        model = split(posterior.model)
        read = ba.Posterior.from_state_dict(model, optimizer.state_dict(), N_DATA, **SETTINGS)
        return read.replace(form="likelihood")

    def check_statistics(self) -> None:
        posterior = self.read("linear")
        assert posterior.is_sharded
        for named in (posterior.mode, posterior.variance, posterior.sample(2)):
            rows = own_part(named["0.weight"]).shape[-2]
            assert rows == (5 if self.world == 1 else (3, 2)[self.rank])
        assert self.world == 1 or own_part(posterior.mode["2.bias"]).numel() == (1, 0)[self.rank]
        assert posterior.n_weights == 26
        same(statistics(posterior), statistics(plain()[0]))

    def check_a_checkpoint_is_read_onto_shards(self) -> None:
        expected, (posterior, optimizer), path = self.read("norm"), plain("norm"), self.folder / f"norm_{self.rank}.pt"
        torch.save({"model": posterior.model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        model = split(fresh("norm"))
        found = ba.Posterior.from_checkpoint(path, model, N_DATA, **SETTINGS).replace(form="likelihood")
        for name, theta in expected.mode.items():
            assert torch.equal(own_part(found.mode[name]), own_part(theta))
            assert torch.equal(own_part(found.variance[name]), own_part(expected.variance[name]))
        assert_close(model(inputs()), expected.model(inputs()))

    def check_tensor_priors(self) -> None:
        ours, expected = (q.replace(prior_precision=priors()) for q in (self.read("linear"), plain()[0]))
        same(statistics(ours), statistics(expected))

    def check_sampled(self) -> None:
        posterior = self.read("linear")
        model = posterior.model
        bits = {name: own_part(p).clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            # FSDP2 leaves the root's weights gathered after this.
            expected = model(inputs())
            with posterior.sampled(generator=seeded()) as held:
                found = held(inputs())
            assert torch.equal(model(inputs()), expected)
            with pytest.raises(ValueError, match="on purpose"), posterior.sampled(generator=seeded()):
                breaking(model, inputs())
            assert torch.equal(model(inputs()), expected)
            # The forward itself breaks off half-way.
            with pytest.raises(RuntimeError), posterior.sampled(generator=seeded()):
                model(inputs()[:, :2])
            assert torch.equal(model(inputs()), expected)
        parameters = posterior.parameters()
        assert all(torch.equal(own_part(parameters[name]), kept) for name, kept in bits.items())
        copy_into(posterior.model, posterior.mean)
        other = plain()[0]
        with torch.no_grad():
            with other.sampled(generator=seeded()) as held:
                drawn = held(inputs())
            copy_into(other.model, other.mean)
            at_mean = other.model(inputs())
            ours = {"drawn": found, "at_mean": model(inputs())}
        same(ours, {"drawn": drawn, "at_mean": at_mean}, exactly=False)
        assert (drawn - at_mean).abs().max() > 1e-3

    def check_seeds_are_agreed_on(self) -> None:
        posterior = self.read("linear")
        torch.manual_seed(100 + self.rank)
        drawn = posterior.sample()
        # The part of each process must be of one draw: the first process's seed gives it again.
        torch.manual_seed(100)
        again = posterior.sample()
        assert all(torch.equal(whole(drawn[name]), whole(again[name])) for name in drawn)

    def check_training(self) -> None:
        """Trained as shards, the data being the same on every process."""
        model = split(fresh("linear"))
        optimizer = train(model)
        with torch.no_grad():
            model(inputs())
        posterior = ba.Posterior.from_optimizer(model, optimizer, N_DATA, **SETTINGS).replace(form="likelihood")
        ours = {key: value for key, value in statistics(posterior).items() if key in ("mean", "variance")}
        same(ours, statistics(plain()[0]), exactly=False)

    def check_bad_moments_are_refused_everywhere(self) -> None:
        model = split(fresh("linear"))
        optimizer = train(model)
        if self.rank == self.world - 1:
            own_part(optimizer.state[model[0].weight]["exp_avg_sq"])[-1, -1] = float("nan")
        with pytest.raises(MatchError, match=r"'0\.weight'"):
            ba.Posterior.from_optimizer(model, optimizer, N_DATA)

    def check_placements(self) -> None:
        """Parts that are no run of the flat tensor are parts of the same draw all the same."""
        torch.manual_seed(4)
        mode, v, delta = torch.randn(3, 6, 5), torch.rand(3, 6, 5), torch.rand(3, 6, 5)
        options = {"seed": 3, "dtype": torch.float32}
        rule = PrecisionRule(weight=10.0, delta=delta, power=0.5, shrink=True)
        flat, square = init_device_mesh("cpu", (self.world,)), init_device_mesh("cpu", (self.world, 1))
        for n in (None, 4):
            expected = noise.draw(mode, v, rule, n=n, **options)
            for mesh, placements in [
                (flat, [Shard(0)]),
                (flat, [Shard(2)]),
                (square, [Shard(1), Shard(1)]),
                (square, [Replicate(), Shard(0)]),
            ]:
                mine = [distribute_tensor(t, mesh, placements) for t in (mode, v, delta)]
                found = noise.draw(mine[0], mine[1], replace(rule, delta=mine[2]), n=n, **options)
                assert found.shape == expected.shape
                assert torch.equal(found.full_tensor(), expected), (n, placements)

    def check_padding(self) -> None:
        """A row that stands for padding is held on whichever process it lies."""
        ids = torch.arange(40).view(20, 2) * 3 % 5
        for row, delta, form in ((0, 1.5, "likelihood"), (4, 0.5, "map")):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Embedding(5, 3, padding_idx=row), nn.Flatten(), nn.Linear(6, 1))
            nn.init.normal_(model[0].weight)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(3):
                optimizer.zero_grad()
                (model(ids) - 1).square().mean().backward()
                optimizer.step()
            options = {"prior_precision": delta}
            alone = ba.Posterior.from_optimizer(model, optimizer, N_DATA, **options).replace(form=form)
            shards = split(copy.deepcopy(model))
            posterior = ba.Posterior.from_state_dict(shards, optimizer.state_dict(), N_DATA, **options)
            posterior = posterior.replace(form=form)
            same(statistics(posterior), statistics(alone))

    def check_gathered(self) -> None:
        posterior = self.read("linear")
        for other in (nn.Linear(3, 5), split(fresh("linear"))):
            with pytest.raises(MatchError):
                posterior.gathered(other)
        gathered = posterior.gathered(fresh("linear"))
        assert not gathered.is_sharded
        same(statistics(gathered), statistics(plain()[0]))

    def check_what_needs_whole_tensors_says_so(self) -> None:
        posterior = self.read("linear")
        for work in (
            lambda: posterior + posterior,
            lambda: posterior.with_inputs(inputs()),
            lambda: ba.Mixture([posterior]),
        ):
            with pytest.raises(SettingError, match="gathered"):
                work()
        assert str(posterior).startswith("Posterior over FSDPSequential")

    def check_saving(self) -> None:
        """What these processes wrote is read by them, by one alone, and by another number of processes."""
        target, how = self.folder / f"saved_by_{self.world}.safetensors", {"scale": 0.25, "noise_variance": 0.1}
        posterior, expected = (
            q.replace(prior_precision=priors() | {"0.bias": 0.5}, **how) for q in (self.read("linear"), plain()[0])
        )
        posterior.replace(scale=9.0).save(target)
        # In place of the older one.
        posterior.save(target)
        for path in (target, *([self.folder / "saved_by_2.safetensors"] if self.world == 1 else [])):
            for model in (split(fresh("linear")), fresh("linear")):
                loaded = ba.Posterior.load(path, model)
                assert loaded.is_sharded == isinstance(model, FSDPModule)
                assert loaded.settings.scale == 0.25
                same(statistics(loaded), statistics(expected))
        with pytest.raises(FileError, match="does not exist"):
            posterior.save(self.folder / "nowhere" / "posterior.safetensors")

    def check_what_a_plain_process_wrote(self) -> None:
        posterior, path = plain()[0], self.folder / f"plain_{self.rank}.safetensors"
        posterior.save(path)
        same(statistics(ba.Posterior.load(path, split(fresh("linear")))), statistics(posterior))

    def check_ddp(self) -> None:
        model = fresh("linear")
        # Each process has data of its own.
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = train(wrapped, seed=self.rank)
        posterior = ba.Posterior.from_optimizer(wrapped, optimizer, N_DATA, **SETTINGS)
        assert posterior.model is model
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad(), posterior.sampled(generator=seeded()):
            drawn = wrapped(inputs())
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert not torch.equal(wrapped(inputs()), drawn)
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, drawn)
        assert all(torch.equal(other, drawn) for other in everyone)


def checks(folder: Path) -> dict[str, Callable[[], Any]]:
    warnings.simplefilter("ignore")
    found = Checks(folder, dist.get_world_size())
    return {name: getattr(found, name) for name in sorted(vars(Checks)) if name.startswith("check_")}


if __name__ == "__main__":
    run_checks(checks)
