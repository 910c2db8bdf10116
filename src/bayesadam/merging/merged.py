"""Several fine-tuned networks made into one, each weight by how much the data of each network determine it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bayesadam._files import keep_apart, replacing
from bayesadam._kinds import require_kind
from bayesadam._storage import write_tensors
from bayesadam.errors import FileError
from bayesadam.merging.experts import AnyPath, BaseSource, Source, reading_of
from bayesadam.merging.plan import Method, plan_of
from bayesadam.merging.report import MergeReport
from bayesadam.readers import CheckpointKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Merged(dict[str, Tensor]):
    """Merged weights and buffers by name, as `model.load_state_dict` takes them, and the `report` of how it was done.

    It is saved, by torch.save or pickle, as the state dict that it is, without the report.
    """

    def __init__(self, tensors: Mapping[str, Tensor], report: MergeReport) -> None:
        super().__init__(tensors)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


def merge(
    models: Sequence[Source],
    method: Method | None = None,
    *,
    base: BaseSource | None = None,
    weights: Sequence[float] | None = None,
    **options: Unpack[CheckpointKeywords],
) -> Merged:
    """One network out of several that were fine-tuned from one start, without data and without training.

        fisher             θ = (Σ αᵢ Fᵢ)⁻¹ Σ αᵢ Fᵢ θᵢ, F = v̂; the average where Σ F = 0
        gradient-matching  θ = θ₀ + (F₀ + Σ αᵢ Fᵢ)⁻¹ Σ (F₀ + αᵢ Fᵢ)(θᵢ − θ₀), F = N B v̂ + δ
        kronecker          (Σ αᵢ Kᵢ + δ I)(θ − θ_D) = Σ αᵢ Kᵢ (θᵢ − θ_D), K = N B V in its eigenbases

    θ_D is the merge by the diagonals: the first equation, or with a base the second. δ is a fixed share of the mean
    curvature, so that a factor that N, B or the units of the loss have in common for all models changes nothing. An N or B
    that is not known of every model counts for none.

    A parameter that only some of the models trained is taken from those. What none of them trained is averaged, batch
    norm's running statistics among it; integers are the first model's. The factors of a LoRA adapter are merged as their
    product. The report says which were.

    >>> import torch
    >>> from bayesadam import Posterior
    >>> def fine_tuned(seed):
    ...     torch.manual_seed(seed)
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    ...     for _ in range(100):
    ...         optimizer.zero_grad()
    ...         model(torch.randn(8, 2)).square().mean().backward()
    ...         optimizer.step()
    ...     return Posterior.from_optimizer(model, optimizer, n_data=800)
    >>> merged = merge([fine_tuned(0), fine_tuned(1)])
    >>> sorted(merged)
    ['bias', 'weight']

    Args:
        models: posteriors, paths of what trainers saved, or pairs of paths (weights, optimiser's state).
        method: one of the three; None is gradient matching with a base, else Fisher.
        base: θ₀, the network before fine-tuning: as `models`, or a model, a state dict or a file of weights alone.
        weights: α, how much each model is to count; 1 each if absent.
        **options: how files are read, see `CheckpointOptions`; a state in a file of its own is given in a pair.
    """
    plan = plan_of(models, method, base, weights, reading_of(options))
    found: dict[str, Tensor] = {}
    for name in plan.outline:
        first = plan.tied.get(name, name)
        # In memory of their own: what was read may be mapped from a file, or be a model's.
        found[name] = found[first] if first in found else plan.tensor(name).clone()
    return Merged(found, plan.report)


def merge_checkpoints(
    paths: Sequence[AnyPath | tuple[AnyPath, AnyPath]],
    out: str | os.PathLike[str],
    method: Method | None = None,
    *,
    base: AnyPath | None = None,
    weights: Sequence[float] | None = None,
    **options: Unpack[CheckpointKeywords],
) -> MergeReport:
    """`merge` from files to a safetensors file, tensor by tensor, so that networks larger than memory can be merged.

    By Fisher and gradient matching the memory is that of the largest tensor, whatever the number of models; by Kronecker
    factors, that of one parameter with its bases in all models. The folder of `out` is made if absent.
    """
    require_kind(out, (str, os.PathLike), "out")
    out = Path(out)
    if out.suffix != ".safetensors":
        raise FileError(f"{out}: weights are written as safetensors: end the path in .safetensors")
    require_kind(paths, (list, tuple), "paths")
    sources = [*paths, *([] if base is None else [base])]
    keep_apart(
        out, *(Path(part) for source in sources for part in (source if isinstance(source, tuple) else (source,)))
    )
    plan = plan_of(paths, method, base, weights, reading_of(options))
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary:
        write_tensors(temporary, plan.outline, plan.tensor)
    return plan.report
