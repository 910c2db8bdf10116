"""Checkpoints as scripts write them with torch alone: one writer a kind, and what was live when it wrote."""

from __future__ import annotations

import argparse
import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
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


# --- one network, one optimiser -------------------------------------------------------------------------------------


@kind("tutorial's dictionary")
def tutorial(folder: Path) -> Written:
    beside = {"epoch": 3, "loss": torch.tensor(0.3)}
    return kept(folder / "checkpoint.tar", *net(), "model_state_dict", "optimizer_state_dict", beside=beside)


@kind("ImageNet example, DataParallel")
def imagenet(folder: Path) -> Written:
    """pytorch/examples: DataParallel, and the best score as a tensor."""
    network, optimizer = net()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30).state_dict()
    tree = {"epoch": 4, "arch": "resnet18", "best_acc1": torch.tensor(71.2), "scheduler": schedule}
    tree |= {"state_dict": nn.DataParallel(network).state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, folder / "model_best.pth.tar")
    return told(folder / "model_best.pth.tar", network, optimizer)


@kind("frozen body")
def frozen(folder: Path) -> Written:
    """A pretrained body that is frozen, as in the transfer-learning tutorial."""
    network = made(Net)
    network.body.requires_grad_(False)
    optimizer = Adam(network.head.parameters())
    trained(network, by=optimizer)
    return kept(folder / "c.pth", network, optimizer, "state_dict")


@kind("nanoGPT", note="by hand")
@kind("nanoGPT, compiled", note="by hand", compiled=True)
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


@kind("timm, two groups", note="by hand")
def timm_style(folder: Path) -> Written:
    """CheckpointSaver's keys, and the groups of `param_groups_weight_decay`: what does not decay comes first."""
    network = made(Net)
    average, optimizer = copy.deepcopy(network).state_dict(), grouped(network, by_decay(network, no_decay_first=True))
    args = argparse.Namespace(model="resnet50", lr=0.1, img_size=None, mean=[0.5, 0.5, 0.5])
    beside = {"epoch": 3, "arch": "resnet50", "version": 2, "args": args, "state_dict_ema": average, "metric": 71.4}
    return kept(folder / "last.pth.tar", network, optimizer, "state_dict", beside=beside, options=IN_ORDER)


@kind("Trainer-like, two groups", note="by hand")
def trainer_like(folder: Path) -> Written:
    """The loop of run_glue_no_trainer: two groups by name, decay first."""
    network = made(Net)
    plain = [p for n, p in network.named_parameters() if any(part in n for part in ("bias", "norm.weight"))]
    decay = [p for p in network.parameters() if not any(p is other for other in plain)]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    return kept(folder / "c.pt", network, grouped(network, groups), beside={"step": 3}, options=IN_ORDER)


@kind("DETR, backbone last", note="by hand")
def detr(folder: Path) -> Written:
    """Two groups, the backbone's last, though it is the second of three parts."""
    network = made(Detector)
    first = [*network.neck.parameters(), *network.head.parameters()]
    optimizer = grouped(network, [{"params": first}, {"params": [*network.backbone.parameters()], "lr": 1e-3}])
    args = argparse.Namespace(lr=1e-4, lr_backbone=1e-5, output_dir=Path("out"), masks=False, device="cuda")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 200).state_dict()
    beside = {"lr_scheduler": schedule, "epoch": 299, "args": args}
    return kept(folder / "checkpoint.pth", network, optimizer, beside=beside, options=IN_ORDER)


@kind("mmcv, a group a parameter", note="by hand")
def mm_style(folder: Path) -> Written:
    """Strings and numbers in "meta"; with a paramwise_cfg, every parameter is a group of its own."""
    network = made(Detector)
    optimizer = grouped(network, [{"params": [p]} for p in network.parameters()])
    meta = {"epoch": 12, "mmcv_version": "1.7.1", "time": "Mon Jan  2 03:04:05 2023", "CLASSES": ("cat",)}
    return kept(folder / "e.pth", network, optimizer, "state_dict", beside={"meta": meta})


@kind("fairseq", note="by hand")
def fairseq(folder: Path) -> Written:
    args = argparse.Namespace(arch="transformer", optimizer="adam", adam_betas="(0.9, 0.98)")
    history = [{"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam"}]
    extra = {"train_iterator": {"epoch": 2}, "val_loss": 3.1, "metrics": OrderedDict()}
    beside = {"args": args, "cfg": None, "criterion": OrderedDict(), "optimizer_history": history, "task_state": {}}
    return kept(folder / "c.pt", *net(), state="last_optimizer_state", beside={**beside, "extra_state": extra})


# --- several networks or optimisers ---------------------------------------------------------------------------------


@kind("GAN, two optimisers")
@kind("GAN, two networks alike", alike=True)
def gan(folder: Path, *, alike: bool = False) -> Written:
    """Two networks with an optimiser each; where they are alike, the optimisers come in the other order."""
    first, of_first = net(1)
    second, of_second = net(2) if alike else net(2, wide=5, out=1)
    states = {"optimizerD": of_second.state_dict(), "optimizerG": of_first.state_dict()}
    tree = {"epoch": 3, "netG": first.state_dict(), "netD": second.state_dict()}
    torch.save({**tree, **(states if alike else dict(reversed(states.items())))}, folder / "gan.pth")
    options = tuple({"weights_key": f"net{one}", "optimizer_key": f"optimizer{one}"} for one in "GD")
    return told(folder / "gan.pth", (first, second), (of_first, of_second), options=options)


@kind("GAN, the other's optimiser")
def gan_files(folder: Path) -> Written:
    """The generator with the discriminator's optimiser: nothing that was trained together."""
    torch.save(
        {"generator": net(1)[0].state_dict(), "optimizer": net(2, wide=5, out=1)[1].state_dict()}, folder / "g.pth"
    )
    return Written(folder / "g.pth", unsaid="the optimiser is another network's")


@kind("actor and critic, one optimiser")
@kind("actor and critic, critic first", critic_first=True)
def actor_critic(folder: Path, *, critic_first: bool = False) -> Written:
    """One optimiser over two networks; the critic is as large as the actor where its parameters come first."""
    actor, critic = made(Net), Net(4, 2 if critic_first else 1)
    order = (critic, actor) if critic_first else (actor, critic)
    optimizer = Adam([parameter for network in order for parameter in network.parameters()], lr=1e-2)
    trained(actor, critic, by=optimizer)
    tree = {"actor": actor.state_dict(), "critic": critic.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, folder / "ac.pt")
    unsaid = "nothing says that the critic's parameters came first" if critic_first else ""
    return told(folder / "ac.pt", (actor, critic), optimizer, unsaid=unsaid)


@kind("parameters in another order")
def shuffled(folder: Path) -> Written:
    """One optimiser, given the head's parameters before the body's, where all have equal shapes."""
    network = made(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)))
    optimizer = Adam([*network[2].parameters(), *network[0].parameters(), *network[1].parameters()], lr=1e-2)
    trained(network, by=optimizer)
    return kept(folder / "c.pt", network, optimizer, unsaid="nothing says that the order is not the model's")


@kind("ML-Agents PPO", note="by hand")
def ml_agents(folder: Path) -> Written:
    """TorchModelSaver: Adam over the actor's and then the critic's parameters, and a counter that is a module."""
    actor, critic = made(Net), Net(4, 1)
    optimizer = Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)
    trained(actor, critic, by=optimizer)
    steps = OrderedDict({"_GlobalSteps__global_step": torch.tensor([500032])})
    tree = {"Policy": actor.state_dict(), "global_step": steps, "Optimizer:value_optimizer": optimizer.state_dict()}
    torch.save({**tree, "Optimizer:critic": critic.state_dict()}, folder / "Behavior-500032.pt")
    return told(folder / "Behavior-500032.pt", (actor, critic), optimizer)


@kind("rsl-rl before 4", note="by hand")
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


@kind("DQN script, target first")
def target_network(folder: Path) -> Written:
    network, optimizer = net()
    target = {"target_net": {name: tensor + 1 for name, tensor in network.state_dict().items()}}
    torch.save({**target, "policy_net": network.state_dict(), "optimizer": optimizer.state_dict()}, folder / "dqn.pt")
    return told(folder / "dqn.pt", network, optimizer, options=({"weights_key": "policy_net"},))


@kind("diffusion, averages inside", note="by hand")
def ema_inside(folder: Path) -> Written:
    """denoising-diffusion-pytorch: the average's state dict holds both networks under prefixes, and counters."""
    network, optimizer = net()
    ema = OrderedDict({"initted": torch.tensor(True), "step": torch.tensor(1000)})
    ema.update({f"online_model.{name}": tensor for name, tensor in network.state_dict().items()})
    ema.update({f"ema_model.{name}": 0.9 * tensor for name, tensor in network.state_dict().items()})
    beside = {"step": 1000, "ema": ema, "scaler": None, "version": "2.2.5"}
    return kept(folder / "model-1.pt", network, optimizer, state="opt", beside=beside)


@kind("AveragedModel first")
def averaged(folder: Path) -> Written:
    """torch's own AveragedModel beside the model, the average first."""
    network, optimizer = net()
    average = torch.optim.swa_utils.AveragedModel(network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        trained(network, by=optimizer)
        average.update_parameters(network)
    tree = {"ema": average.state_dict(), "model": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(tree, folder / "c.pt")
    return told(folder / "c.pt", network, optimizer)


@kind("folder of three checkpoints")
def several_files(folder: Path) -> Written:
    network, optimizer = net()
    for epoch in range(1, 4):
        trained(network, by=optimizer, steps=1)
        last = kept(folder / f"epoch_{epoch}.pt", network, optimizer, beside={"epoch": epoch})
    return replace(last, path=folder, unsaid="nothing says which of three")


@kind("folder: model.pt, optimizer.pt")
@kind("model.pt beside optimizer.pt", read="model.pt")
def split_files(folder: Path, *, read: str = "") -> Written:
    """Weights in one file, the optimiser's state in another; the folder is read, or the first."""
    network, optimizer = net()
    torch.save(network.state_dict(), folder / "model.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    options = ({"optimizer_path": folder / "optimizer.pt"},) if read else ()
    return told(folder / read, network, optimizer, options=options)


# --- pickled objects ------------------------------------------------------------------------------------------------


@kind("whole module")
def whole_module(folder: Path) -> Written:
    torch.save(net()[0], folder / "model.pt")
    return Written(folder / "model.pt", unsaid="there is no optimiser")


@kind("whole module and optimiser")
def module_and_optimizer(folder: Path) -> Written:
    """Both objects: the optimiser's state is under the very parameters of the module."""
    network = made(Net)
    groups = by_decay(network, no_decay_first=True)
    optimizer = grouped(network, [{**group, "params": group["params"][::-1]} for group in groups])
    torch.save({"model": network, "optimizer": optimizer, "epoch": 3}, folder / "c.pt")
    return told(folder / "c.pt", network, optimizer)


@kind("whole module, state dict")
def module_and_state(folder: Path) -> Written:
    network, optimizer = net()
    torch.save({"model": network, "optimizer": optimizer.state_dict(), "epoch": 3}, folder / "c.pt")
    return told(folder / "c.pt", network, optimizer)


@kind("YOLOv5", note="by hand")
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


@kind("TorchScript")
@kind("TorchScript, optimiser beside", optimizer_beside=True)
def torch_script(folder: Path, *, optimizer_beside: bool = False) -> Written:
    network, optimizer = net()
    torch.jit.trace(network, torch.randn(2, 4)).save(str(folder / "model.pt"))
    if not optimizer_beside:
        return Written(folder / "model.pt", unsaid="there is no optimiser")
    torch.save(optimizer.state_dict(), folder / "state.pth")
    return told(folder / "model.pt", network, optimizer, options=({"optimizer_path": folder / "state.pth"},))


def saved_with(folder: Path, *, protocol: int, old: bool) -> Written:
    network, optimizer = net()
    tree, path = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}, folder / "c.pt"
    torch.save(tree, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not old)
    # A reference to a storage has no place in the oldest protocol.
    return told(path, network, optimizer, unsaid="torch itself does not read it" if protocol == 0 else "")


def plain_pickle(folder: Path, *, protocol: int) -> Written:
    network, optimizer = net()
    tree = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
    (folder / "c.pkl").write_bytes(pickle.dumps(tree, protocol))
    return told(folder / "c.pkl", network, optimizer)


for _protocol in (0, 1, 3, 4, 5):
    kind(f"torch.save, pickle protocol {_protocol}", protocol=_protocol, old=False)(saved_with)
for _protocol in range(6):
    kind(f"torch before 1.6, protocol {_protocol}", protocol=_protocol, old=True)(saved_with)
    kind(f"pickle, protocol {_protocol}", protocol=_protocol)(plain_pickle)
