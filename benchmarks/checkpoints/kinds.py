"""Checkpoints as scripts write them with torch alone: one writer a kind, and what was live when it wrote."""

from __future__ import annotations

import argparse
import copy
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

STEPS = 3


@dataclass(frozen=True, eq=False)
class Written:
    """What a kind's writer left behind.

    Attributes:
        path: what is read.
        live: v̂ of every trained parameter, by its name in its own network.
        weights: the values of the same parameters, as precise as they are in the file.
        options: one call of `read_checkpoint` each, for what no file says; together they read all that is live.
        unsaid: why to refuse is right; "" where it is not. What is read nevertheless must be right.
        optional: of the live ones, those that need not be read.
        named: whether the file has the names that the live ones have.
        aliases: the other names of those that have several, in tied modules.
        slack: the absolute error of v̂ that float32 explains, where one is subtracted.
    """

    path: Path
    live: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    options: tuple[dict[str, Any], ...] = ()
    unsaid: str = ""
    optional: tuple[str, ...] = ()
    named: bool = True
    aliases: dict[str, list[str]] = field(default_factory=dict)
    slack: float = 0.0


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of checkpoint.

    Attributes:
        name: of its row.
        write: (empty folder) → what was written there.
        needs: the modules to import, the first of which is the library that writes; none for torch alone.
        versions: what the library's version begins with, where that matters.
        note: said beside the library, such as that its layout is written by hand.
    """

    name: str
    write: Callable[[Path], Written]
    needs: tuple[str, ...] = ()
    versions: str = ""
    note: str = ""


# --- what is live ---------------------------------------------------------------------------------------------------


def second_moment(state: dict[str, Any], group: dict[str, Any], *, start: float = 0.0) -> Tensor:
    """v̂ out of the state of Adam or RMSprop, in double precision and without bayesadam."""
    stored = state["exp_avg_sq"] if "exp_avg_sq" in state else state["square_avg"]
    beta = group["betas"][1] if "betas" in group else group["alpha"]
    left = beta ** float(state["step"])
    return (stored.detach().double() - start * left) / (1 - left)


def told(
    path: Path,
    networks: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    start: float = 0.0,
    cast: torch.dtype | None = None,
    **more: Any,
) -> Written:
    """What was written, with v̂ and the values of all that the optimisers trained; `cast` is the file's type."""
    networks = [networks] if isinstance(networks, nn.Module) else networks
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    moments = {
        id(parameter): second_moment(optimizer.state[parameter], group, start=start)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if optimizer.state.get(parameter)
    }
    live: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    aliases: dict[str, list[str]] = {}
    for number, network in enumerate(networks):
        for name, parameter in network.named_parameters():
            if id(parameter) in moments:
                # Two networks may have the same names: only their ends are compared.
                key = name if name not in live else f"{number}:{name}"
                live[key] = moments[id(parameter)]
                weights[key] = parameter.detach().to(cast or parameter.dtype).clone()
                every = network.named_parameters(remove_duplicate=False)
                aliases[key] = [other for other, same in every if same is parameter and other != name]
    assert len(live) == len(moments)
    return Written(path, live, weights, aliases={key: names for key, names in aliases.items() if names}, **more)


# --- networks -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Most of its layers have equal shapes, so that a wrong order is one that fits."""

    def __init__(self, wide: int = 4, out: int = 2) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(wide, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6)
        )
        self.head = nn.Linear(6, out)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.head(self.body(x))


class Detector(nn.Module):
    """A network with a backbone of convolutions and batch norms, and buffers therefore."""

    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Linear(3, 6)
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3)
        )
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.head(self.neck(self.backbone(x.reshape(-1, 1, 8, 8)).mean(dim=(2, 3))))


class Block(nn.Module):
    """A transformer's layer under nanoGPT's names."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(wide)
        self.attn = nn.Module()
        self.attn.c_attn = nn.Linear(wide, 3 * wide)
        self.attn.c_proj = nn.Linear(wide, wide)
        self.attn.register_buffer("bias", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5))
        self.ln_2 = nn.LayerNorm(wide)
        self.mlp = nn.Module()
        self.mlp.c_fc = nn.Linear(wide, 4 * wide)
        self.mlp.c_proj = nn.Linear(4 * wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream."""
        q, k, v = self.attn.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(mixed)
        return x + self.mlp.c_proj(nn.functional.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """nanoGPT in miniature: names, tied weights, the mask as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(11, 8), "wpe": nn.Embedding(5, 8)}
        self.transformer = nn.ModuleDict(
            {**parts, "h": nn.ModuleList([Block(8), Block(8)]), "ln_f": nn.LayerNorm(8, bias=False)}
        )
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, rows: Tensor) -> Tensor:
        """Logits."""
        parts = self.transformer
        x = parts.wte(rows) + parts.wpe(torch.arange(rows.shape[1]))
        for block in parts.h:
            x = block(x)
        return self.lm_head(parts.ln_f(x))


def as_of_a_script(*classes: type) -> None:
    """Pickle the classes as a training script's, which no reader can import."""
    module = sys.modules.setdefault("train_script", types.ModuleType("train_script"))
    for each in classes:
        each.__module__ = "train_script"
        setattr(module, each.__name__, each)


def trained(
    network: nn.Module, *optimizers: Optimizer, inputs: Callable[[], Tensor] | None = None, steps: int = STEPS
) -> None:
    """A few steps, in which every parameter gets a gradient of its own."""
    draw = inputs or (lambda: torch.randn(16, next(network.parameters()).shape[1]))
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        out = network(draw())
        (out - torch.randn_like(out)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def net(seed: int = 0, wide: int = 4, out: int = 2, **adam: Any) -> tuple[Net, Adam]:
    torch.manual_seed(seed)
    network = Net(wide, out)
    optimizer = Adam(network.parameters(), lr=1e-2, **adam)
    trained(network, optimizer)
    return network, optimizer


def images() -> Tensor:
    return torch.randn(4, 64)


def tokens() -> Tensor:
    return torch.randint(0, 11, (4, 5))


# --- one network, one optimiser -------------------------------------------------------------------------------------


def kept(
    folder: Path,
    network: nn.Module,
    optimizer: Optimizer,
    file: str = "c.pt",
    *,
    model: str = "model",
    state: str = "optimizer",
    beside: dict[str, Any] | None = None,
    **more: Any,
) -> Written:
    """A dictionary of the two state dicts and what else a script writes; `more` is of `told`."""
    tree = {model: network.state_dict(), **(beside or {}), state: optimizer.state_dict()}
    torch.save(tree, folder / file)
    return told(folder / file, network, optimizer, **more)


def grouped(network: nn.Module, groups: Any, *, inputs: Callable[[], Tensor] | None = None, **adam: Any) -> AdamW:
    """AdamW over groups, trained."""
    optimizer = AdamW(groups, lr=1e-2, **adam)
    trained(network, optimizer, inputs=inputs)
    return optimizer


def seeded(make: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return make()


IN_ORDER: tuple[dict[str, Any], ...] = ({"groups_in_order": True},)


def tutorial(folder: Path) -> Written:
    names = {"model": "model_state_dict", "state": "optimizer_state_dict"}
    return kept(folder, *net(), "checkpoint.tar", **names, beside={"epoch": 3, "loss": torch.tensor(0.3)})


def imagenet(folder: Path) -> Written:
    """pytorch/examples: DataParallel, and the best score as a tensor."""
    network, optimizer = net()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30).state_dict()
    tree = {"epoch": 4, "arch": "resnet18", "best_acc1": torch.tensor(71.2), "scheduler": schedule}
    tree |= {"state_dict": nn.DataParallel(network).state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, folder / "model_best.pth.tar")
    return told(folder / "model_best.pth.tar", network, optimizer)


def frozen(folder: Path) -> Written:
    """A pretrained body that is frozen, as in the transfer-learning tutorial."""
    torch.manual_seed(0)
    network = Net()
    network.body.requires_grad_(False)
    optimizer = Adam(network.head.parameters())
    trained(network, optimizer)
    return kept(folder, network, optimizer, "c.pth", model="state_dict")


def by_decay(network: nn.Module, *, no_decay_first: bool, matrices: bool = False) -> list[dict[str, Any]]:
    """Weights that decay, and biases and norms that do not, each group in the model's order."""
    named = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
    plain = [p for name, p in named if p.dim() < 2 or (not matrices and name.endswith(".bias"))]
    decay = [p for _, p in named if not any(p is other for other in plain)]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return groups[::-1] if no_decay_first else groups


def nano_gpt(folder: Path, *, compiled: bool = False) -> Written:
    network = seeded(GPT)
    groups = by_decay(network, no_decay_first=False, matrices=True)
    optimizer = grouped(network, groups, inputs=tokens, betas=(0.9, 0.95))
    weights = network.state_dict()
    if compiled:
        weights = OrderedDict((f"_orig_mod.{name}", tensor) for name, tensor in weights.items())
    tree = {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "model_args": {"n_layer": 2, "n_head": 1, "n_embd": 8, "block_size": 5, "bias": True, "vocab_size": 11},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.47),
        "config": {"out_dir": "out-shakespeare-char", "eval_interval": 250, "always_save_checkpoint": False},
    }
    torch.save(tree, folder / "ckpt.pt")
    return told(folder / "ckpt.pt", network, optimizer, options=IN_ORDER)


def timm_style(folder: Path) -> Written:
    """CheckpointSaver's keys, and the groups of `param_groups_weight_decay`: what does not decay comes first."""
    network = seeded()
    ema = copy.deepcopy(network).state_dict()
    optimizer = grouped(network, by_decay(network, no_decay_first=True))
    args = argparse.Namespace(model="resnet50", lr=0.1, img_size=None, mean=[0.5, 0.5, 0.5])
    more = {"epoch": 3, "arch": "resnet50", "version": 2, "args": args, "state_dict_ema": ema, "metric": 71.4}
    return kept(folder, network, optimizer, "last.pth.tar", model="state_dict", beside=more, options=IN_ORDER)


def trainer_like(folder: Path) -> Written:
    """The loop of run_glue_no_trainer: two groups by name, decay first."""
    network = seeded()
    plain = [
        any(part in n for part in ("bias", "LayerNorm.weight", "norm.weight")) for n, _ in network.named_parameters()
    ]
    groups = [
        {
            "params": [p for p, flag in zip(network.parameters(), plain, strict=True) if flag == own],
            "weight_decay": decay,
        }
        for own, decay in ((False, 0.01), (True, 0.0))
    ]
    return kept(folder, network, grouped(network, groups), beside={"step": 3}, options=IN_ORDER)


def detr(folder: Path) -> Written:
    """Two groups, the backbone's last, though it is the second of three parts."""
    network = seeded(Detector)
    named = list(network.named_parameters())
    groups = [
        {"params": [p for n, p in named if "backbone" not in n]},
        {"params": [p for n, p in named if "backbone" in n], "lr": 1e-3},
    ]
    optimizer = grouped(network, groups, inputs=images, weight_decay=1e-4)
    args = argparse.Namespace(lr=1e-4, lr_backbone=1e-5, output_dir=Path("out"), masks=False, device="cuda")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 200).state_dict()
    more = {"lr_scheduler": schedule, "epoch": 299, "args": args}
    return kept(folder, network, optimizer, "checkpoint.pth", beside=more, options=IN_ORDER)


def mm_style(folder: Path) -> Written:
    """mmcv: strings and numbers in "meta"; with a paramwise_cfg, every parameter is a group of its own."""
    network = seeded(Detector)
    optimizer = grouped(network, [{"params": [p]} for p in network.parameters()], inputs=images)
    meta = {
        "epoch": 12,
        "iter": 87960,
        "mmcv_version": "1.7.1",
        "time": "Mon Jan  2 03:04:05 2023",
        "CLASSES": ("cat",),
    }
    return kept(folder, network, optimizer, "e.pth", model="state_dict", beside={"meta": meta})


def fairseq(folder: Path) -> Written:
    args = argparse.Namespace(arch="transformer", optimizer="adam", adam_betas="(0.9, 0.98)")
    history = [{"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam"}]
    extra = {"train_iterator": {"epoch": 2}, "val_loss": 3.1, "metrics": OrderedDict()}
    more = {"args": args, "cfg": None, "criterion": OrderedDict(), "optimizer_history": history, "task_state": {}}
    more["extra_state"] = extra
    return kept(folder, *net(), "checkpoint_best.pt", state="last_optimizer_state", beside=more)


# --- several networks or optimisers ---------------------------------------------------------------------------------


def gan(folder: Path, *, alike: bool = False) -> Written:
    """Two networks with an optimiser each; where they are alike, the optimisers come in the other order."""
    first, of_first = net(1)
    second, of_second = net(2) if alike else net(2, wide=5, out=1)
    states = {"optimizerD": of_second.state_dict(), "optimizerG": of_first.state_dict()}
    tree = {"epoch": 3, "netG": first.state_dict(), "netD": second.state_dict()}
    torch.save({**tree, **(states if alike else dict(reversed(states.items())))}, folder / "gan.pth")
    options = tuple({"weights_key": f"net{one}", "optimizer_key": f"optimizer{one}"} for one in "GD")
    return told(folder / "gan.pth", (first, second), (of_first, of_second), options=options)


def gan_files(folder: Path) -> Written:
    """The generator with the discriminator's optimiser: nothing that was trained together."""
    first, _ = net(1)
    _, of_second = net(2, wide=5, out=1)
    torch.save({"generator": first.state_dict(), "optimizer": of_second.state_dict()}, folder / "g.pth")
    return Written(folder / "g.pth", unsaid="the optimiser is another network's")


def both_trained(actor: nn.Module, critic: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(STEPS):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (actor(x).square().mean() + critic(x).square().mean()).backward()
        optimizer.step()


def actor_critic(folder: Path, *, critic_first: bool = False) -> Written:
    """One optimiser over two networks; the critic is as large as the actor where its parameters come first."""
    torch.manual_seed(0)
    actor, critic = Net(4, 2), Net(4, 2 if critic_first else 1)
    order = (critic, actor) if critic_first else (actor, critic)
    optimizer = Adam([parameter for network in order for parameter in network.parameters()], lr=1e-2)
    both_trained(actor, critic, optimizer)
    tree = {"actor": actor.state_dict(), "critic": critic.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, folder / "ac.pt")
    unsaid = "nothing says that the critic's parameters came first" if critic_first else ""
    return told(folder / "ac.pt", (actor, critic), optimizer, unsaid=unsaid)


def shuffled(folder: Path) -> Written:
    """One optimiser, given the head's parameters before the body's, where all have equal shapes."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    optimizer = Adam([*network[2].parameters(), *network[0].parameters(), *network[1].parameters()], lr=1e-2)
    trained(network, optimizer)
    return kept(folder, network, optimizer, unsaid="nothing says that the order is not the model's")


def ml_agents(folder: Path) -> Written:
    """TorchModelSaver of PPO: Adam over the actor's and then the critic's parameters, and a counter that is a
    module.
    """
    torch.manual_seed(0)
    actor, critic = Net(4, 2), Net(4, 1)
    optimizer = Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)
    both_trained(actor, critic, optimizer)
    tree = {
        "Policy": actor.state_dict(),
        "global_step": OrderedDict({"_GlobalSteps__global_step": torch.tensor([500032])}),
        "Optimizer:value_optimizer": optimizer.state_dict(),
        "Optimizer:critic": critic.state_dict(),
    }
    torch.save(tree, folder / "Behavior-500032.pt")
    return told(folder / "Behavior-500032.pt", (actor, critic), optimizer)


def rsl_rl_before_4(folder: Path) -> Written:
    """One ActorCritic of which `std` is the first parameter; what rsl-rl wrote until it had two models."""
    torch.manual_seed(0)
    both = nn.Module()
    both.std = nn.Parameter(torch.ones(2))
    both.actor = nn.Sequential(nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 6), nn.ELU(), nn.Linear(6, 2))
    both.critic = nn.Sequential(nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 6), nn.ELU(), nn.Linear(6, 1))
    optimizer = Adam(both.parameters(), lr=1e-2)
    for _ in range(STEPS):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        mean = both.actor(x)
        loss = -torch.distributions.Normal(mean, both.std).log_prob(torch.randn_like(mean)).mean()
        (loss + both.critic(x).square().mean()).backward()
        optimizer.step()
    names = {"model": "model_state_dict", "state": "optimizer_state_dict"}
    return kept(folder, both, optimizer, "model_1500.pt", **names, beside={"iter": 1500, "infos": None})


def target_network(folder: Path) -> Written:
    network, optimizer = net()
    target = {name: tensor + 1 for name, tensor in network.state_dict().items()}
    tree = {"target_net": target, "policy_net": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, folder / "dqn.pt")
    return told(folder / "dqn.pt", network, optimizer, options=({"weights_key": "policy_net"},))


def ema_inside(folder: Path) -> Written:
    """denoising-diffusion-pytorch: the average's state dict holds both networks under prefixes, and counters."""
    network, optimizer = net()
    averages = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in averages.parameters():
            parameter.mul_(0.9)
    ema = OrderedDict({"initted": torch.tensor(True), "step": torch.tensor(1000)})
    ema.update({f"online_model.{name}": tensor for name, tensor in network.state_dict().items()})
    ema.update({f"ema_model.{name}": tensor for name, tensor in averages.state_dict().items()})
    more = {"step": 1000, "ema": ema, "scaler": None, "version": "2.2.5"}
    return kept(folder, network, optimizer, "model-1.pt", state="opt", beside=more)


def averaged(folder: Path) -> Written:
    """torch's own AveragedModel beside the model, the average first."""
    network, optimizer = net()
    average = torch.optim.swa_utils.AveragedModel(network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(network)
    trained(network, optimizer)
    average.update_parameters(network)
    tree = {"ema": average.state_dict(), "model": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, folder / "c.pt")
    return told(folder / "c.pt", network, optimizer)


def several_files(folder: Path) -> Written:
    network, optimizer = net()
    for epoch in range(1, 4):
        trained(network, optimizer, steps=1)
        tree = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(tree, folder / f"epoch_{epoch}.pt")
    return told(folder, network, optimizer, unsaid="nothing says which of three", options=())


def split_files(folder: Path, weights: str = "model.pt", state: str = "optimizer.pt") -> Written:
    """Weights in one file, the optimiser's state in another; the folder is read."""
    network, optimizer = net()
    torch.save(network.state_dict(), folder / weights)
    torch.save(optimizer.state_dict(), folder / state)
    return told(folder, network, optimizer)


def beside(folder: Path) -> Written:
    """The same two, and the first is read."""
    whole = split_files(folder)
    return Written(
        folder / "model.pt", whole.live, whole.weights, options=({"optimizer_path": folder / "optimizer.pt"},)
    )


# --- pickled objects ------------------------------------------------------------------------------------------------


def whole_module(folder: Path) -> Written:
    network, _ = net()
    torch.save(network, folder / "model.pt")
    return Written(folder / "model.pt", unsaid="there is no optimiser")


def module_and_optimizer(folder: Path) -> Written:
    """Both objects: the optimiser's state is under the very parameters of the module."""
    network = seeded()
    groups = by_decay(network, no_decay_first=True)
    optimizer = grouped(network, [{**group, "params": group["params"][::-1]} for group in groups])
    torch.save({"model": network, "optimizer": optimizer, "epoch": 3}, folder / "c.pt")
    return told(folder / "c.pt", network, optimizer)


def module_and_state(folder: Path) -> Written:
    network, optimizer = net()
    torch.save({"model": network, "optimizer": optimizer.state_dict(), "epoch": 3}, folder / "c.pt")
    return told(folder / "c.pt", network, optimizer)


def yolo(folder: Path) -> Written:
    """YOLOv5: the module in half precision, its average, three groups, biases first and norms last."""
    torch.manual_seed(0)
    network = Detector()
    decay, norms, biases = [], [], []
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kind = biases if name == "bias" else norms if isinstance(module, nn.BatchNorm2d) else decay
            kind.append(parameter)
    optimizer = AdamW(biases, lr=1e-2, weight_decay=0.0)
    optimizer.add_param_group({"params": decay, "weight_decay": 5e-4})
    optimizer.add_param_group({"params": norms, "weight_decay": 0.0})
    trained(network, optimizer, inputs=images)
    average = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
    tree = {
        "epoch": 3,
        "best_fitness": 0.5,
        "model": copy.deepcopy(network).half(),
        "ema": average.half(),
        "updates": 3,
        "optimizer": optimizer.state_dict(),
        "opt": {"weights": "yolov5s.pt", "imgsz": 640},
        "git": {"remote": None},
        "date": "2024-01-02T03:04:05",
    }
    torch.save(tree, folder / "last.pt")
    return told(folder / "last.pt", network, optimizer, cast=torch.half, options=({"groups_in_order": True},))


def torch_script(folder: Path, *, optimizer_beside: bool = False) -> Written:
    network, optimizer = net()
    torch.jit.trace(network, torch.randn(2, 4)).save(str(folder / "model.pt"))
    if not optimizer_beside:
        return Written(folder / "model.pt", unsaid="there is no optimiser")
    torch.save(optimizer.state_dict(), folder / "state.pth")
    return told(folder / "model.pt", network, optimizer, options=({"optimizer_path": folder / "state.pth"},))


def plain_pickle(folder: Path, *, protocol: int) -> Written:
    network, optimizer = net()
    with (folder / "c.pkl").open("wb") as file:
        tree = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
        pickle.dump(tree, file, protocol=protocol)
    return told(folder / "c.pkl", network, optimizer)


def saved_with(folder: Path, *, protocol: int, old: bool) -> Written:
    network, optimizer = net()
    tree = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
    path = folder / "c.pt"
    torch.save(tree, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not old)
    try:
        torch.load(path, weights_only=False)
    except Exception as error:
        return told(path, network, optimizer, unsaid=f"torch itself does not read it ({type(error).__name__})")
    return told(path, network, optimizer)


def kinds() -> Iterable[Kind]:
    """All that need nothing but torch."""
    as_of_a_script(Net, Detector, Block, GPT)
    yield Kind("tutorial's dictionary", tutorial)
    yield Kind("ImageNet example, DataParallel", imagenet)
    yield Kind("frozen body", frozen)
    yield Kind("nanoGPT", nano_gpt, note="by hand")
    yield Kind("nanoGPT, compiled", partial(nano_gpt, compiled=True), note="by hand")
    yield Kind("timm, two groups", timm_style, note="by hand")
    yield Kind("Trainer-like, two groups", trainer_like, note="by hand")
    yield Kind("DETR, backbone last", detr, note="by hand")
    yield Kind("mmcv, a group a parameter", mm_style, note="by hand")
    yield Kind("fairseq", fairseq, note="by hand")
    yield Kind("GAN, two optimisers", gan)
    yield Kind("GAN, two networks alike", partial(gan, alike=True))
    yield Kind("GAN, the other's optimiser", gan_files)
    yield Kind("actor and critic, one optimiser", actor_critic)
    yield Kind("actor and critic, critic first", partial(actor_critic, critic_first=True))
    yield Kind("parameters in another order", shuffled)
    yield Kind("ML-Agents PPO", ml_agents, note="by hand")
    yield Kind("rsl-rl before 4", rsl_rl_before_4, note="by hand")
    yield Kind("DQN script, target first", target_network)
    yield Kind("diffusion, averages inside", ema_inside, note="by hand")
    yield Kind("AveragedModel first", averaged)
    yield Kind("folder of three checkpoints", several_files)
    yield Kind("folder: model.pt, optimizer.pt", split_files)
    yield Kind("model.pt beside optimizer.pt", beside)
    yield Kind("whole module", whole_module)
    yield Kind("whole module and optimiser", module_and_optimizer)
    yield Kind("whole module, state dict", module_and_state)
    yield Kind("YOLOv5", yolo, note="by hand")
    yield Kind("TorchScript", torch_script)
    yield Kind("TorchScript, optimiser beside", partial(torch_script, optimizer_beside=True))
    for protocol in (0, 1, 3, 4, 5):
        yield Kind(f"torch.save, pickle protocol {protocol}", partial(saved_with, protocol=protocol, old=False))
    for protocol in range(6):
        yield Kind(f"torch before 1.6, protocol {protocol}", partial(saved_with, protocol=protocol, old=True))
    for protocol in range(6):
        yield Kind(f"pickle, protocol {protocol}", partial(plain_pickle, protocol=protocol))
