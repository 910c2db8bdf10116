"""Small trained networks shared by the tests."""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer


def quick_of(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values as parameters of a test, of which the quick suite runs those named."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), activation()]
    return nn.Sequential(*layers[:-1])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a call could disturb: tensors with their places, values and gradients; modes, attributes and hooks."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    hooks = [[tuple(getattr(m, name)) for name in sorted(vars(m)) if "hooks" in name] for m in model.modules()]
    return {
        "modules": [(module.training, sorted(vars(module))) for module in model.modules()],
        "hooks": hooks,
        "places": [(name, id(tensor)) for name, tensor in tensors.items()],
        "storage": [parameter.data_ptr() for parameter in model.parameters()],
        "values": [tensor.detach().to_dense().tolist() for tensor in tensors.values()],
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in model.parameters()],
    }


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Change the header and the tensors of a saved file; it has no sums then, as files of earlier releases."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    (name,) = set(metadata) - {"crc32", "format"}
    header = json.loads(metadata[name])
    header.pop("sums", None)
    change(header, tensors)
    save_file(tensors, path, metadata={name: json.dumps(header)})


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """∂f/∂θ, (b, c, P), of all parameters: one reverse pass for every single output of every example."""
    outputs = model(x).reshape(len(x), -1)
    rows = [torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in outputs.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).view(*outputs.shape, -1)


def dense_moment(structure: Any, power: float = 1.0) -> Tensor:
    """Q vᵖ Qᵀ over all weights, row-major and in the order of the structure, each from its definition."""
    blocks = []
    for name, v in structure.second_moment.items():
        bases, rows = structure.bases.get(name), v.shape[0] if v.dim() > 1 else 1
        sides = (None, None) if bases is None else (bases.left, bases.right)
        sizes = (rows, v.numel() // rows)
        left, right = (torch.eye(n) if q is None else q for q, n in zip(sides, sizes, strict=True))
        q = torch.kron(left.double(), right.double())
        blocks.append(q @ torch.diag(v.flatten().double() ** power) @ q.T)
    return torch.block_diag(*blocks)


class Lion(Optimizer):
    """As many optimisers are written: an empty state is one to begin."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if len(self.state[p]) == 0:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                m, (now, later) = self.state[p]["exp_avg"], group["betas"]
                p.sub_(group["lr"] * m.lerp(p.grad, 1 - now).sign())
                m.lerp_(p.grad, 1 - later)


def squared(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).square().mean()


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[tuple[Any, Tensor]],
    loss: Callable[[Any, Tensor], Tensor] = squared,
) -> None:
    """A step on each batch of inputs and targets."""
    for x, y in batches:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def train(
    model: nn.Module, optimizer: Optimizer, *, steps: int = 20, batch: int = 8, seed: int = 0, dead: int | None = None
) -> None:
    """A few steps on random regression data; every parameter gets a gradient that is not 0, but for a dead input's."""
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    inputs = [torch.randn(batch, first.shape[1], generator=generator).to(first) for _ in range(steps)]
    for x in inputs if dead is not None else ():
        x[:, dead] = 0
    fit(model, optimizer, ((x, x.sum(dim=1, keepdim=True)) for x in inputs))


def trained(
    *sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0, **adam: object
) -> tuple[nn.Sequential, torch.optim.Adam]:
    """An MLP and the Adam that trained it."""
    torch.manual_seed(seed)
    model = mlp(*(sizes or (3, 5, 2))).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), **adam)  # type: ignore[arg-type]
    train(model, optimizer, seed=seed)
    return model, optimizer


def three_steps(folder: Path) -> Any:
    """Hugging Face's arguments of a training of three steps, whose checkpoint is `folder/checkpoint-3`."""
    import transformers

    return transformers.TrainingArguments(
        str(folder),
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        weight_decay=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )


def soap(
    params: Any,
    lr: float = 1e-2,
    *,
    max_side: int = 10_000,
    precondition_every: int = 10,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.95, 0.95),
) -> torch.optim.Optimizer:
    """SOAP as pytorch_optimizer has it; the test is skipped without that package."""
    package = pytest.importorskip("pytorch_optimizer")
    optimizer: Optimizer = package.SOAP(
        params,
        lr=lr,
        betas=betas,
        weight_decay=weight_decay,
        precondition_frequency=precondition_every,
        max_precondition_dim=max_side,
    )
    return optimizer


def orthonormal(optimizer: Optimizer) -> torch.optim.Optimizer:
    """The same SOAP with bases that are orthonormal to the last digit of float64; its own are to float32's."""
    for state in optimizer.state.values():
        if "Q" in state:
            bases = [q if len(q) == 0 else torch.linalg.qr(q.double()).Q.contiguous() for q in state["Q"]]
            state["Q"] = bases
    return optimizer
