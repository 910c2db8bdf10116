"""The file formats that are known; a format is a `Format` of one of the files here and one entry in `FORMATS`."""

from bayesadam.readers.formats.deepspeed import DEEPSPEED
from bayesadam.readers.formats.distributed import DISTRIBUTED
from bayesadam.readers.formats.huggingface import ACCELERATE, ADAPTER, TRAINER
from bayesadam.readers.formats.registry import register_format
from bayesadam.readers.formats.safetensors import POSTERIOR, SAFETENSORS
from bayesadam.readers.formats.torch_files import FOLDER, OLD_TORCH, PICKLE, TORCH, ZIP

# The last is tried first: an adapter, or DeepSpeed's files, may be in one folder with the Trainer's, and every known
# folder has files that may be checkpoints by themselves.
FORMATS = (
    *(FOLDER, ZIP, PICKLE, OLD_TORCH, SAFETENSORS, POSTERIOR, TORCH),
    *(TRAINER, ACCELERATE, ADAPTER, DISTRIBUTED, DEEPSPEED),
)
for known in FORMATS:
    register_format(known)
