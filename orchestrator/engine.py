"""The orchestrator process: everything that acts, around the core that decides.

    run directory -> sockets -> load the store -> slots, segments -> workers join -> serve -> end

While serving there is one path: a message arrives, the hub says whether it may count, the core
answers with commands, and they are carried out (`circuit`). All of it runs in one loop without a
lock or an await in between, so events reach the core one by one.

Ends: a signal, the parent's end, a worker that cannot run, or a fault of ours. Each sets the same
future; then clients get their last message, workers are asked to leave, and nothing stays behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import time
from typing import TYPE_CHECKING, Any

import msgspec

from orchestrator.circuit import Circuit
from orchestrator.clients import Client, Clients
from orchestrator.core.core import Core
from orchestrator.core.events import (
    ArmTaken,
    CoreCommand,
    CoreEvent,
    CoreSnapshot,
    Drifted,
    Planned,
    PromptRead,
    RequestDone,
    Resize,
    Stalled,
    TokenOut,
    Withdraw,
)
from orchestrator.data_plane import DataPlane
from orchestrator.ending import Ending
from orchestrator.front import Front, Loaded
from orchestrator.hub import Hub, Worker
from orchestrator.latency_log import LatencyFold, WorkerRecord
from orchestrator.lifelines import Lifelines
from orchestrator.load_progress import LoadProgress, tell_errors
from orchestrator.loading import load_store
from orchestrator.log_file import LogFile
from orchestrator.mailroom import Mailroom
from orchestrator.native_reuse import load_kernel
from orchestrator.news import News
from orchestrator.opening import Opening, wants_opening
from orchestrator.replayed_routing import ReplayedRouting
from orchestrator.requests import RequestBook
from orchestrator.set_up import (
    check_settings,
    core_config,
    log_header,
    make_segments,
    make_weight_segments,
    worker_setup,
)
from orchestrator.settings import PipelineSettings, count_slots
from orchestrator.standing import status_of
from orchestrator.supervisor import Supervisor
from orchestrator.text_model import TextModel
from orchestrator.totals import Totals
from orchestrator.trace_recorder import TraceRecorder
from protocol.channel import RouterChannel
from protocol.codec import to_orchestrator
from protocol.errors import UserError
from protocol.messages import (
    Cancel,
    ClientRequest,
    Generate,
    GetStatus,
    Role,
    Status,
    WorkerEvent,
    WorkerSetup,
)
from protocol.run_dir import LockedRunDir
from protocol.sizes import part_of

if TYPE_CHECKING:
    from expert_store.layout import StoreLayout
    from expert_store.reports import Progress
    from orchestrator.grammars import Matcher

log = logging.getLogger("headrace")

_TICK_S = 1.0


class Engine:
    """One pipeline, from loading to its end."""

    def __init__(self, settings: PipelineSettings, front: Front | None = None) -> None:
        self.settings = settings
        self._front = front
        self._draining: asyncio.Task[None] | None = None
        self.totals = Totals()
        self._news = News(time.monotonic)
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[Ending]
        self._core: Core | None = None
        self._clients: Clients
        self._layout: StoreLayout
        self._text_model: TextModel
        #: What is known once the model is loaded.
        self.loaded: Loaded | None = None
        self._num_slots = 0
        self._is_calibrated = False
        self._opening: Opening | None = None
        self._plane: DataPlane
        self._channel: RouterChannel[WorkerEvent | ClientRequest]
        self._mailroom: Mailroom
        self._lifelines: Lifelines
        self._hub: Hub
        self._supervisor: Supervisor | None = None
        self._log_file: LogFile | None = None
        self.fold = LatencyFold()
        self._recorder: TraceRecorder | None = None
        self._circuit: Circuit | None = None
        self._status_text = "starting"

    async def run(self) -> Ending:
        """Raises UserError for what a person can put right."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._loop.set_exception_handler(self._on_loop_fault)
        with contextlib.ExitStack() as stack:
            run_dir = LockedRunDir(self.settings.run_dir)
            stack.callback(run_dir.close)
            self._watch_signals_and_parent(stack)
            self._channel = RouterChannel(run_dir, to_orchestrator(), self._on_message)
            stack.callback(self._channel.close)
            self._clients = Clients(self._channel.send, lambda: sum(self.num_restarts().values()))
            self._mailroom = Mailroom(self._loop, self._channel.count_drop)
            stack.callback(self._mailroom.close)
            self._lifelines = Lifelines(
                run_dir, self._loop, lambda token: self._hub.line_ended(token)
            )
            stack.callback(self._lifelines.close)
            self._hub = Hub(
                self._lifelines,
                self._channel.send,
                self._channel.count_drop,
                self._deliver,
                self._setup_for,
                self._on_worker_change,
                is_by_hand=not self.settings.is_supervising,
            )
            self._channel.start(self._loop)
            if self._front is not None:
                await self._front.start(self)
            serving = asyncio.create_task(self._serve(run_dir, stack))
            waits: set[asyncio.Future[Any]] = {serving, self._ended}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not self._ended.done():
                self._end(Ending.of(serving.exception()))
            ending = self._ended.result()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            try:
                await self._say_goodbye(ending)
            except Exception as error:  # whatever it is, no worker may be left behind
                fault = Ending.of(error)
                ending = ending if ending.exit_code else fault
            if self._supervisor is not None:
                await self._supervisor.stop()
            for kept in (self._recorder, self._log_file):
                if kept is not None:
                    ending = ending.and_lost(kept.close())
        return ending

    # ---------------------------------------------------------------- start

    async def _serve(self, run_dir: LockedRunDir, stack: contextlib.ExitStack) -> None:
        settings = self.settings
        check_settings(settings)
        path = settings.replay_routing
        replayed = None if path is None else ReplayedRouting(path)
        self._text_model = TextModel.load(settings.model_dir, settings.max_context)
        settings = self.settings = msgspec.structs.replace(
            settings, max_rows=self._text_model.rows_per_step(settings.max_rows)
        )
        if not settings.is_supervising:
            log.warning(
                "loading; start `headrace gpu-worker`, `headrace dma-worker` and "
                "`headrace cpu-worker` with --run-dir %s: they wait until the model is loaded",
                run_dir.path,
            )
        if settings.latency_log is not None:
            self._log_file = LogFile(settings.latency_log)
            stack.callback(self._log_file.close)
        if settings.record_routing is not None:
            self._recorder = TraceRecorder(settings.record_routing)
            stack.callback(self._recorder.discard)
        weights_fd, reserved_fd = make_weight_segments(settings, stack)
        with LoadProgress(settings.model_dir.resolve().name) as progress:

            def on_progress(report: Progress) -> None:
                self._status_text = f"loading: {part_of(report.done_bytes, report.total_bytes)}"
                progress.update(report.done_bytes, report.total_bytes, report.text)
                if report.layout is not None and replayed is not None:
                    replayed.check(report.layout)
                if settings.is_supervising and self._supervisor is None:
                    # The files are whole. A worker's imports take seconds: it makes them
                    # meanwhile, and its life line waits for the segments.
                    self._supervisor = Supervisor(
                        settings.cpu_worker_flags,
                        run_dir,
                        settings.log_flags,
                        settings.kernel_flags,
                        self._hub.last_words,
                        self._fatal,
                    )
                    self._supervisor.start()

            loaded = await load_store(
                settings.model_dir,
                settings.dtype,
                settings.expert_dtype,
                weights_fd,
                on_progress,
                settings.numa_nodes,
                reserved_fd,
            )
        if loaded.is_reserved and reserved_fd is not None:
            weights_fd = reserved_fd
        if loaded.errors is not None:
            tell_errors(loaded.errors)
        self._layout = layout = loaded.layout
        self._num_slots = count_slots(settings.slots, layout.total_experts)
        self._make_core(loaded.numa_nodes)
        if self._recorder is not None:
            self._recorder.begin(layout)
        segments, fds = make_segments(
            settings, layout, self._num_slots, weights_fd, stack, replayed
        )
        replayed = None  # the segment has it
        self._plane = DataPlane(
            segments, fds, layout.block_bytes, self._loop.call_later, self._deliver
        )
        if wants_opening(settings, layout, is_calibrated=self._is_calibrated):
            self._opening = Opening(
                layout, self._num_slots, segments, fds, self._hub.command, self._deliver
            )
            stack.callback(self._opening.close)
        assert self._core is not None
        self._circuit = Circuit(
            self._core, self._hub, self._plane, self._clients, self._account, self._on_own_fault
        )
        self._begin_log()
        self._status_text = "waiting for workers"
        gc.collect()
        gc.freeze()  # what exists now lives as long as the process
        self._lifelines.open(segments, fds, self._mailroom)
        while True:
            await asyncio.sleep(_TICK_S)
            if self._plane.has_moved():
                self._hub.heard_of("gpu_worker")
            self._hub.condemn_hung(settings.worker_timeout_s)
            if self._log_file is not None:
                self._log_file.flush()

    def _make_core(self, numa_nodes: tuple[int, ...]) -> None:
        context = self._text_model.context
        config = core_config(self.settings, self._layout, self._num_slots, context, numa_nodes)
        self._is_calibrated = config.costs is not None
        try:
            self._core = Core(config, load_kernel())
        except ValueError as error:
            raise UserError(f"The pipeline cannot run this way: {error}.") from None
        self._clients.open(
            RequestBook(self._text_model, self._num_slots, self._layout.total_experts)
        )
        self.loaded = Loaded(self.settings, self._text_model, self._layout, self._num_slots)

    def _begin_log(self) -> None:
        if self._log_file is None:
            return
        self.fold = LatencyFold(self._log_file.write)
        self._log_file.write(log_header(self._layout, self._num_slots))

    def _setup_for(self, role: Role) -> WorkerSetup:
        context = self._text_model.context
        known = self._is_calibrated
        return worker_setup(self.settings, self._layout, self._num_slots, context, role, known)

    # ---------------------------------------------------------------- the path while serving

    def _on_message(self, identity: bytes, message: WorkerEvent | ClientRequest) -> None:
        if isinstance(message, (Generate, Cancel, GetStatus)):
            if self._hub.is_worker(identity):
                self._channel.count_drop(f"{type(message).__name__} from a worker")
            else:
                self.ask(identity, message)
        else:
            self._hub.handle(identity, message)

    def _deliver(self, event: CoreEvent) -> None:
        if self._opening is not None and self._opening.takes(event):
            return
        assert self._circuit is not None  # nobody is welcomed before
        self._circuit.deliver(event)

    def _account(
        self, event: CoreEvent, commands: list[CoreCommand], now_ns: int
    ) -> list[CoreEvent]:
        """Log, count and tell clients what has happened; what follows from that."""
        events: list[CoreEvent] = []
        self.fold.event(event)
        self.totals.event(event, now_ns)
        if self._recorder is not None:
            self._recorder.hear(event, commands)
        for command in commands:
            self.fold.command(command, now_ns)
            self.totals.command(command)
            match command:
                case Planned():
                    log.debug("%s", command)
                case TokenOut() | PromptRead():
                    if not self._clients.token(command):
                        events.append(Withdraw(command.request))
                case RequestDone():
                    self._finish(command)
                case Drifted() | ArmTaken():
                    self._news.tell(command)
                case Stalled() if not self._ended.done():  # who leaves needs no workers
                    log.warning("%s", command.text)
                    self._clients.tell(self.status(command.text))
        return events

    def _finish(self, done: RequestDone) -> None:
        self._clients.done(done, self.fold.end_request(done.request))
        if self._log_file is not None:
            self._log_file.flush()

    # ---------------------------------------------------------------- clients

    def ask(self, client: Client, message: ClientRequest, matcher: Matcher | None = None) -> None:
        """Do what a client asks for, inside this process or beyond the socket. What it hears, now
        and later, goes to it alone. `matcher`: the grammar that a Generate is held to."""
        match message:
            case GetStatus():
                self._clients.send(client, self.status())
            case Generate():
                submit = self._clients.accept(client, message, matcher)
                if submit is not None:
                    self.fold.begin_request(submit.request)
                    self._deliver(submit)
            case Cancel():
                request = self._clients.find(client, message.request)
                if request is not None:
                    self._deliver(Withdraw(request))

    def resize(self, num_slots: int) -> None:
        """Use so many of the slots from the next step on."""
        self._deliver(Resize(num_slots))

    def snapshot(self) -> CoreSnapshot | None:
        """What the core sees now; None while loading."""
        return None if self._core is None else self._core.snapshot()

    def status(self, text: str | None = None) -> Status:
        """Who is here and who is missing; `text` in place of what the pipeline is doing."""
        return status_of(
            self.settings,
            self._hub,
            self._status_text if text is None else text,
            self.num_restarts(),
            self._channel.num_dropped,
            self._lifelines.waiting,
            is_preloading=self._core is not None and self._core.is_preloading,
        )

    def num_restarts(self) -> dict[Role, int]:
        """Workers that took the place of a lost one, by role."""
        return self._supervisor.num_restarts if self._supervisor else self._hub.num_replaced

    def replace_worker(self, pid: int) -> bool:
        """Kill the worker of this process; a supervisor starts another. False: there is none."""
        return self._hub.kill(pid)

    # ---------------------------------------------------------------- workers

    def _on_worker_change(self, worker: Worker, change: str) -> None:
        if change == "joined":
            self._status_text = "serving"
            if self._supervisor is not None:
                self._supervisor.worker_is_ready(worker.line.pid)
            if self.status().is_ready:
                log.info("ready: all workers are here")
        now_ns, pid = time.monotonic_ns(), worker.line.pid
        self.fold.record(WorkerRecord(worker.epoch, worker.role, pid, change, now_ns))

    # ---------------------------------------------------------------- ends

    def _watch_signals_and_parent(self, stack: contextlib.ExitStack) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(signum, self._on_signal)
            stack.callback(self._loop.remove_signal_handler, signum)
        parent_fd = self.settings.parent_fd
        if parent_fd is not None:
            self._loop.add_reader(parent_fd, self._end, Ending())
            stack.callback(self._loop.remove_reader, parent_fd)

    def _on_signal(self) -> None:
        """The first asks for an orderly end, requests may finish; the next ends at once."""
        if self._front is None or self.loaded is None or self._draining is not None:
            self._end(Ending())
            return
        self._draining = asyncio.create_task(self._front.drain())
        self._draining.add_done_callback(lambda _: self._end(Ending()))

    def _fatal(self, sentence: str, exit_code: int) -> None:
        self._end(Ending(exit_code, sentence))

    def _on_own_fault(self) -> None:
        self._end(Ending.own_fault())

    def _on_loop_fault(self, loop: object, context: dict[str, Any]) -> None:
        if "transport" in context and isinstance(context.get("exception"), OSError):
            log.warning("a connection broke: %s", context["exception"])  # a client's, not ours
            return
        log.error("fault: %s", context.get("message"), exc_info=context.get("exception"))
        self._on_own_fault()

    def _end(self, ending: Ending) -> None:
        if not self._ended.done():
            self._ended.set_result(ending)

    async def _say_goodbye(self, ending: Ending) -> None:
        """Clients get their last message, workers are asked to leave."""
        sentence = ending.sentence or "The orchestrator was told to stop."
        if self._core is not None:
            self._clients.abandon(sentence)
        if self._draining is not None:
            self._draining.cancel()
        if self._front is not None:
            await self._front.stop()
        if self._supervisor is not None:
            self._supervisor.announce_stop()
        self._hub.say_goodbye("the orchestrator stops")
        await asyncio.sleep(0.05)  # let the last messages leave
        self.fold.close()
