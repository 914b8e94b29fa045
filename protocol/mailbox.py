"""The mailbox: messages between the orchestrator and one worker through shared memory.

    words    int64 [5, 8]     the first word of each row: head and tail of `down`, head and tail of
                              `up`, and 1 in the last if the worker uses all this
    down     uint8 [RING]     commands, orchestrator to worker
    up       uint8 [RING]     events, worker to orchestrator
    "mailbox_wake", "bell"    eventfds beside it, to end the worker's sleep and the orchestrator's

The messages are those of the socket, byte for byte, and say the same. A message over ZeroMQ wakes
an I/O thread on either side before it wakes the receiver; here the sender wakes the receiver. Until
and with `Welcome` everything goes over the socket, afterwards everything through the mailbox, so
there is never a question of order between the two. Each worker gets a mailbox of its own with its
life line, and it ends with that.

*The rings.* One writer, one reader. `head` and `tail` count bytes since the beginning; byte n lies
at n modulo RING. A record is a uint32 length, that many bytes, and padding up to a multiple of 8;
it lies in one piece, and where none fits before the end of the ring, or where the writer likes to
begin anew, the length `SKIP` says that the next record begins at the ring's first byte. A ring
takes the largest message there may be; who finds no room has a reader that does not read.

*Order of memory.* Bytes before `head`, in the writer; `head` before bytes, in the reader. Where a
processor may swap those, the writer has the kernel run a barrier between the two, for which both
sides have registered (protocol.membarrier).
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from typing import TYPE_CHECKING, Generic, TypeVar

from protocol.codec import MessageDecoder, encode
from protocol.errors import OrchestratorGone, ProtocolError
from protocol.lifeline import SegmentGrant
from protocol.membarrier import MemoryBarrier, is_strongly_ordered
from protocol.messages import MAX_MESSAGE_BYTES
from protocol.step_segment import segment_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.messages import Message

T = TypeVar("T")
Buffer = mmap.mmap | bytearray

MAILBOX = "mailbox"
#: Eventfds (non-blocking), no memory: grants of 0 bytes.
MAILBOX_WAKE, BELL = "mailbox_wake", "bell"
WAKE_GRANTS = [SegmentGrant(MAILBOX_WAKE, 0), SegmentGrant(BELL, 0)]

#: Any message fits, wherever the one before ended. Pages that nobody wrote take no memory.
RING_BYTES = 2 * MAX_MESSAGE_BYTES + 64
SKIP = 0xFFFFFFFF
#: An empty ring is begun anew from here on, so that the same few pages stay in use.
_REWIND_BYTES = 16 * 1024
_ALIGN = 8
_WORDS_PER_LINE = 8
_DOWN_HEAD, _DOWN_TAIL, _UP_HEAD, _UP_TAIL, _IS_USED = (8 * line for line in range(5))
_ONE = struct.pack("=Q", 1)
#: Who reads nothing for so long is gone.
_SEND_TIMEOUT_S = 2.0
_NAP_S = 0.001


def mailbox_grant(ring_bytes: int = RING_BYTES) -> SegmentGrant:
    """Layout of a mailbox."""
    return segment_of(
        MAILBOX,
        ("words", "int64", [5, _WORDS_PER_LINE]),
        ("down", "uint8", [ring_bytes]),
        ("up", "uint8", [ring_bytes]),
    )


def ordering_barrier() -> tuple[bool, MemoryBarrier | None]:
    """(whether this process may use a mailbox, the barrier that its writers need; None: none)."""
    if is_strongly_ordered():
        return True, None
    barrier = MemoryBarrier()
    return barrier.is_there and barrier.register(), barrier


def ring_eventfd(fd: int) -> None:
    """Wake whoever sleeps on this eventfd."""
    try:
        os.write(fd, _ONE)
    except BlockingIOError:  # the counter is full: it is awake for sure
        return


def quiet_eventfd(fd: int) -> None:
    """What was rung for will be seen from here on."""
    try:
        os.read(fd, 8)
    except BlockingIOError:
        return


class RingWriter:
    """The end of a ring that messages go in at. `head` and `tail` are indices into `words`."""

    def __init__(
        self,
        words: memoryview,
        head: int,
        tail: int,
        ring: memoryview,
        barrier: MemoryBarrier | None,
    ) -> None:
        self._words = words
        self._head_word, self._tail_word = head, tail
        self._ring = ring
        self._lengths = ring.cast("I")
        self._size_bytes = len(ring)
        self._head = words[head]
        self._barrier = barrier

    def put(self, frame: bytes) -> bool:
        """Add one message; False if there is no room for it."""
        words, size_bytes, head = self._words, self._size_bytes, self._head
        tail = words[self._tail_word]
        num_bytes = len(frame)
        needed_bytes = (4 + num_bytes + _ALIGN - 1) & -_ALIGN
        start = head % size_bytes
        if start + needed_bytes > size_bytes or (start > _REWIND_BYTES and head == tail):
            skipped_bytes = size_bytes - start
            if head + skipped_bytes + needed_bytes - tail > size_bytes:
                return False
            self._lengths[start >> 2] = SKIP
            head += skipped_bytes
            start = 0
        elif head + needed_bytes - tail > size_bytes:
            return False
        self._lengths[start >> 2] = num_bytes
        self._ring[start + 4 : start + 4 + num_bytes] = frame
        if self._barrier is not None:
            self._barrier.run()
        self._head = words[self._head_word] = head + needed_bytes
        return True


class RingReader:
    """The end of a ring that messages come out of."""

    def __init__(self, words: memoryview, head: int, tail: int, ring: memoryview) -> None:
        self._words = words
        self._head_word, self._tail_word = head, tail
        self._ring = ring
        self._lengths = ring.cast("I")
        self._size_bytes = len(ring)
        self._tail = words[tail]

    @property
    def is_empty(self) -> bool:
        return self._words[self._head_word] == self._tail

    def take(self) -> bytes | None:
        """The next message, None if there is none.

        Raises:
            ProtocolError: what lies there was not written by a RingWriter. Nothing more will come.
        """
        words, size_bytes, tail = self._words, self._size_bytes, self._tail
        head = words[self._head_word]
        if head == tail:
            return None
        start = tail % size_bytes
        num_bytes = self._lengths[start >> 2]
        if num_bytes == SKIP:
            tail += size_bytes - start
            start = 0
            num_bytes = self._lengths[0]
        needed_bytes = (4 + num_bytes + _ALIGN - 1) & -_ALIGN
        if not tail + needed_bytes <= head <= self._tail + size_bytes or start % _ALIGN:
            raise ProtocolError("has a mailbox whose rings make no sense")
        if start + needed_bytes > size_bytes:
            raise ProtocolError("has a mailbox whose rings make no sense")
        frame = bytes(self._ring[start + 4 : start + 4 + num_bytes])
        self._tail = words[self._tail_word] = tail + needed_bytes
        return frame


class _Memory:
    """The segment's fields as flat arrays."""

    def __init__(self, memory: Buffer, grant: SegmentGrant) -> None:
        view = memoryview(memory)
        words = grant.fields["words"]
        num_bytes = 8 * words.shape[0] * words.shape[1]
        self.words = view[words.offset_bytes : words.offset_bytes + num_bytes].cast("q")
        self.down, self.up = (
            view[field.offset_bytes : field.offset_bytes + field.shape[0]]
            for field in (grant.fields["down"], grant.fields["up"])
        )


class OrchestratorMailbox:
    """The orchestrator's side: commands in, events out."""

    def __init__(
        self, memory: Buffer, grant: SegmentGrant, wake_fd: int, barrier: MemoryBarrier | None
    ) -> None:
        """`wake_fd` ends the worker's sleep."""
        fields = _Memory(memory, grant)
        self._words = fields.words
        self._down = RingWriter(self._words, _DOWN_HEAD, _DOWN_TAIL, fields.down, barrier)
        self._up = RingReader(self._words, _UP_HEAD, _UP_TAIL, fields.up)
        self._wake_fd = wake_fd
        #: Raises ProtocolError if the worker has broken its ring.
        self.take = self._up.take

    @property
    def is_used(self) -> bool:
        """Whether the worker, by the time of its HELLO, wants what follows to come through here."""
        return self._words[_IS_USED] == 1

    def send(self, message: Message) -> bool:
        """Send one command; False if the worker reads nothing any more."""
        if not self._down.put(encode(message)):
            return False
        ring_eventfd(self._wake_fd)
        return True


class MailboxChannel(Generic[T]):
    """The worker's side, in place of its DealerChannel from the Welcome on."""

    def __init__(
        self,
        memory: Buffer,
        grant: SegmentGrant,
        fds: Mapping[str, int],
        decoder: MessageDecoder[T],
        lifeline_fd: int,
        barrier: MemoryBarrier | None,
    ) -> None:
        """`fds`: the eventfds, by the names of their grants."""
        fields = _Memory(memory, grant)
        self._words = fields.words
        self._down = RingReader(self._words, _DOWN_HEAD, _DOWN_TAIL, fields.down)
        self._up = RingWriter(self._words, _UP_HEAD, _UP_TAIL, fields.up, barrier)
        self._own_fd, self._bell_fd = fds[MAILBOX_WAKE], fds[BELL]
        self._decoder = decoder
        self._lifeline_fd = lifeline_fd
        self._poll = select.poll()
        self._poll.register(self._own_fd, select.POLLIN)
        self._poll.register(lifeline_fd, select.POLLIN)
        self._wake_fd = -1
        self.num_dropped = 0

    def use(self) -> None:
        """Say, before HELLO, that what follows the Welcome is to come through here."""
        self._words[_IS_USED] = 1

    def send(self, message: Message) -> None:
        """Send one event.

        Raises:
            OrchestratorGone: nobody took what is there within two seconds.
        """
        frame = encode(message)
        if not self._up.put(frame):
            deadline_s = time.monotonic() + _SEND_TIMEOUT_S
            while not self._up.put(frame):
                if time.monotonic() > deadline_s:
                    raise OrchestratorGone("the orchestrator does not take messages")
                ring_eventfd(self._bell_fd)
                time.sleep(_NAP_S)
        ring_eventfd(self._bell_fd)

    def receive(self, timeout_s: float | None = None, wake_fd: int = -1) -> T | None:
        """See DealerChannel.receive.

        Raises:
            OrchestratorGone: the life line ended and nothing is left to read.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            frame = self._down.take()
            if frame is not None:
                try:
                    return self._decoder.decode(frame)
                except ProtocolError:
                    self.num_dropped += 1
                    continue
            if wake_fd != self._wake_fd:
                self._watch(wake_fd)
            timeout_ms = None
            if deadline_s is not None:
                timeout_ms = max(0.0, deadline_s - time.monotonic()) * 1e3
            ready = [fd for fd, _ in self._poll.poll(timeout_ms)]
            if self._own_fd in ready:
                quiet_eventfd(self._own_fd)
            elif self._lifeline_fd in ready:
                if self._down.is_empty:
                    raise OrchestratorGone("the orchestrator closed the life line")
            else:
                return None

    def close(self) -> None:
        """Nothing to do: what was sent lies in the ring, which the other side reads to its end."""

    def _watch(self, wake_fd: int) -> None:
        """Poll `wake_fd` as well from now on, in place of the one before."""
        if self._wake_fd >= 0:
            self._poll.unregister(self._wake_fd)
        if wake_fd >= 0:
            self._poll.register(wake_fd, select.POLLIN)
        self._wake_fd = wake_fd
