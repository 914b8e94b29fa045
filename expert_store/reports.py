"""What the loader process says: one JSON object per line on its standard output.

The parent decodes lines with `decode_report`; nothing else ever appears there. An error is the last
line, followed by exit code 2; a load ends with exactly one ``done`` or ``error``.
"""

from __future__ import annotations

import msgspec

from expert_store.layout import StoreLayout


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="type"):
    """How far the load is. ``done_bytes`` never falls and ends at ``total_bytes``."""

    done_bytes: int
    total_bytes: int
    text: str
    layout: StoreLayout | None = None
    """Said once, as soon as the config has told what the store will be and before it is read."""


class Failure(msgspec.Struct, frozen=True, tag="error", tag_field="type"):
    """Bad input, as one sentence for the person who gave it."""

    message: str


class TensorError(msgspec.Struct, frozen=True):
    """One tensor that was quantised: |weights - what their codes mean| / |weights|."""

    name: str
    relative_error: float


class QuantisationErrors(msgspec.Struct, frozen=True):
    """What quantising while loading has cost."""

    format: str
    num_tensors: int
    relative_error: float
    """Of all weights together."""
    worst: list[TensorError]
    """The tensors with the largest errors, largest first."""


class Loaded(msgspec.Struct, frozen=True, tag="done", tag_field="type"):
    """The segment now holds the store."""

    layout: StoreLayout
    seconds: float
    """Reading and converting, without the start of the process."""
    bytes_per_s: float
    """Checkpoint bytes read per second."""
    errors: QuantisationErrors | None = None
    """None when no value was changed."""
    huge_page_bytes: int = 0
    """How much of the store the kernel has put into huge pages."""
    is_reserved: bool = False
    """Whether it lies in the segment of reserved huge pages, and not in the other."""
    reserved_note: str = ""
    """Why it does not, where there was such a segment."""
    numa_nodes: tuple[int, ...] = ()
    """NUMA nodes that experts were divided among (`expert_store.numa_placement`)."""
    numa_note: str = ""
    """One line on how that went, or why it did not; "" when it was not asked for."""


class Inspection(msgspec.Struct, frozen=True, tag="inspection", tag_field="type", kw_only=True):
    """What config and file headers tell about a model, without its data."""

    layout: StoreLayout
    architecture: str
    """transformers' class, e.g. "Qwen3MoeForCausalLM"."""
    model_type: str
    num_hidden_layers: int
    vocab_size: int
    context_length: int | None
    """Longest sequence the model was made for, in tokens; None when the config does not say."""
    dense_bytes: int
    """All weights but the routed experts, in the store's dtype."""
    kv_bytes_per_token: int
    """Key-value cache of one token, estimated from the config."""
    checkpoint_bytes: int
    """Size of all tensors on disk."""
    num_ignored: int
    """Checkpoint tensors that the text model has no use for."""


Report = Progress | Failure | Loaded | Inspection


def encode_report(report: Report) -> bytes:
    """One line, with its newline."""
    return msgspec.json.encode(report) + b"\n"


def decode_report(line: bytes | str) -> Report:
    """Read one line. Raises msgspec.DecodeError when it is no report."""
    return msgspec.json.decode(line, type=Report)
