"""Which weights of the dense part `--dense-dtype` quantises: those of its large linear layers.

Attention projections, dense and shared feed-forward layers, the output head. Not routers and gates,
which choose by small differences, nor embeddings and norms, of which a token reads a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from expert_store.native_quantising import load_library, quantise_into
from expert_store.packing import pack, packed_shape
from expert_store.quantising import quantise

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from expert_store.formats import WeightFormat

#: Last names of linear layers that choose or weigh experts.
_CHOOSING = frozenset({"gate", "router", "shared_expert_gate"})
#: A tile of the formats has so many outputs: below it, nothing is gained.
_LEAST_EXTENT = 16


def large_linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Paths and modules of the layers that are quantised, in module order."""
    for path, module in model.named_modules():
        if type(module) is not torch.nn.Linear or path.rpartition(".")[2] in _CHOOSING:
            continue
        if min(module.in_features, module.out_features) >= _LEAST_EXTENT:
            yield path, module


def pack_matrix(weights: WeightFormat, matrix: torch.Tensor) -> npt.NDArray[np.uint8]:
    """uint8 [tiles, tile_bytes] of a matrix [outputs, inputs], any float dtype, finite."""
    tiles = np.zeros(packed_shape(weights, *matrix.shape), np.uint8)
    library = load_library()
    if library is None:
        return pack(weights, quantise(weights, matrix).matrix)
    quantise_into(library, weights, matrix, tiles)
    return tiles
