"""Optimiser state, live or in a file → second moments by name: one record an optimiser, one file a format, one matcher.

In the order in which to read them: `registry` (the records), `rotated` (SOAP), `tracking` (what `track` keeps),
`identify` (whose a saved state is), `match` (parameters with their states), `order` (of states without names),
`curvature` (v̂), `choose` (which of a file), `checkpoint` (files), `recorder` (gradients), `compression`.
"""

from bayesadam.readers.checkpoint import (
    Checkpoint,
    CheckpointKeywords,
    explain,
    load_weights,
    match_checkpoint,
    moments_apart,
    read_checkpoint,
    read_curvature,
    write_network,
    write_pruned,
)
from bayesadam.readers.curvature import (
    UNKNOWN,
    Curvature,
    Origin,
    batch_size_or_tracked,
    origin_of,
    read_entry,
    read_match,
    read_optimizer,
    read_rotated,
    read_state_dict,
    warn_of_few,
    warn_of_memory,
)
from bayesadam.readers.formats.contents import Contents, Recorded, Rules
from bayesadam.readers.formats.lazy import clean_names, identities
from bayesadam.readers.formats.registry import Format, format_of, register_format, registered_formats
from bayesadam.readers.identify import identify_reader
from bayesadam.readers.match import check_parameter, match_optimizers, own_parameters
from bayesadam.readers.order import warn_of_order
from bayesadam.readers.recorder import Recorder, read_recorder
from bayesadam.readers.registry import (
    Group,
    State,
    StateReader,
    reader_named,
    reader_of,
    register,
    registered,
    working_dtype,
)
from bayesadam.readers.rotated import Rotation, is_orthonormal
from bayesadam.readers.tracking import track
