"""Checkpoints written by other people's libraries, each by its own way of saving; imports are inside the writers."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.checkpoints.networks import Kind, Net, Written, by_decay, second_moment, told, trained

# --- reinforcement learning -----------------------------------------------------------------------------------------


def stable_baselines(folder: Path, *, name: str, images: bool = False, **more: Any) -> Written:
    """One zip: policy.pth and a file an optimiser, whose parameters are parts of the policy's."""
    import gymnasium
    import stable_baselines3

    class Line(gymnasium.Env):
        """Random numbers for observations and rewards."""

        observation_space = gymnasium.spaces.Box(*((0, 255, (3, 36, 36), np.uint8) if images else (-1, 1, (4,))))
        action_space = gymnasium.spaces.Discrete(3) if name in ("DQN",) else gymnasium.spaces.Box(-1, 1, (2,))

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
    kind = "CnnPolicy" if images else "MlpPolicy"
    agent = getattr(stable_baselines3, name)(kind, Line(), policy_kwargs=layers, seed=0, **often, **more)
    agent.learn(24)
    path = folder / "agent.zip"
    agent.save(path)
    policy = agent.policy
    if name in ("SAC", "TD3"):
        # The critics' optimiser has no parameters of the targets'; SAC's entropy coefficient is a tensor of its own.
        networks, optimizers = policy, [policy.actor.optimizer, policy.critic.optimizer]
        keys = [{"weights_key": f"policy.{part}", "optimizer_key": f"{part}.optimizer"} for part in ("actor", "critic")]
        whole = told(path, networks, optimizers, options=tuple(keys))
        if name == "SAC":
            state = agent.ent_coef_optimizer.state[agent.log_ent_coef]
            whole.live["log_ent_coef"] = second_moment(state, agent.ent_coef_optimizer.param_groups[0])
            whole.weights["log_ent_coef"] = agent.log_ent_coef.detach().clone()
        return replace(whole, optional=("log_ent_coef",))
    return told(path, policy, policy.optimizer)


def rsl_rl(folder: Path) -> Written:
    """Two state dicts and one Adam over the actor's and the critic's parameters."""
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    class Line(VecEnv):
        """Four robots that do nothing."""

        num_envs, num_actions, max_episode_length, device = 4, 2, 10, "cpu"
        cfg: Any = {}  # noqa: RUF012

        def __init__(self) -> None:
            self.episode_length_buf = torch.zeros(4, dtype=torch.long)

        def get_observations(self) -> TensorDict:
            """Random numbers."""
            return TensorDict({"policy": torch.randn(4, 5)}, batch_size=4)

        def step(self, actions: Tensor) -> Any:
            """No episode ends."""
            return self.get_observations(), torch.randn(4), torch.zeros(4), {}

    torch.manual_seed(0)
    model = {"class_name": "MLPModel", "hidden_dims": [6, 6], "activation": "elu"}
    spread = {"class_name": "GaussianDistribution", "init_std": 1.0}
    config = {
        "num_steps_per_env": 4,
        "save_interval": 50,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 1, "num_mini_batches": 2},
        "actor": {**model, "distribution_cfg": spread, "obs_normalization": True},
        "critic": {**model},
    }
    runner = OnPolicyRunner(Line(), config, log_dir=None, device="cpu")
    runner.learn(2)
    path = folder / "model_2.pt"
    runner.save(str(path))
    return told(path, (runner.alg.actor, runner.alg.critic), runner.alg.optimizer)


# --- trainers -------------------------------------------------------------------------------------------------------


def _data(n: int = 32) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(n, 4)).astype(np.float32), random.integers(0, 2, n)


def skorch(folder: Path, *, read: str = "params.pt") -> Written:
    import skorch as library

    x, y = _data()
    torch.manual_seed(0)
    classifier = library.NeuralNetClassifier(
        Net, max_epochs=2, batch_size=8, optimizer=torch.optim.Adam, criterion=nn.CrossEntropyLoss, verbose=0
    )
    classifier.fit(x, y)
    names = {"f_params": "params.pt", "f_optimizer": "optimizer.pt", "f_history": "history.json"}
    classifier.save_params(**{key: str(folder / name) for key, name in names.items()})
    options = ({"optimizer_path": folder / "optimizer.pt"},) if read else ()
    return told(folder / read, classifier.module_, classifier.optimizer_, options=options)


def skorch_callback(folder: Path) -> Written:
    """Checkpoint's four files, of the last epoch (TrainEndCheckpoint puts train_end_ before their names)."""
    import skorch as library

    x, y = _data()
    torch.manual_seed(0)
    classifier = library.NeuralNetClassifier(
        Net,
        max_epochs=2,
        optimizer=torch.optim.Adam,
        criterion=nn.CrossEntropyLoss,
        callbacks=[library.callbacks.TrainEndCheckpoint(dirname=str(folder))],
        verbose=0,
    )
    classifier.fit(x, y)
    return told(folder, classifier.module_, classifier.optimizer_)


def braindecode(folder: Path) -> Written:
    """skorch's files; the class of the network is braindecode's."""
    from braindecode import EEGClassifier
    from braindecode.models import ShallowFBCSPNet

    random = np.random.default_rng(0)
    x, y = random.normal(size=(16, 3, 200)).astype(np.float32), np.arange(16) % 2
    torch.manual_seed(0)
    network = ShallowFBCSPNet(
        n_chans=3, n_outputs=2, n_times=200, n_filters_time=3, n_filters_spat=3, final_conv_length="auto"
    )
    classifier = EEGClassifier(
        network, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.AdamW, max_epochs=1, batch_size=8, verbose=0
    )
    classifier.fit(x, y)
    classifier.save_params(f_params=str(folder / "params.pt"), f_optimizer=str(folder / "optimizer.pt"))
    options = ({"optimizer_path": folder / "optimizer.pt"},)
    return told(folder / "params.pt", classifier.module_, classifier.optimizer_, options=options)


def lightning(folder: Path, *, package: str, variant: str = "plain") -> Written:
    """One .ckpt by the Trainer, with what people keep in it."""
    pl = importlib.import_module(package)
    from torch.utils.data import DataLoader, TensorDataset

    class Module(pl.LightningModule):
        """A network and what `save_hyperparameters` finds."""

        def __init__(self, width: int = 4, optimizer_class: Any = torch.optim.Adam, config: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = Net(width)
            self.loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.5]) if variant == "weights" else None)
            if variant == "metric":
                import torchmetrics

                self.accuracy = torchmetrics.Accuracy(task="binary")
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
            for each in optimizers:
                each.zero_grad()
            self.manual_backward(loss)
            for each in optimizers:
                each.step()
            return None

        def configure_optimizers(self) -> Any:
            """One over all, or one a part, the head's first."""
            if variant == "two":
                return [torch.optim.Adam(part.parameters(), 1e-2) for part in (self.net.head, self.net.body)]
            optimizer = self.hparams.optimizer_class(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]

    given: dict[str, Any] = {}
    if variant == "omegaconf":
        import omegaconf

        given["config"] = omegaconf.OmegaConf.create({"lr": 0.01, "layers": [6, 6], "name": "${lr}"})
    torch.manual_seed(0)
    module = Module(**given)
    if variant == "plain":
        # Without the class: what a careful script keeps.
        module.hparams.pop("optimizer_class", None)
        module._hparams_initial = dict(module.hparams)
        module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=1e-2)
    x, y = (torch.from_numpy(part) for part in _data())
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    saver = pl.callbacks.ModelCheckpoint(dirpath=folder, save_last=True, monitor="loss")
    early = [pl.callbacks.EarlyStopping("loss")] if variant != "two" else []
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=[saver, *early], **quiet)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8))
    path = folder / "by_hand.ckpt"
    trainer.save_checkpoint(path)
    keys = [{"optimizer_key": f"optimizer_states.{number}"} for number in range(2)] if variant == "two" else []
    unsaid = "nothing says which of net.head.bias and loss.weight is a buffer" if variant == "weights" else ""
    return told(path, module, trainer.optimizers, options=tuple(keys), unsaid=unsaid)


def forecasting(folder: Path) -> Written:
    """A temporal fusion transformer: its hyper-parameters hold metrics, encoders of pandas and of scikit-learn."""
    import lightning as pl
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import QuantileLoss

    rows = np.random.default_rng(0)
    table = pd.DataFrame(
        {"t": list(range(24)) * 2, "series": ["a"] * 24 + ["b"] * 24, "y": rows.normal(size=48).astype(np.float32)}
    )
    data = TimeSeriesDataSet(
        table,
        time_idx="t",
        target="y",
        group_ids=["series"],
        max_encoder_length=6,
        max_prediction_length=2,
        static_categoricals=["series"],
        time_varying_unknown_reals=["y"],
    )
    torch.manual_seed(0)
    network = TemporalFusionTransformer.from_dataset(
        data, hidden_size=4, attention_head_size=1, loss=QuantileLoss([0.1, 0.5, 0.9]), optimizer="adam"
    )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, **quiet)
    trainer.fit(network, data.to_dataloader(train=True, batch_size=8, num_workers=0))
    path = folder / "tft.ckpt"
    trainer.save_checkpoint(path)
    return told(path, network, trainer.optimizers)


def accelerate(folder: Path, *, safe: bool = True) -> Written:
    import accelerate as library

    accelerator = library.Accelerator(cpu=True)
    torch.manual_seed(0)
    network = Net()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    prepared, wrapped = accelerator.prepare(network, optimizer)
    trained(prepared, wrapped)
    path = folder / "step_3"
    accelerator.save_state(str(path), safe_serialization=safe)
    accelerator.free_memory()
    return told(path, network, wrapped.optimizer)


def hugging_face(folder: Path) -> Written:
    """A real Trainer's folder: model.safetensors, optimizer.pt, trainer_state.json, …"""
    import transformers
    from torch.utils.data import Dataset

    class Rows(Dataset):
        """Random tokens."""

        def __len__(self) -> int:
            return 16

        def __getitem__(self, row: int) -> Any:
            generator = torch.Generator().manual_seed(row)
            return {"input_ids": torch.randint(3, 20, (6,), generator=generator), "labels": torch.tensor(row % 2)}

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    network = transformers.BertForSequenceClassification(config)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, save_steps=4, use_cpu=True, report_to=[]
    )
    trainer = transformers.Trainer(network, arguments, train_dataset=Rows())
    trainer.train()
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    # Whoever has the model passes it; without it only the names tell.
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    return told(folder / "checkpoint-4", network, optimizer, options=({"param_names": order},))


def ignite(folder: Path) -> Written:
    """Checkpoint's file of a dictionary of everything that has a state dict."""
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    torch.manual_seed(0)
    network = Net()
    optimizer = torch.optim.AdamW(by_decay(network, no_decay_first=False), lr=1e-2)

    def update(_: Engine, batch: Tensor) -> float:
        optimizer.zero_grad()
        loss = network(batch).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss)

    trainer = Engine(update)
    saver = Checkpoint({"trainer": trainer, "model": network, "optimizer": optimizer}, DiskSaver(str(folder)))
    trainer.add_event_handler(Events.COMPLETED, saver)
    trainer.run([torch.randn(8, 4) for _ in range(3)], max_epochs=1)
    path = folder / str(saver.last_checkpoint)
    return told(path, network, optimizer, options=({"groups_in_order": True},))


# --- optimisers -----------------------------------------------------------------------------------------------------


def optimiser(
    folder: Path, *, path: str, unsaid: str = "", named: bool = False, muon: bool = False, wide: int = 4, **more: Any
) -> Written:
    """A script's file of weights and of a package's optimiser, which has not called its `eval()`.

    `named` gives it names too, `muon` two groups, the matrices' first.
    """
    module, _, name = path.rpartition(".")
    torch.manual_seed(0)
    network = Net(wide) if wide == 4 else nn.Sequential(nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 2))
    given: Any = list(network.named_parameters()) if named else network.parameters()
    if muon:
        kinds = {True: [], False: []}
        for parameter in network.parameters():
            kinds[parameter.dim() == 2].append(parameter)
        given = [{"params": params, "use_muon": flag} for flag, params in kinds.items()]
    optimizer = getattr(importlib.import_module(module), name)(given, **more)
    if hasattr(optimizer, "train"):
        optimizer.train()
    trained(network, optimizer)
    file = folder / "c.pt"
    torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, file)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    live, weights = {}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moment = None if unsaid else corrected(optimizer.state[parameter], group, parameter)
            if moment is not None:
                live[names[id(parameter)]] = moment
                weights[names[id(parameter)]] = parameter.detach().clone()
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    options = ({"param_names": order},) if len(optimizer.param_groups) > 1 else ()
    return Written(file, live, weights, options=options, unsaid=unsaid)


def corrected(state: dict[str, Any], group: dict[str, Any], parameter: Tensor) -> Tensor | None:
    """v̂ of an average under whichever name, in double precision; None of what has none."""
    stored = next((state[key] for key in ("exp_avg_sq", "state2") if key in state), None)
    if stored is None or group.get("use_muon"):
        return None
    if hasattr(stored, "codes"):
        stored = stored.dequantize()
    beta = group["betas"][1]
    count = next(float(held[key]) for held in (state, group) for key in ("step", "k") if key in held)
    return stored.detach().double() / (1 - beta**count)


def kinds() -> Iterable[Kind]:
    """All that a library writes."""
    sb3 = ("stable_baselines3", "gymnasium")
    for name in ("PPO", "A2C", "DQN", "SAC", "TD3"):
        yield Kind(f"SB3 {name}", partial(stable_baselines, name=name), sb3)
    yield Kind("SB3 A2C, Adam", partial(stable_baselines, name="A2C", use_rms_prop=False), sb3)
    # One extractor has three names; apart, there are two, of which one has two names.
    yield Kind("SB3 PPO, images", partial(stable_baselines, name="PPO", images=True), sb3)
    apart = {"policy_kwargs": {"share_features_extractor": False}}
    yield Kind("SB3 PPO, images, apart", partial(stable_baselines, name="PPO", images=True, **apart), sb3)
    yield Kind("rsl-rl PPO", rsl_rl, ("rsl_rl", "rsl_rl.runners", "tensordict"))
    yield Kind("skorch, params.pt", skorch, ("skorch",))
    yield Kind("skorch, the folder", partial(skorch, read=""), ("skorch",))
    yield Kind("skorch TrainEndCheckpoint", skorch_callback, ("skorch",))
    yield Kind("braindecode, params.pt", braindecode, ("braindecode", "braindecode.models"))
    for package, version, more in (
        ("lightning.pytorch", "2.", "lightning"),
        ("pytorch_lightning", "1.", "pytorch_lightning"),
    ):
        title = f"Lightning {version}x"
        yield Kind(title, partial(lightning, package=package), (more,), version)
        for variant, needs, said in (
            ("class", (), "a class in hparams"),
            ("omegaconf", ("omegaconf",), "omegaconf in hparams"),
            ("metric", ("torchmetrics",), "a metric's state"),
            ("two", (), "two optimisers"),
            ("weights", (), "class weights"),
        ):
            write = partial(lightning, package=package, variant=variant)
            yield Kind(f"{title}, {said}", write, (more, *needs), version)
    yield Kind("pytorch-forecasting TFT", forecasting, ("pytorch_forecasting", "lightning"))
    yield Kind("accelerate save_state", accelerate, ("accelerate",))
    yield Kind("accelerate, not safetensors", partial(accelerate, safe=False), ("accelerate",))
    yield Kind("transformers Trainer", hugging_face, ("transformers", "accelerate"))
    yield Kind("ignite Checkpoint, two groups", ignite, ("ignite",))
    yield from optimisers()


def optimisers() -> Iterable[Kind]:
    """A file a package's optimiser."""
    own = "pytorch_optimizer.optimizer"
    alike = "its state looks as those of others, which are read differently"
    none = "there is no second moment of the gradients"
    for title, path, more in (
        ("Schedule-Free AdamW, in training", "schedulefree.AdamWScheduleFree", {}),
        ("Schedule-Free RAdam, in training", "schedulefree.RAdamScheduleFree", {"silent_sgd_phase": False}),
        ("Schedule-Free SGD", "schedulefree.SGDScheduleFree", {"unsaid": none}),
        ("torchao AdamW8bit", "torchao.optim.AdamW8bit", {"wide": 64}),
        ("torchao AdamW4bit", "torchao.optim.AdamW4bit", {"wide": 64}),
        ("torchao AdamWFp8", "torchao.optim.AdamWFp8", {"wide": 64}),
        ("AdEMAMix of bitsandbytes", "bitsandbytes.optim.AdEMAMix", {}),
        ("Muon and Adam of one optimiser", "muon.SingleDeviceMuonWithAuxAdam", {"muon": True}),
        ("NorMuon and Adam", f"{own}.muon.normuon.NorMuon", {"muon": True}),
        ("AdaMuon and Adam", f"{own}.muon.adamuon.AdaMuon", {"muon": True}),
        ("Lion of lion_pytorch", "lion_pytorch.Lion", {"unsaid": none}),
        ("AdEMAMix of pytorch_optimizer", f"{own}.ademamix.AdEMAMix", {}),
        ("Schedule-Free of pytorch_optimizer", f"{own}.schedulefree.ScheduleFreeAdamW", {}),
        *(
            (f"{kind.rpartition('.')[2]} of pytorch_optimizer", f"{own}.{kind}", {"unsaid": alike})
            for kind in ("adopt.ADOPT", "mars.MARS", "prodigy.Prodigy", "yogi.Yogi", "adamod.AdaMod", "came.CAME")
        ),
        ("StableAdamW of pytorch_optimizer", f"{own}.adamw.StableAdamW", {"unsaid": alike}),
        ("GaLore of pytorch_optimizer", f"{own}.galore.GaLore", {"unsaid": none}),
    ):
        yield Kind(f"optimiser: {title}", partial(optimiser, path=path, **more), (path.partition(".")[0],))
