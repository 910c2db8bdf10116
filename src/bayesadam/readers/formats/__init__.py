"""What others save → weights and optimiser state, by name: one record a format, one registry."""

from bayesadam.readers.formats.archives import FOLDER, TAR, ZIP
from bayesadam.readers.formats.checkpoint import Checkpoint, CheckpointKeywords, CheckpointOptions, read_checkpoint
from bayesadam.readers.formats.contents import Contents, Recorded, Rules
from bayesadam.readers.formats.deepspeed import DEEPSPEED
from bayesadam.readers.formats.distributed import DISTRIBUTED
from bayesadam.readers.formats.huggingface import ACCELERATE, PARENT, TRAINER
from bayesadam.readers.formats.identify import identify_reader
from bayesadam.readers.formats.keras import HDF5, KERAS
from bayesadam.readers.formats.peft import ADAPTER
from bayesadam.readers.formats.registry import Format, format_of, register_format, registered_formats
from bayesadam.readers.formats.resolve import load_weights, match_checkpoint, read_curvature
from bayesadam.readers.formats.safetensors import POSTERIOR, SAFETENSORS, write_pruned
from bayesadam.readers.formats.torch_files import OLD_TORCH, PICKLE, TORCH

# The last is asked first: an adapter, or DeepSpeed's folder, may be in one folder with what the Trainer wrote, and every
# known folder has files that may be checkpoints by themselves.
for known in (
    *(FOLDER, TORCH, ZIP, PICKLE, TAR, OLD_TORCH, HDF5, SAFETENSORS, POSTERIOR, KERAS),
    *(PARENT, TRAINER, ACCELERATE, ADAPTER, DISTRIBUTED, DEEPSPEED),
):
    register_format(known)

__all__ = [
    "Checkpoint",
    "CheckpointKeywords",
    "CheckpointOptions",
    "Contents",
    "Format",
    "Recorded",
    "Rules",
    "format_of",
    "identify_reader",
    "load_weights",
    "match_checkpoint",
    "read_checkpoint",
    "read_curvature",
    "register_format",
    "registered_formats",
    "write_pruned",
]
