"""Who is there to do the work: one gpu_worker, one dma_worker, any number of cpu_workers.

A worker is its epoch. Epochs never repeat, so an epoch that left stays gone: whatever is still
heard of it, even that it joined, is late news.

The *link* is the branch that fills slots. It exists when the gpu_worker is there and somebody can
write into its slots: the dma_worker, or the gpu_worker itself when its arena is "in_process".

The rates, B_H of the host and B_P of the link, are those a person stated, else what the workers
measured: the sum of all cpu_workers, and the worker that is the link. Where experts lie on NUMA
nodes, cpu_workers have a rate for those of their own node and one for the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.core.events import WorkerFault
from orchestrator.core.near_division import CpuRates

if TYPE_CHECKING:
    from orchestrator.core.events import WorkerJoined
    from protocol.messages import Arena, Epoch, Role


class Roster:
    """The workers of the moment. All attributes are for reading; `join` and `lose` change them."""

    __slots__ = (
        "_cpus",
        "_dma_bytes_per_s",
        "_gone",
        "_gpu_bytes_per_s",
        "_num_slots",
        "_stated_host_bytes_per_s",
        "_stated_link_bytes_per_s",
        "arena",
        "cpu_epochs",
        "cpu_rates",
        "cpu_shares",
        "dma_epoch",
        "gpu_epoch",
        "host_bytes_per_s",
        "link_bytes_per_s",
        "link_epoch",
    )

    def __init__(
        self,
        num_slots: int,
        stated_host_bytes_per_s: float | None,
        stated_link_bytes_per_s: float | None,
    ) -> None:
        self._num_slots = num_slots
        self._stated_host_bytes_per_s = stated_host_bytes_per_s
        self._stated_link_bytes_per_s = stated_link_bytes_per_s
        self._gone: set[Epoch] = set()
        self._cpus: dict[Epoch, WorkerJoined] = {}
        self._dma_bytes_per_s = 0.0
        self._gpu_bytes_per_s = 0.0
        self.gpu_epoch: Epoch | None = None
        self.arena: Arena | None = None
        self.dma_epoch: Epoch | None = None
        #: The worker that takes `Copy`; None when slots cannot be filled.
        self.link_epoch: Epoch | None = None
        self.cpu_epochs: list[Epoch] = []
        #: For each of `cpu_epochs`, its part of set C; only the ratios count.
        self.cpu_shares: list[float] = []
        #: The same with nodes and what they cost; empty where no worker is bound to one.
        self.cpu_rates: list[CpuRates] = []
        self.host_bytes_per_s = 0.0
        self.link_bytes_per_s = 0.0
        self._recount()

    @property
    def attached_dma(self) -> Epoch | None:
        """The dma_worker that has (or is to get) the arena of the gpu_worker."""
        if self.arena is None or self.arena.kind == "in_process":
            return None
        return self.dma_epoch

    def join(self, event: WorkerJoined) -> bool:
        """Take a worker in; False if this epoch is here already or has left.

        Raises:
            WorkerFault: the role is taken, the arena is missing or too small, or the rate is no
                rate.
        """
        epoch = event.epoch
        if epoch in self._gone or self._is_here(epoch):
            return False
        for rate in (event.bytes_per_s, event.far_bytes_per_s):
            if not 0 <= rate < float("inf"):
                raise WorkerFault(epoch, f"measured a rate of {rate} bytes/s")
        match event.role:
            case "gpu_worker":
                if self.gpu_epoch is not None:
                    raise WorkerFault(epoch, f"is a second gpu_worker beside {self.gpu_epoch}")
                if event.arena is None or event.arena.num_slots < self._num_slots:
                    raise WorkerFault(epoch, f"has no arena of {self._num_slots} slots")
                self.gpu_epoch, self.arena = epoch, event.arena
                self._gpu_bytes_per_s = event.bytes_per_s
            case "dma_worker":
                if self.dma_epoch is not None:
                    raise WorkerFault(epoch, f"is a second dma_worker beside {self.dma_epoch}")
                self.dma_epoch, self._dma_bytes_per_s = epoch, event.bytes_per_s
            case "cpu_worker":
                self._cpus[epoch] = event
        self._recount()
        return True

    def lose(self, epoch: Epoch) -> Role | None:
        """Take a worker out and say what it was; None if it was not here."""
        self._gone.add(epoch)
        role: Role | None = None
        if epoch == self.gpu_epoch:
            self.gpu_epoch, self.arena, role = None, None, "gpu_worker"
        elif epoch == self.dma_epoch:
            self.dma_epoch, role = None, "dma_worker"
        elif epoch in self._cpus:
            del self._cpus[epoch]
            role = "cpu_worker"
        self._recount()
        return role

    def _is_here(self, epoch: Epoch) -> bool:
        return epoch in self._cpus or epoch in (self.gpu_epoch, self.dma_epoch)

    def _recount(self) -> None:
        """Everything that follows from who is here, once per change and not per layer-step."""
        is_in_process = self.arena is not None and self.arena.kind == "in_process"
        self.link_epoch = self.gpu_epoch if is_in_process else self.attached_dma
        self.cpu_epochs = list(self._cpus)
        joined = self._cpus.values()
        measured = [cpu.bytes_per_s for cpu in joined if cpu.bytes_per_s > 0]
        # Who measured nothing is taken for average, so that it gets its part.
        usual = sum(measured) / len(measured) if measured else 1.0
        self.cpu_shares = [cpu.bytes_per_s or usual for cpu in joined]
        self.cpu_rates = []
        if any(cpu.numa_node is not None for cpu in joined):
            self.cpu_rates = [
                CpuRates(cpu.numa_node, near, cpu.far_bytes_per_s or near)
                for cpu, near in zip(joined, self.cpu_shares, strict=True)
            ]
        self.host_bytes_per_s = _stated_or(self._stated_host_bytes_per_s, sum(measured))
        link = self._gpu_bytes_per_s if is_in_process else self._dma_bytes_per_s
        self.link_bytes_per_s = _stated_or(self._stated_link_bytes_per_s, link)


def _stated_or(stated: float | None, measured: float) -> float:
    return measured if stated is None else stated
