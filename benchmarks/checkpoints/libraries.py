"""Checkpoints written by other people's libraries, each by its own way of saving; imports are inside the writers."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.checkpoints.write import KINDS, Net, Written, kind, second_moment, told, trained

__all__ = ["KINDS"]
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def rows(n: int = 32, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and classes."""
    random = np.random.default_rng(0)
    return random.normal(size=(n, *(shape or (4,)))).astype(np.float32), random.integers(0, 2, n)


def stable_baselines(folder: Path, *, name: str, images: bool = False, **more: Any) -> Written:
    """One zip: policy.pth and a file an optimiser, whose parameters are parts of the policy's."""
    import gymnasium
    import stable_baselines3

    class Line(gymnasium.Env):
        """Random numbers for observations and rewards."""

        observation_space = gymnasium.spaces.Box(*((0, 255, (3, 36, 36), np.uint8) if images else (-1, 1, (4,))))
        action_space = gymnasium.spaces.Discrete(3) if name == "DQN" else gymnasium.spaces.Box(-1, 1, (2,))

        def reset(self, **_: Any) -> Any:
            """A first observation."""
            self.left = 5
            return self.observation_space.sample(), {}

        def step(self, _: Any) -> Any:
            """A random one, five times."""
            self.left -= 1
            return self.observation_space.sample(), float(np.random.rand()), self.left == 0, False, {}

    off_policy = name in ("SAC", "TD3", "DQN")
    often = {"learning_starts": 8, "batch_size": 8, "train_freq": 1} if off_policy else {"n_steps": 8}
    often |= {"batch_size": 4, "n_epochs": 2} if name == "PPO" else {}
    layers = {"net_arch": [6, 6]} | more.pop("policy_kwargs", {})
    layers |= {"features_extractor_kwargs": {"features_dim": 6}} if images else {}
    kind_of = "CnnPolicy" if images else "MlpPolicy"
    agent = getattr(stable_baselines3, name)(kind_of, Line(), policy_kwargs=layers, seed=0, **often, **more)
    agent.learn(24)
    path, policy = folder / "agent.zip", agent.policy
    agent.save(path)
    if name not in ("SAC", "TD3"):
        return told(path, policy, policy.optimizer)
    # The critics' optimiser has no parameters of the targets'; SAC's entropy coefficient is a tensor of its own.
    keys = [{"weights_key": f"policy.{part}", "optimizer_key": f"{part}.optimizer"} for part in ("actor", "critic")]
    whole = told(path, policy, [policy.actor.optimizer, policy.critic.optimizer], options=tuple(keys))
    if name == "SAC":
        state = agent.ent_coef_optimizer.state[agent.log_ent_coef]
        whole.live["log_ent_coef"] = second_moment(state, agent.ent_coef_optimizer.param_groups[0])
        whole.weights["log_ent_coef"] = agent.log_ent_coef.detach().clone()
    return replace(whole, optional=("log_ent_coef",))


for _name in ("PPO", "A2C", "DQN", "SAC", "TD3"):
    kind(f"SB3 {_name}", "stable_baselines3", "gymnasium", name=_name)(stable_baselines)
# One extractor has three names; apart, there are two, of which one has two names.
for _title, _options in {
    "A2C, Adam": {"name": "A2C", "use_rms_prop": False},
    "PPO, images": {"name": "PPO", "images": True},
    "PPO, images, apart": {"name": "PPO", "images": True, "policy_kwargs": {"share_features_extractor": False}},
}.items():
    kind(f"SB3 {_title}", "stable_baselines3", "gymnasium", **_options)(stable_baselines)


@kind("skorch, params.pt", "skorch", read="params.pt")
@kind("skorch, the folder", "skorch")
@kind("skorch TrainEndCheckpoint", "skorch", callback=True)
def skorch(folder: Path, *, read: str = "", callback: bool = False) -> Written:
    """`save_params`, or its callback's files (TrainEndCheckpoint puts train_end_ before their names)."""
    import skorch as library

    callbacks = [library.callbacks.TrainEndCheckpoint(dirname=str(folder))] if callback else []
    how = {"max_epochs": 2, "batch_size": 8, "optimizer": torch.optim.Adam, "criterion": nn.CrossEntropyLoss}
    torch.manual_seed(0)
    classifier = library.NeuralNetClassifier(Net, **how, callbacks=callbacks, verbose=0).fit(*rows())
    if not callback:
        names = {"f_params": "params.pt", "f_optimizer": "optimizer.pt", "f_history": "history.json"}
        classifier.save_params(**{key: str(folder / name) for key, name in names.items()})
    options = ({"optimizer_path": folder / "optimizer.pt"},) if read else ()
    return told(folder / read, classifier.module_, classifier.optimizer_, options=options)


def lightning(folder: Path, *, package: str, variant: str = "plain") -> Written:
    """One .ckpt by the Trainer, with what people keep in it."""
    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
        """A network and what `save_hyperparameters` finds."""

        def __init__(self, width: int = 4, optimizer_class: Any = torch.optim.Adam, config: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net(width)
            self.loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.5]) if variant == "weights" else None)
            if variant == "metric":
                self.accuracy = importlib.import_module("torchmetrics").Accuracy(task="binary")
                self.accuracy.persistent(True)
            self.automatic_optimization = variant != "two"

        def training_step(self, batch: Any, _: int) -> Any:
            """Cross-entropy."""
            scores = self.net(batch[0])
            loss = self.loss(scores, batch[1])
            if variant == "metric":
                self.accuracy(scores.argmax(dim=1), batch[1])
                self.log("accuracy", self.accuracy)
            self.log("loss", loss)
            if self.automatic_optimization:
                return loss
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            """One over all, or one a part, the head's first."""
            if variant == "two":
                return [torch.optim.Adam(part.parameters(), 1e-2) for part in (self.net.head, self.net.body)]
            optimizer = self.hparams.optimizer_class(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]

    config = {"lr": 0.01, "layers": [6, 6], "name": "${lr}"}
    first = {"config": importlib.import_module("omegaconf").OmegaConf.create(config)} if variant == "omegaconf" else {}
    torch.manual_seed(0)
    module = Module(**first)
    if variant == "plain":
        # Without the class: what a careful script keeps.
        module.hparams.pop("optimizer_class", None)
        module._hparams_initial = dict(module.hparams)
        module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=1e-2)
    saver = pl.callbacks.ModelCheckpoint(dirpath=folder, save_last=True, monitor="loss")
    early = [pl.callbacks.EarlyStopping("loss")] if variant != "two" else []
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=[saver, *early], **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(*map(torch.from_numpy, rows())), batch_size=8))
    path = folder / "by_hand.ckpt"
    trainer.save_checkpoint(path)
    keys = [{"optimizer_key": f"optimizer_states.{number}"} for number in range(2)] if variant == "two" else []
    unsaid = "nothing says which of net.head.bias and loss.weight is a buffer" if variant == "weights" else ""
    return told(path, module, trainer.optimizers, options=tuple(keys), unsaid=unsaid)


for _package, _version in (("lightning.pytorch", "2."), ("pytorch_lightning", "1.")):
    for _variant, _said in {
        "plain": "",
        "class": ", a class in hparams",
        "omegaconf": ", omegaconf in hparams",
        "metric": ", a metric's state",
        "two": ", two optimisers",
        "weights": ", class weights",
    }.items():
        _needs = [
            _package.partition(".")[0],
            *{"omegaconf": ["omegaconf"], "metric": ["torchmetrics"]}.get(_variant, []),
        ]
        kind(f"Lightning {_version}x{_said}", *_needs, version=_version, package=_package, variant=_variant)(lightning)


@kind("accelerate save_state", "accelerate")
@kind("accelerate, not safetensors", "accelerate", safe=False)
def accelerate(folder: Path, *, safe: bool = True) -> Written:
    import accelerate as library

    accelerator = library.Accelerator(cpu=True)
    torch.manual_seed(0)
    network = Net()
    prepared, wrapped = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=1e-2))
    trained(prepared, wrapped)
    accelerator.save_state(str(folder / "step_3"), safe_serialization=safe)
    accelerator.free_memory()
    return told(folder / "step_3", network, wrapped.optimizer)


@kind("transformers Trainer", "transformers", "accelerate")
def hugging_face(folder: Path) -> Written:
    """A real Trainer's folder: model.safetensors, optimizer.pt, trainer_state.json, …"""
    import transformers

    tokens = torch.randint(3, 20, (16, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": ids, "labels": torch.tensor(row % 2)} for row, ids in enumerate(tokens)]
    torch.manual_seed(0)
    shape = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**shape, intermediate_size=16, max_position_embeddings=8)
    network = transformers.BertForSequenceClassification(config)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, save_steps=4, use_cpu=True, report_to=[]
    )
    trainer = transformers.Trainer(network, arguments, train_dataset=data)
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    # Whoever has the model passes it; without it only the names tell.
    return told(folder / "checkpoint-4", network, optimizer, options=({"param_names": order_of(network, optimizer)},))


def order_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimiser's parameters."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


@kind("ignite Checkpoint, two groups", "ignite")
def ignite(folder: Path) -> Written:
    """Checkpoint's file of a dictionary of everything that has a state dict."""
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    torch.manual_seed(0)
    network = Net()
    matrices, rest = ([p for p in network.parameters() if (p.dim() == 2) is flag] for flag in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest}], lr=1e-2)
    trainer = Engine(lambda _, batch: trained(network, optimizer, steps=1))
    saver = Checkpoint({"trainer": trainer, "model": network, "optimizer": optimizer}, DiskSaver(str(folder)))
    trainer.add_event_handler(Events.COMPLETED, saver)
    trainer.run(range(3), max_epochs=1)
    return told(folder / str(saver.last_checkpoint), network, optimizer, options=({"groups_in_order": True},))


def optimiser(folder: Path, *, path: str, unsaid: str = "", muon: bool = False, wide: int = 4, **more: Any) -> Written:
    """A script's file of weights and of a package's optimiser, which has not called its `eval()`.

    `muon` gives it two groups, the matrices' first.
    """
    module, _, name = path.rpartition(".")
    torch.manual_seed(0)
    network = Net(wide) if wide == 4 else nn.Sequential(nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 2))
    first: Any = network.parameters()
    if muon:
        by_kind = [[p for p in network.parameters() if (p.dim() == 2) is flag] for flag in (True, False)]
        first = [{"params": params, "use_muon": flag} for params, flag in zip(by_kind, (True, False), strict=True)]
    optimizer = getattr(importlib.import_module(module), name)(first, **more)
    if hasattr(optimizer, "train"):
        optimizer.train()
    trained(network, optimizer)
    torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, folder / "c.pt")
    live, weights, order = dict[str, Tensor](), dict[str, Tensor](), order_of(network, optimizer)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for key in order if not unsaid else ():
        parameter = network.get_parameter(key)
        moment = corrected(optimizer.state[parameter], groups[id(parameter)])
        if moment is not None:
            live[key], weights[key] = moment, parameter.detach().clone()
    options = ({"param_names": order},) if len(optimizer.param_groups) > 1 else ()
    return Written(folder / "c.pt", live, weights, options=options, unsaid=unsaid)


def corrected(state: dict[str, Any], group: dict[str, Any]) -> Tensor | None:
    """v̂ of an average under whichever name, in double precision; None of what has none."""
    stored = next((state[key] for key in ("exp_avg_sq", "state2") if key in state), None)
    if stored is None or group.get("use_muon"):
        return None
    if hasattr(stored, "codes"):
        stored = stored.dequantize()
    count = next(float(place[key]) for place in (state, group) for key in ("step", "k") if key in place)
    return stored.detach().double() / (1 - group["betas"][1] ** count)


_OWN = "pytorch_optimizer.optimizer"
_ALIKE = {"unsaid": "its state looks as those of others, which are read differently"}
_NONE = {"unsaid": "there is no second moment of the gradients"}
for _title, _path, _more in (
    ("Schedule-Free AdamW, in training", "schedulefree.AdamWScheduleFree", {}),
    ("Schedule-Free RAdam, in training", "schedulefree.RAdamScheduleFree", {"silent_sgd_phase": False}),
    ("Schedule-Free SGD", "schedulefree.SGDScheduleFree", _NONE),
    ("torchao AdamW8bit", "torchao.optim.AdamW8bit", {"wide": 64}),
    ("torchao AdamW4bit", "torchao.optim.AdamW4bit", {"wide": 64}),
    ("torchao AdamWFp8", "torchao.optim.AdamWFp8", {"wide": 64}),
    ("AdEMAMix of bitsandbytes", "bitsandbytes.optim.AdEMAMix", {}),
    ("Muon and Adam of one optimiser", "muon.SingleDeviceMuonWithAuxAdam", {"muon": True}),
    ("NorMuon and Adam", f"{_OWN}.muon.normuon.NorMuon", {"muon": True}),
    ("AdaMuon and Adam", f"{_OWN}.muon.adamuon.AdaMuon", {"muon": True}),
    ("Lion of lion_pytorch", "lion_pytorch.Lion", _NONE),
    ("AdEMAMix of pytorch_optimizer", f"{_OWN}.ademamix.AdEMAMix", {}),
    ("Schedule-Free of pytorch_optimizer", f"{_OWN}.schedulefree.ScheduleFreeAdamW", {}),
    *(
        (f"{name.rpartition('.')[2]} of pytorch_optimizer", f"{_OWN}.{name}", _ALIKE)
        for name in ("adopt.ADOPT", "mars.MARS", "prodigy.Prodigy", "yogi.Yogi", "adamod.AdaMod", "came.CAME")
    ),
    ("StableAdamW of pytorch_optimizer", f"{_OWN}.adamw.StableAdamW", _ALIKE),
    ("GaLore of pytorch_optimizer", f"{_OWN}.galore.GaLore", _NONE),
):
    kind(f"optimiser: {_title}", _path.partition(".")[0], path=_path, **_more)(optimiser)
