"""Checkpoints as well-known scripts write them with torch alone, their layouts written by hand.

What any script may write is in tests/formats and tests/readers.
"""

from __future__ import annotations

import argparse
import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW

from benchmarks.checkpoints.networks import Detector, Net, Written, by_decay, gpt, kept, kind, net, told, trained

IN_ORDER: tuple[dict[str, Any], ...] = ({"groups_in_order": True},)


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def grouped(network: nn.Module, groups: Any, **adam: Any) -> AdamW:
    """AdamW over groups, trained."""
    optimizer = AdamW(groups, lr=1e-2, **adam)
    trained(network, by=optimizer)
    return optimizer


@kind("nanoGPT")
@kind("nanoGPT, compiled", compiled=True)
def nano_gpt(folder: Path, *, compiled: bool = False) -> Written:
    network = made(gpt)
    optimizer = grouped(network, by_decay(network, no_decay_first=False, matrices=True), betas=(0.9, 0.95))
    tree = {
        "model": {f"{'_orig_mod.' * compiled}{name}": tensor for name, tensor in network.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": {"n_layer": 2, "n_head": 1, "n_embd": 8, "block_size": 5, "bias": True, "vocab_size": 11},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.47),
        "config": {"out_dir": "out-shakespeare-char", "eval_interval": 250, "always_save_checkpoint": False},
    }
    torch.save(tree, folder / "ckpt.pt")
    return told(folder / "ckpt.pt", network, optimizer, options=IN_ORDER)


@kind("timm, two groups")
def timm_style(folder: Path) -> Written:
    """CheckpointSaver's keys, and the groups of `param_groups_weight_decay`: what does not decay comes first."""
    network = made(Net)
    average, optimizer = copy.deepcopy(network).state_dict(), grouped(network, by_decay(network, no_decay_first=True))
    args = argparse.Namespace(model="resnet50", lr=0.1, img_size=None, mean=[0.5, 0.5, 0.5])
    beside = {"epoch": 3, "arch": "resnet50", "version": 2, "args": args, "state_dict_ema": average, "metric": 71.4}
    return kept(folder / "last.pth.tar", network, optimizer, "state_dict", beside=beside, options=IN_ORDER)


@kind("DETR, backbone last")
def detr(folder: Path) -> Written:
    """Two groups, the backbone's last, though it is the second of three parts."""
    network = made(Detector)
    first = [*network.neck.parameters(), *network.head.parameters()]
    optimizer = grouped(network, [{"params": first}, {"params": [*network.backbone.parameters()], "lr": 1e-3}])
    args = argparse.Namespace(lr=1e-4, lr_backbone=1e-5, output_dir=Path("out"), masks=False, device="cuda")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 200).state_dict()
    beside = {"lr_scheduler": schedule, "epoch": 299, "args": args}
    return kept(folder / "checkpoint.pth", network, optimizer, beside=beside, options=IN_ORDER)


@kind("mmcv, a group a parameter")
def mm_style(folder: Path) -> Written:
    """Strings and numbers in "meta"; with a paramwise_cfg, every parameter is a group of its own."""
    network = made(Detector)
    optimizer = grouped(network, [{"params": [p]} for p in network.parameters()])
    meta = {"epoch": 12, "mmcv_version": "1.7.1", "time": "Mon Jan  2 03:04:05 2023", "CLASSES": ("cat",)}
    return kept(folder / "e.pth", network, optimizer, "state_dict", beside={"meta": meta})


@kind("fairseq")
def fairseq(folder: Path) -> Written:
    args = argparse.Namespace(arch="transformer", optimizer="adam", adam_betas="(0.9, 0.98)")
    history = [{"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam"}]
    extra = {"train_iterator": {"epoch": 2}, "val_loss": 3.1, "metrics": OrderedDict()}
    beside = {"args": args, "cfg": None, "criterion": OrderedDict(), "optimizer_history": history, "task_state": {}}
    return kept(folder / "c.pt", *net(), state="last_optimizer_state", beside={**beside, "extra_state": extra})


@kind("parameters in another order")
def shuffled(folder: Path) -> Written:
    """One optimiser, given the head's parameters before the body's, where all have equal shapes."""
    network = made(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)))
    optimizer = Adam([*network[2].parameters(), *network[0].parameters(), *network[1].parameters()], lr=1e-2)
    trained(network, by=optimizer)
    return kept(folder / "c.pt", network, optimizer, unsaid="nothing says that the order is not the model's")


@kind("ML-Agents PPO")
def ml_agents(folder: Path) -> Written:
    """TorchModelSaver: Adam over the actor's and then the critic's parameters, and a counter that is a module."""
    actor, critic = made(Net), Net(4, 1)
    optimizer = Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)
    trained(actor, critic, by=optimizer)
    steps = OrderedDict({"_GlobalSteps__global_step": torch.tensor([500032])})
    tree = {"Policy": actor.state_dict(), "global_step": steps, "Optimizer:value_optimizer": optimizer.state_dict()}
    torch.save({**tree, "Optimizer:critic": critic.state_dict()}, folder / "Behavior-500032.pt")
    return told(folder / "Behavior-500032.pt", (actor, critic), optimizer)


@kind("rsl-rl before 4")
def rsl_rl_before_4(folder: Path) -> Written:
    """One ActorCritic of which `std` is the first parameter; what rsl-rl wrote until it had two models."""
    both = made(nn.Module)
    both.std = nn.Parameter(torch.ones(2))
    both.actor = nn.Sequential(nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 6), nn.ELU(), nn.Linear(6, 2))
    both.critic = nn.Sequential(nn.Linear(4, 6), nn.ELU(), nn.Linear(6, 6), nn.ELU(), nn.Linear(6, 1))
    optimizer = Adam(both.parameters(), lr=1e-2)
    trained(both, by=optimizer)
    beside = {"iter": 1500, "infos": None}
    return kept(folder / "model_1500.pt", both, optimizer, "model_state_dict", "optimizer_state_dict", beside=beside)


@kind("diffusion, averages inside")
def ema_inside(folder: Path) -> Written:
    """denoising-diffusion-pytorch: the average's state dict holds both networks under prefixes, and counters."""
    network, optimizer = net()
    ema = OrderedDict({"initted": torch.tensor(True), "step": torch.tensor(1000)})
    ema.update({f"online_model.{name}": tensor for name, tensor in network.state_dict().items()})
    ema.update({f"ema_model.{name}": 0.9 * tensor for name, tensor in network.state_dict().items()})
    beside = {"step": 1000, "ema": ema, "scaler": None, "version": "2.2.5"}
    return kept(folder / "model-1.pt", network, optimizer, state="opt", beside=beside)


@kind("YOLOv5")
def yolo(folder: Path) -> Written:
    """The module in half precision, its average, three groups, biases first and norms last."""
    network = made(Detector)
    decay, norms, biases = [], [], []
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            (biases if name == "bias" else norms if isinstance(module, nn.BatchNorm2d) else decay).append(parameter)
    optimizer = AdamW(biases, lr=1e-2, weight_decay=0.0)
    optimizer.add_param_group({"params": decay, "weight_decay": 5e-4})
    optimizer.add_param_group({"params": norms, "weight_decay": 0.0})
    trained(network, by=optimizer)
    average = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
    tree = {"epoch": 3, "best_fitness": 0.5, "model": copy.deepcopy(network).half(), "ema": average.half()}
    tree |= {"updates": 3, "optimizer": optimizer.state_dict(), "opt": {"weights": "yolov5s.pt", "imgsz": 640}}
    torch.save({**tree, "git": {"remote": None}, "date": "2024-01-02T03:04:05"}, folder / "last.pt")
    return told(folder / "last.pt", network, optimizer, cast=torch.half, options=IN_ORDER)
