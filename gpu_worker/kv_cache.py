"""KV caches that grow in place: a decoded token costs one row written, not a copy of the context.

transformers' dynamic cache concatenates at every step. Here each layer owns buffers with room to
spare and hands out views of their filled part. Room doubles when it is used up, so a context of n
positions costs O(n) copying altogether and holds at most about 2n of memory; a sliding layer never
holds more than a few windows. Layers with other state (recurrent, convolutional, indexed) are left
as transformers makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

if TYPE_CHECKING:
    import torch

#: Positions of a layer's first buffer, unless its first step brings more.
_FIRST_CAPACITY = 64


class GrowingLayer(DynamicLayer):
    """Full attention: every position is kept. keys and values are [1, heads, positions, dim]."""

    def __init__(self, max_positions: int) -> None:
        super().__init__()
        self._max_positions = max_positions
        self._key_room: torch.Tensor | None = None
        self._value_room: torch.Tensor | None = None
        self._end = 0
        self._first = 0
        #: Counts the buffers that there have been.
        self.room_number = 0
        #: Positions that were ever added; those of a sliding layer are not all kept.
        self.cumulative_length = 0

    @property
    def capacity(self) -> int:
        """Positions that the buffers hold."""
        return 0 if self._key_room is None else self._key_room.shape[2]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add positions; returns all keys and values that the new ones may attend to."""
        num_new = key_states.shape[2]
        if self._end + num_new > self.capacity:
            self._make_room(num_new, key_states, value_states)
        key_room, value_room = self._key_room, self._value_room
        assert key_room is not None  # room was made with the first position
        assert value_room is not None
        start, end = self._end, self._end + num_new
        key_room.narrow(2, start, num_new).copy_(key_states)
        value_room.narrow(2, start, num_new).copy_(value_states)
        self._end = end
        self.cumulative_length += num_new
        self._first = first = self._first_visible(num_new)
        return key_room.narrow(2, first, end - first), value_room.narrow(2, first, end - first)

    def add_place(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Count one position more, which whoever calls writes into `rooms`; its index there.
        `keys` and `values` are like those that will be written."""
        place = self._end
        if place + 1 > self.capacity:
            self._make_room(1, keys, values)
            place = self._end
        self._end = place + 1
        self.cumulative_length += 1
        self._first = self._first_visible(1)
        return place

    @property
    def rooms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of keys and values, [1, heads, capacity, dim]; there is a position."""
        assert self._key_room is not None  # room was made with the first position
        assert self._value_room is not None
        return self._key_room, self._value_room

    @property
    def window(self) -> int:
        """How many of the last positions a new one sees; 0 for all."""
        return 0

    # transformers' layers hold what they return; here it is a view of the buffers.
    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """What the last positions were to attend to."""
        return self._shown("_key_room")

    @keys.setter
    def keys(self, value: object) -> None:
        del value

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """As `keys`."""
        return self._shown("_value_room")

    @values.setter
    def values(self, value: object) -> None:
        del value

    def _shown(self, name: str) -> torch.Tensor | None:
        room: Any = getattr(self, name, None)
        return None if room is None else room.narrow(2, self._first, self._end - self._first)

    def _first_visible(self, num_new: int) -> int:
        return 0

    def _num_kept(self) -> int:
        """Held positions that later ones still attend to."""
        return self._end

    def _capacity_for(self, num_positions: int) -> int:
        capacity = max(_FIRST_CAPACITY, self.capacity)
        while capacity < num_positions:
            capacity *= 2
        return max(min(capacity, self._max_positions), num_positions)

    def _make_room(self, num_new: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        num_kept = self._num_kept()
        capacity = self._capacity_for(num_kept + num_new)
        rooms = []
        for room, new in ((self._key_room, keys), (self._value_room, values)):
            wider = new.new_empty(*new.shape[:2], capacity, new.shape[3])
            if room is not None and num_kept:
                wider.narrow(2, 0, num_kept).copy_(room.narrow(2, self._end - num_kept, num_kept))
            rooms.append(wider)
        self._key_room, self._value_room = rooms
        self._end = num_kept
        self.room_number += 1
        self.device = keys.device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        self.__init__(self._max_positions)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("a sequence is begun anew, never cut")


class GrowingSlidingLayer(GrowingLayer):
    """Sliding-window attention: what has left the window is dropped when the buffer is full."""

    is_sliding = True

    def __init__(self, max_positions: int, sliding_window: int) -> None:
        super().__init__(max_positions)
        self.sliding_window = sliding_window

    @property
    def window(self) -> int:
        return self.sliding_window

    def _num_kept(self) -> int:
        return min(self._end, self.sliding_window - 1)

    def _capacity_for(self, num_positions: int) -> int:
        # Twice what must be there: dropping costs one copy of the window per window of tokens.
        wanted = super()._capacity_for(num_positions)
        return max(min(wanted, 2 * self.sliding_window), num_positions)

    def _first_visible(self, num_new: int) -> int:
        return max(0, self._end - num_new - self.sliding_window + 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of visible keys, position of the first): before `query_length` are added."""
        offset = max(self.cumulative_length - self.sliding_window + 1, 0)
        return self.cumulative_length - offset + query_length, offset

    def get_max_length(self) -> int:
        return self.sliding_window

    def reset(self) -> None:
        self.__init__(self._max_positions, self.sliding_window)  # type: ignore[misc]


def new_growing_cache(config: object, max_positions: int) -> DynamicCache:
    """An empty cache for the model of `config`: transformers' choice of layers, ours where keys and
    values are all that a layer keeps."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer(max_positions)
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = GrowingSlidingLayer(max_positions, layer.sliding_window)
    return cache


def is_growing(cache: Cache) -> bool:
    """Whether keys and values are all that the cache holds, every layer of it in place."""
    kinds = (GrowingLayer, DummyLayer)
    return any(isinstance(layer, GrowingLayer) for layer in cache.layers) and all(
        isinstance(layer, kinds) for layer in cache.layers
    )
