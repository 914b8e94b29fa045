"""The dense weights of a quantised checkpoint, as floats.

Attention, norms, routers and shared experts run in the model's own dtype, so what the checkpoint
has of them in codes is turned into floats when it is loaded. (A plain checkpoint does not come
here: transformers reads it as it lies.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from expert_store.keys import map_keys
from expert_store.packed import PackedTensor
from expert_store.reading import TORCH_DTYPE, SourceFiles
from expert_store.unpacking import read_floats

if TYPE_CHECKING:
    from expert_store.checkpoint import Checkpoint, TensorEntry
    from expert_store.families import ModelShape


def dense_state(
    shape: ModelShape, checkpoint: Checkpoint, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint that is no routed expert's, under its name there.

    What was quantised is in ``dtype``; everything else in the dtype that the checkpoint has.

    Raises:
        CheckpointError: tensors missing, unreadable, not finite or of a layout that is not known.
    """
    keys = map_keys(shape, checkpoint)
    files = SourceFiles(checkpoint, drop_cache=False)
    try:
        return {name: _tensor(checkpoint.tensors[name], files, dtype) for name in keys.dense}
    finally:
        files.close()


def _tensor(entry: TensorEntry, files: SourceFiles, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(entry, PackedTensor):
        return torch.from_numpy(read_floats(entry, files)).to(dtype)
    raw = np.empty(entry.num_bytes, dtype=np.uint8)
    files.read(entry, 0, raw.data)
    if entry.dtype in TORCH_DTYPE:
        return torch.from_numpy(raw).view(TORCH_DTYPE[entry.dtype]).reshape(entry.shape)
    whole = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
    return torch.from_numpy(raw).view(whole[entry.dtype]).reshape(entry.shape)
