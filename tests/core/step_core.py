"""A core whose answers leave out what it writes into the residency table: tests of steps and
workers read better without; tests/core/test_core_table.py looks at nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.core import Core
from orchestrator.core.events import Publish, ResetTable, Unpublish

if TYPE_CHECKING:
    from orchestrator.core.events import CoreCommand, CoreEvent


class StepCore(Core):
    """See the module."""

    def handle(self, event: CoreEvent) -> list[CoreCommand]:
        return [
            command
            for command in super().handle(event)
            if not isinstance(command, (Publish, Unpublish, ResetTable))
        ]
