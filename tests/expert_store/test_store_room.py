"""Which of two segments a load goes into, and that the store is the same in both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from expert_store import store_room
from expert_store.checkpoint import open_checkpoint
from expert_store.loader import Plan, load
from expert_store.memory import MemoryRoom, NotEnoughMemoryError
from expert_store.segment import StoreView, create_segment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def model(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("qwen3_moe")


@pytest.mark.parametrize("expert_dtype", ["auto", "int8"])
def test_reserved_pages_hold_the_same_store(
    expert_dtype: str, model: Path, segment: int, reserved: int
) -> None:
    plan = Plan(open_checkpoint(model), "bfloat16", expert_dtype)
    told: list[str] = []
    loaded = load(plan, segment, lambda progress: told.append(progress.text), (), reserved)
    assert loaded.is_reserved
    assert loaded.huge_page_bytes >= loaded.layout.total_bytes
    assert any(text.startswith("making room in huge pages") for text in told)
    with pytest.raises(Exception, match="the segment is empty"):
        StoreView(segment)  # the other was not touched
    load(plan, segment, lambda _: None)
    with StoreView(reserved) as found, StoreView(segment) as expected:
        assert found.has_huge_pages
        assert found.memory[: loaded.layout.total_bytes] == expected.memory


def test_memory_set_aside_is_not_asked_for_again(
    model: Path, segment: int, reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(open_checkpoint(model), "auto")
    enough = plan.dense_bytes + 400_000_000
    monkeypatch.setattr(store_room, "memory_room", lambda: MemoryRoom(enough, "what is left"))
    with pytest.raises(NotEnoughMemoryError):
        load(plan, segment, lambda _: None)
    assert load(plan, segment, lambda _: None, (), reserved).is_reserved


def test_too_few_of_them_fall_back_before_anything_is_written(
    model: Path, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_room, "reserve_pages", lambda *_: None)
    other = create_segment("other")
    loaded = load(Plan(open_checkpoint(model), "auto"), segment, lambda _: None, (), other)
    assert not loaded.is_reserved
    assert "too few reserved pages" in loaded.reserved_note
    with StoreView(segment) as view:
        assert view.layout == loaded.layout
    with pytest.raises(Exception, match="the segment is empty"):
        StoreView(other)
