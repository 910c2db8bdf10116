"""Dictionaries of tensors: of those that stay on the disk until they are accessed, of tied ones, of wrapped names."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesadam._shards import own_part


class Lazy(Mapping[str, Any]):
    """Tensors by name, read from the disk on every access and never cached: hold on to what is needed twice.

    `outline` is the same dictionary, nested or not, with tensors on the meta device; what is known already, numbers,
    texts and counters, is there as it is. `read` gives the tensor, or the dictionary, behind a key of it.
    """

    def __init__(self, outline: Mapping[str, Any], read: Callable[[str], Any]) -> None:
        self.outline = outline
        self._read = read

    def __getitem__(self, key: str) -> Any:
        entry = self.outline[key]
        on_disk = isinstance(entry, Mapping) or (isinstance(entry, Tensor) and entry.is_meta)
        return self._read(key) if on_disk else entry

    def __iter__(self) -> Iterator[str]:
        return iter(self.outline)

    def __len__(self) -> int:
        return len(self.outline)

    def __contains__(self, key: object) -> bool:
        return key in self.outline


def outline_of(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """A dictionary of which what is on the disk appears as shape and type."""
    outline: Mapping[str, Any] = getattr(tensors, "outline", tensors)
    return outline


def gathered(places: Mapping[str, tuple[Mapping[str, Any], str]]) -> Mapping[str, Any]:
    """One dictionary out of several, by the dictionary and the key in it behind each name; files are not read."""
    if any(isinstance(tensors, Lazy) for tensors, _ in places.values()):
        outline = {name: outline_of(tensors)[key] for name, (tensors, key) in places.items()}
        return Lazy(outline, lambda name: places[name][0][places[name][1]])
    return {name: tensors[key] for name, (tensors, key) in places.items()}


def renamed(tensors: Mapping[str, Any], keys: Mapping[str, str]) -> Mapping[str, Any]:
    """A dictionary under other names, by the present key behind each."""
    return gathered({new: (tensors, old) for new, old in keys.items()})


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers by every name that they have."""
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without values, for an outline."""
    return torch.empty(shape, dtype=dtype, device="meta")


def clean_names(keys: Iterable[str]) -> dict[str, str]:
    """Names without the prefixes of torch.compile and data parallelism, and the key behind each."""
    keys = list(keys)
    names = [".".join(part for part in key.split(".") if part != "_orig_mod") for key in keys]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return dict(zip(names if len(set(names)) == len(keys) else keys, keys, strict=True))


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two names of one tied tensor have in common; views of one flat buffer differ."""
    if tensor.is_meta:
        # A tensor on the disk, by its outline: whether it is tied is not known.
        return (id(tensor),)
    part = own_part(tensor)
    return (part.untyped_storage().data_ptr(), part.storage_offset(), part.shape, part.stride())


def identities(weights: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """`memory_of` by name; lazy tensors, whose addresses are used again, are identified by their outline."""
    return {name: memory_of(tensor) for name, tensor in outline_of(weights).items()}
