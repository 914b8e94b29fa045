"""Engines for tests that need no pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orchestrator.core.events import CoreSnapshot, RequestCounters
from orchestrator.front import Loaded
from orchestrator.requests import RequestBook
from orchestrator.settings import PipelineSettings
from orchestrator.text_model import TextModel
from orchestrator.totals import Totals
from protocol.messages import Accepted, Cancel, Generate, Rejected, Status

if TYPE_CHECKING:
    from orchestrator.clients import LocalClient
    from orchestrator.core.events import Submit
    from orchestrator.engine import Engine

DEMO = Path(__file__).resolve().parents[2] / "models/demo"


@dataclass
class _Scripted:
    """What orchestrator.engine.Engine shows a front; requests are kept, and never answered unless
    the test does."""

    is_ready: bool = True
    settings: PipelineSettings = field(
        default_factory=lambda: PipelineSettings(model_dir=DEMO, run_dir=Path("none"))
    )
    totals: Totals = field(default_factory=Totals)
    loaded: Loaded | None = None
    submitted: list[tuple[LocalClient, Generate, Submit]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def load(self) -> None:
        model = TextModel.load(DEMO)
        layout = cast("Any", type("Layout", (), {"num_experts": [24] * 8}))
        self.loaded = Loaded(self.settings, model, layout, 48)
        self._book = RequestBook(model, 48, 192)

    def status(self, text: str | None = None) -> Status:
        missing = [] if self.is_ready else ["gpu_worker"]
        return Status(self.is_ready, text or "serving", missing, [], 0)

    def num_restarts(self) -> dict[str, int]:
        return {}

    def snapshot(self) -> CoreSnapshot:
        return CoreSnapshot(
            0, 0, None, 0, None, None, [], 0, 0, 48, 48, 1e9, 2e9, None, 0, RequestCounters()
        )

    def ask(self, client: LocalClient, message: Generate | Cancel, matcher: object = None) -> None:
        if isinstance(message, Cancel):
            self.cancelled.append(message.request)
            return
        answer = self._book.accept(client, message, 0)
        if isinstance(answer, Rejected):
            client.hear(answer)
            return
        accepted, submit = answer
        assert isinstance(accepted, Accepted)
        client.hear(accepted)
        self.submitted.append((client, message, submit))


def StillEngine() -> Engine:
    return cast("Engine", _Scripted())
