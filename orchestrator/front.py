"""What may stand in front of an engine, inside its process and its loop: the HTTP server does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from expert_store.layout import StoreLayout
    from orchestrator.engine import Engine
    from orchestrator.settings import PipelineSettings
    from orchestrator.text_model import TextModel


@dataclass(frozen=True)
class Loaded:
    """A model that is loaded: resolved settings, text and sizes."""

    settings: PipelineSettings
    text_model: TextModel
    layout: StoreLayout
    num_slots: int


class Front(Protocol):
    """Started before the model loads, so that it can say how far loading is, and ended last."""

    async def start(self, engine: Engine) -> None:
        """Raises UserError when it cannot."""

    async def drain(self) -> None:
        """Take nothing new and wait for what is open, within the front's own time limit."""

    async def stop(self) -> None:
        """End, within a second or two; all requests have had their last message."""
