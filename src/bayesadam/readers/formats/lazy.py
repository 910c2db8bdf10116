"""Dictionaries of tensors: of those that stay on the disk until they are accessed, of tied ones, of wrapped names."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from bayesadam._shards import own_part
from bayesadam._storage import Lazy as Lazy
from bayesadam._storage import meta as meta
from bayesadam._storage import outline_of as outline_of


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
