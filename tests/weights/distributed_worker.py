"""One of several processes of test_distributed: runs every check, and has the first process write down what it
found.
"""

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
from torch.distributed.fsdp import fully_shard
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


def read(model: nn.Module, state: dict[str, Any]) -> ba.Posterior:
    """In the form in which all of the equation counts."""
    return ba.Posterior.from_state_dict(model, state, N_DATA, **SETTINGS).replace(form="likelihood")


class Checks:
    """Each method is one check; what it returns is compared with other numbers of processes, and with one plain one."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        self.rank = dist.get_rank()

    def read(self, network: str) -> ba.Posterior:
        """The posterior of the plain process, over shards of the same weights."""
        saved = torch.load(self.folder / f"{network}.pt", weights_only=True)
        model = NETWORKS[network]()
        model.load_state_dict(saved["model"])
        return read(split(model), saved["optimizer"])

    def check_statistics(self) -> Any:
        posterior = self.read("linear")
        assert posterior.is_sharded
        for named in (posterior.mode, posterior.variance, posterior.sample(2)):
            rows = own_part(named["0.weight"]).shape[-2]
            assert rows == (5 if self.world == 1 else (3, 2)[self.rank])
        assert self.world == 1 or own_part(posterior.mode["2.bias"]).numel() == (1, 0)[self.rank]
        assert posterior.n_weights == 26
        return statistics(posterior)

    def check_a_checkpoint_is_read_onto_shards(self) -> None:
        expected = self.read("norm")
        model = split(fresh("norm"))
        found = ba.Posterior.from_checkpoint(self.folder / "norm.pt", model, N_DATA, **SETTINGS)
        found = found.replace(form="likelihood")
        for name, theta in expected.mode.items():
            assert torch.equal(own_part(found.mode[name]), own_part(theta))
            assert torch.equal(own_part(found.variance[name]), own_part(expected.variance[name]))
        assert_close(model(inputs()), expected.model(inputs()))

    def check_tensor_priors(self) -> Any:
        return statistics(self.read("linear").replace(prior_precision=priors()))

    def check_sampled(self) -> Any:
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
        with torch.no_grad():
            return {"drawn": found, "at_mean": model(inputs())}

    def check_seeds_are_agreed_on(self) -> None:
        posterior = self.read("linear")
        torch.manual_seed(100 + self.rank)
        drawn = posterior.sample()
        # The part of each process must be of one draw: the first process's seed gives it again.
        torch.manual_seed(100)
        again = posterior.sample()
        assert all(torch.equal(whole(drawn[name]), whole(again[name])) for name in drawn)

    def check_training(self) -> Any:
        """Trained as shards, the data being the same on every process."""
        model = split(fresh("linear"))
        optimizer = train(model)
        with torch.no_grad():
            model(inputs())
        posterior = ba.Posterior.from_optimizer(model, optimizer, N_DATA, **SETTINGS).replace(form="likelihood")
        return {key: value for key, value in statistics(posterior).items() if key in ("mean", "variance")}

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
            plain = ba.Posterior.from_optimizer(model, optimizer, N_DATA, **options).replace(form=form)
            shards = split(copy.deepcopy(model))
            posterior = ba.Posterior.from_state_dict(shards, optimizer.state_dict(), N_DATA, **options)
            posterior = posterior.replace(form=form)
            for ours, truth in (
                (posterior.mean, plain.mean),
                (posterior.variance, plain.variance),
                (posterior.sample(generator=seeded()), plain.sample(generator=seeded())),
                (posterior.sample(3, generator=seeded()), plain.sample(3, generator=seeded())),
            ):
                for name, expected in truth.items():
                    assert torch.equal(whole(ours[name]), expected), (row, delta, form, name)

    def check_gathered(self) -> Any:
        posterior = self.read("linear")
        for plain in (nn.Linear(3, 5), split(fresh("linear"))):
            with pytest.raises(MatchError):
                posterior.gathered(plain)
        gathered = posterior.gathered(fresh("linear"))
        assert not gathered.is_sharded
        return statistics(gathered)

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

    def check_saving(self) -> Any:
        target = self.folder / f"saved_by_{self.world}.safetensors"
        posterior = self.read("linear").replace(prior_precision=priors() | {"0.bias": 0.5}, scale=0.25)
        posterior = posterior.replace(noise_variance=0.1)
        posterior.replace(scale=9.0).save(target)
        # In place of the older one.
        posterior.save(target)
        loaded = ba.Posterior.load(target, split(fresh("linear")))
        assert loaded.is_sharded
        assert loaded.settings.scale == 0.25
        with pytest.raises(FileError, match="does not exist"):
            posterior.save(self.folder / "nowhere" / "posterior.safetensors")
        return statistics(loaded)

    def check_loading(self) -> Any:
        """What one plain process wrote, and what another number of processes wrote."""
        found = [statistics(ba.Posterior.load(self.folder / "plain.safetensors", split(fresh("linear"))))]
        other = self.folder / "saved_by_2.safetensors"
        if self.world == 1:
            found.append(statistics(ba.Posterior.load(other, split(fresh("linear")))))
            found.append(statistics(ba.Posterior.load(other, fresh("linear"))))
        return found

    def check_ddp(self) -> Any:
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
        found = {"drawn": drawn, "statistics": statistics(posterior)}
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, drawn)
        assert all(torch.equal(other, drawn) for other in everyone)
        return found


def checks(folder: Path) -> dict[str, Callable[[], Any]]:
    warnings.simplefilter("ignore")
    found = Checks(folder, dist.get_world_size())
    return {name: getattr(found, name) for name in sorted(vars(Checks)) if name.startswith("check_")}


if __name__ == "__main__":
    run_checks(checks)
