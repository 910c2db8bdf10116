"""Checkpoints as scripts write them with torch alone: one writer a kind, and what was live when it wrote."""

from __future__ import annotations

import argparse
import copy
import pickle
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from benchmarks.checkpoints.networks import (
    GPT,
    STEPS,
    Block,
    Detector,
    Kind,
    Net,
    Written,
    as_of_a_script,
    by_decay,
    grouped,
    images,
    kept,
    net,
    seeded,
    tokens,
    told,
    trained,
)

# --- one network, one optimiser -------------------------------------------------------------------------------------

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
