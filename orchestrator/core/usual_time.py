"""What something usually takes, from a few samples of which some may be nonsense.

The *median* of the latest samples follows a change as soon as half of them are new, and up to half
of them may be anything. But it is blind to what happens to fewer than half of them every time: a
process that may run for 2 ms of every 62 answers four times at once and then stands still for
60 ms, and its median says that all is well. What matters for a split is the time that is lost. So
the *mean* counts too, where it is lost again and again: the samples are cut into blocks in the
order in which they came, and the third largest of the blocks' means is taken, of five the middle
one. One hiccup spoils two blocks at most; a standstill that comes back spoils most of them.

The usual time is the larger of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Samples in a block, and blocks that are looked at.
BLOCK = 6
NUM_BLOCKS = 5
#: So many blocks have at least the mean that counts; with fewer there is none.
LEAST_BLOCKS = 3
#: Samples that whoever keeps them needs to keep.
REMEMBERED = BLOCK * NUM_BLOCKS


def median(results: Sequence[float]) -> float:
    """The middle one; of an even number, the upper of the two. ValueError if there is none."""
    if not results:
        raise ValueError("nothing has no middle")
    return sorted(results)[len(results) // 2]


def lasting_mean(times: Sequence[float]) -> float:
    """What LEAST_BLOCKS of the latest blocks reach with their means; 0.0 if there are fewer."""
    ends = range(len(times), BLOCK - 1, -BLOCK)[:NUM_BLOCKS]
    if len(ends) < LEAST_BLOCKS:
        return 0.0
    kept = list(times)
    return sorted(sum(kept[end - BLOCK : end]) / BLOCK for end in ends)[-LEAST_BLOCKS]


def usual_time(times: Sequence[float], num_recent: int) -> float:
    """The larger of the median of the last `num_recent` and the lasting mean of all."""
    return max(median(list(times)[-num_recent:]), lasting_mean(times))
