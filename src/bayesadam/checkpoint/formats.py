"""The formats that are known from the start."""

from __future__ import annotations

from bayesadam.checkpoint.accelerate import ACCELERATE
from bayesadam.checkpoint.deepspeed import DEEPSPEED
from bayesadam.checkpoint.distributed import DISTRIBUTED
from bayesadam.checkpoint.huggingface import ADAPTER, PARENT, TRAINER
from bayesadam.checkpoint.registry import register_format
from bayesadam.checkpoint.safetensors_file import SAFETENSORS
from bayesadam.checkpoint.torch_file import OLD_TORCH, TORCH

# The last is asked first: an adapter, or DeepSpeed's folder, may be in one folder with what the Trainer wrote.
FORMATS = tuple(
    register_format(known)
    for known in (TORCH, OLD_TORCH, SAFETENSORS, PARENT, TRAINER, ACCELERATE, ADAPTER, DISTRIBUTED, DEEPSPEED)
)
