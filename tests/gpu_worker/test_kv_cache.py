"""Caches that grow in place hand out what transformers' own caches hand out."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from gpu_worker.kv_cache import GrowingLayer, GrowingSlidingLayer, is_growing, new_growing_cache
from tests.checkpoints import BASE, FAMILIES

MAX_POSITIONS = 300


def _layers(window: int | None) -> tuple[GrowingLayer, DynamicLayer]:
    if window is None:
        return GrowingLayer(MAX_POSITIONS), DynamicLayer()
    return GrowingSlidingLayer(MAX_POSITIONS, window), DynamicSlidingWindowLayer(window)


@pytest.mark.parametrize("window", [None, 1, 2, 7, 100])
def test_layers_equal_transformers_layers(window: int | None) -> None:
    layer, reference = _layers(window)
    generator = torch.Generator().manual_seed(1)
    for num_new in (3, 1, 1, 9, 1, 64, 1, 1, 120, *[1] * 60):
        assert layer.get_mask_sizes(num_new) == reference.get_mask_sizes(num_new)
        keys, values = (torch.randn(1, 2, num_new, dim, generator=generator) for dim in (4, 6))
        found, expected = layer.update(keys, values), reference.update(keys, values)
        if window is None:
            wanted = expected
        else:  # transformers may hand out more than may be attended to: the mask's part counts
            num_visible = found[0].shape[2]
            wanted = tuple(tensor[:, :, -num_visible:] for tensor in expected)
            assert num_visible >= min(window, reference.get_seq_length())
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert layer.get_seq_length() == reference.get_seq_length()


def test_room_doubles_up_to_the_bound_and_stays_in_place() -> None:
    layer = GrowingLayer(MAX_POSITIONS)
    row = torch.ones(1, 1, 1, 4)
    places = set()
    for _ in range(MAX_POSITIONS):
        keys, _ = layer.update(row, row)
        places.add((keys.data_ptr(), layer.capacity))
    assert sorted(capacity for _, capacity in places) == [64, 128, 256, 300]


def test_a_sliding_layer_never_holds_more_than_two_windows() -> None:
    layer = GrowingSlidingLayer(10_000, 50)
    row = torch.ones(1, 1, 1, 4)
    for _ in range(1000):
        keys, _ = layer.update(row, row)
    assert keys.shape[2] == 50
    assert layer.capacity <= 100


def test_layers_with_other_state_stay_transformers_own() -> None:
    caches = {
        family: new_growing_cache(
            AutoConfig.for_model(family, **{**BASE, **FAMILIES[family]}), MAX_POSITIONS
        )
        for family in ("qwen3_moe", "gpt_oss", "qwen3_next", "jamba")
    }
    kinds = [type(layer) for layer in caches["gpt_oss"].layers]
    assert kinds == [GrowingSlidingLayer, GrowingLayer]
    assert {family: is_growing(cache) for family, cache in caches.items()} == {
        "qwen3_moe": True,
        "gpt_oss": True,
        "qwen3_next": False,
        "jamba": False,
    }
