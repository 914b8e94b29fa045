"""The orchestrator's eyes on the completions segment: what is finished, whoever says so first.

A worker that has finished a part writes a word, which the gpu_worker waits for, and then sends its
message. The gpu_worker may therefore be layers ahead when the message comes, or the worker may die
between the two. So before the core hears of a later layer, or of a death, the parts that it still
waits for are looked up in the segment, and what is finished there is told in the worker's own
words (`Copied`, `Executed`). The message that follows is then old news, which the core drops.

The other way round, a worker that knows only messages has its words written here.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from protocol.completions import COMPLETIONS, WAKE, Completion, Completions
from protocol.messages import Copied, Epoch, Execute, Executed

if TYPE_CHECKING:
    from protocol.lifeline import SegmentGrant
    from protocol.messages import Copy, CopyId, ExpertId, LayerId, StepId


class FinishedParts:
    """What workers were told to do for layer-steps and is not known to be done. `expert_bytes` are
    counted for each expert, as workers count them."""

    def __init__(self, completions: Completions, expert_bytes: int) -> None:
        self._completions = completions
        self._expert_bytes = expert_bytes
        self._copies: dict[CopyId, Copy] = {}
        self._executes: dict[tuple[Epoch, StepId, LayerId], list[ExpertId]] = {}

    @classmethod
    def open(cls, segments: list[SegmentGrant], fds: list[int], expert_bytes: int) -> FinishedParts:
        """Map the segment out of all that were made."""
        names = [grant.name for grant in segments]
        index = names.index(COMPLETIONS)
        wake_fd = fds[names.index(WAKE)] if WAKE in names else -1
        memory = mmap.mmap(fds[index], segments[index].num_bytes)
        return cls(Completions(memory, segments[index], wake_fd), expert_bytes)

    def asked(self, command: Copy | Execute) -> None:
        """A worker is told to do this."""
        if isinstance(command, Execute):
            key = (command.epoch, command.step, command.layer)
            self._executes.setdefault(key, []).extend(command.experts)
        elif command.step:
            self._copies[command.copy] = command

    def heard(self, event: Copied | Executed) -> None:
        """A worker's message; if it left no word, the gpu_worker gets one."""
        if isinstance(event, Copied):
            copy = self._copies.pop(event.copy, None)
            if copy is not None:
                self._write(event, copy.step, copy.layer, [copy.expert], copy.slot)
            return
        key = (event.epoch, event.step, event.layer)
        waiting = self._executes.get(key)
        if waiting is None:
            return
        known = [expert for expert in event.experts if expert in waiting]
        self._forget(key, known)
        self._write(event, event.step, event.layer, known, -1)

    def _write(
        self,
        event: Copied | Executed,
        step: StepId,
        layer: LayerId,
        experts: list[ExpertId],
        slot: int,
    ) -> None:
        completions = self._completions
        is_news = False
        for expert in experts:
            if completions.read(step, layer, expert, slot) is None:
                done = Completion(slot, event.epoch, event.started_ns, event.ended_ns)
                completions.write(step, layer, expert, done, is_waking=False)
                is_news = True
        if is_news:
            completions.wake()

    def look(self) -> list[Copied | Executed]:
        """What is finished and was not heard of; from now on it counts as heard."""
        found: list[Copied | Executed] = []
        if not self._copies and not self._executes:
            return found
        for copy in list(self._copies.values()):
            done = self._completions.read(copy.step, copy.layer, copy.expert, copy.slot)
            if done is not None and done.epoch == copy.epoch:
                del self._copies[copy.copy]
                found.append(
                    Copied(
                        copy.epoch, copy.copy, done.started_ns, done.ended_ns, self._expert_bytes
                    )
                )
        for key, waiting in list(self._executes.items()):
            found += self._look_at(key, waiting)
        return found

    def _look_at(
        self, key: tuple[Epoch, StepId, LayerId], waiting: list[ExpertId]
    ) -> list[Executed]:
        epoch, step, layer = key
        together: dict[Completion, list[ExpertId]] = {}
        for expert in waiting:
            done = self._completions.read(step, layer, expert)
            if done is not None and done.epoch == epoch:
                together.setdefault(done, []).append(expert)
        for experts in together.values():
            self._forget(key, experts)
        return [
            Executed(
                epoch,
                step,
                layer,
                experts,
                done.started_ns,
                done.ended_ns,
                len(experts) * self._expert_bytes,
            )
            for done, experts in together.items()
        ]

    def _forget(self, key: tuple[Epoch, StepId, LayerId], experts: list[ExpertId]) -> None:
        waiting = [expert for expert in self._executes[key] if expert not in experts]
        if waiting:
            self._executes[key] = waiting
        else:
            del self._executes[key]

    def copies_are_void(self) -> None:
        """The slots are gone."""
        self._copies.clear()

    def lost(self, epoch: Epoch) -> None:
        """This worker is over; what it had finished has been looked at."""
        self._copies = {
            number: copy for number, copy in self._copies.items() if copy.epoch != epoch
        }
        self._executes = {
            key: experts for key, experts in self._executes.items() if key[0] != epoch
        }
