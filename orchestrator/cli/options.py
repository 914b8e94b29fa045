"""Flags that several commands share: same names, same meaning, same defaults everywhere.

Defaults are None where a command must know whether a flag was given. Nothing here imports more than
argparse, so that `headrace --help` is quick.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.errors import UserError
from protocol.logs import LOG_FORMATS
from protocol.worker_flags import LOG_LEVELS, MAX_ISAS, number

if TYPE_CHECKING:
    from orchestrator.settings import PipelineSettings

DEVICES = ("cpu", "cuda")
DENSE_PATHS = ("eager", "traced", "compiled", "native")
PROBE_MODES = PRELOAD_MODES = ("auto", "on", "off")
HUGE_PAGES_MODES = ("auto", "off")
DTYPES = ("auto", "float32", "bfloat16", "float16")
#: As orchestrator.core knows them; a test compares.
POLICIES = ("lfu", "lru", "lru-layer", "reuse", "reuse-tables")
PLANNERS = ("fluid", "closed-form", "fixed-fraction", "fill-only", "cpu-only")
FILL_BEHIND_MODES = ("auto", "on", "off")
_positive = number(float, 1e-9, "GB/s")
#: Linux numbers no more than 1024 nodes; which there are here is asked when the pipeline starts.
_MAX_NODE_DIGITS = 4


def fill_mode(text: str) -> str:
    """An argparse type for --fill."""
    is_count = text.isascii() and text.isdigit() and len(text) <= 9
    if text not in ("auto", "all", "none") and not is_count:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not auto, all, none or a whole number of experts"
        )
    return text


def dense_dtype(text: str) -> str:
    """A format of large linear layers, as `expert_dtype` checks it."""
    from expert_store.expert_dtype import parse_expert_dtype

    try:
        if text != "auto" and parse_expert_dtype(text) is None:
            raise argparse.ArgumentTypeError(f"{text} is --dtype's to say; name a format, or auto")
    except UserError as error:
        raise argparse.ArgumentTypeError(_without_flag(error)) from None
    return text


def add_dense_dtype(group: argparse._ActionsContainer) -> None:
    """--dense-dtype, for all commands that load or plan."""
    group.add_argument(
        "--dense-dtype",
        type=dense_dtype,
        metavar="NAME",
        help="quantise the large linear layers outside the experts while loading: int8, int4, "
        "mxfp4, fp8, nvfp4, int4-g64, ...; on the cpu device (default: as the checkpoint has them)",
    )


def expert_dtype(text: str) -> str:
    """An argparse type for --expert-dtype."""
    from expert_store.expert_dtype import parse_expert_dtype

    try:
        parse_expert_dtype(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(_without_flag(error)) from None
    return text


def _without_flag(error: UserError) -> str:
    """A sentence about --expert-dtype, for argparse: it names the flag itself and goes on."""
    return str(error).removeprefix("--expert-dtype ").removesuffix(".")


def numa_nodes(text: str) -> str:
    """An argparse type for --numa-nodes: node numbers, as the kernel writes lists of them."""
    from protocol.machine import format_cpu_list

    nodes: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if found is None:
            nodes = []
            break
        first, last = found[1], found[2] or found[1]
        for number_text in (first, last):
            # Before anything is expanded: a range of billions would be one of the list's numbers.
            if len(number_text.lstrip("0")) > _MAX_NODE_DIGITS:
                raise argparse.ArgumentTypeError(
                    f"{text[:40]!r}: no machine has a NUMA node {number_text[:20]}; `headrace "
                    "doctor` says which ones this one has"
                )
        nodes += range(int(first), int(last) + 1)
    if not nodes:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no list of NUMA nodes like 0,1 or 0-3")
    if len(set(nodes)) < len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise argparse.ArgumentTypeError(f"{text[:40]!r} names node {twice} twice; name it once")
    return format_cpu_list(nodes)


def add_run_dir(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help=f"directory in which the pipeline's processes meet (default: {default})",
    )


def add_log_level(parser: argparse.ArgumentParser, default: str = "warning") -> None:
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        help=f"least level of the lines written to stderr (default: {default})",
    )


def add_log_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        help="lines for people, or one JSON object per line (default: text)",
    )


def add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        required=required,
        help="Hugging Face checkpoint directory of a Mixture-of-Experts model",
    )


def add_pipeline_flags(parser: argparse.ArgumentParser) -> None:
    """What decides how a pipeline runs, from its start to its end."""
    group = parser.add_argument_group("the pipeline")
    group.add_argument(
        "--slots",
        metavar="N|P%",
        help="expert slots on the device, as a number or as a share of all experts (default: 25%%)",
    )
    group.add_argument(
        "--device",
        choices=DEVICES,
        help="where the slots lie and the dense part runs (default: cpu)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of the weights; auto: the checkpoint's (default: auto)",
    )
    group.add_argument(
        "--expert-dtype",
        type=expert_dtype,
        metavar="NAME",
        help="how experts are stored. auto: as the checkpoint has them; bf16, fp16, fp32; or "
        "quantised while loading: int8, int4, mxfp4, fp8, nvfp4, int4-g64, ... (default: auto)",
    )
    add_dense_dtype(group)
    group.add_argument(
        "--fill",
        type=fill_mode,
        metavar="auto|all|none|Q",
        help="how many misses of a layer are filled into slots: by the measured balance, every "
        "one, none, or at most Q; the CPU runs the others (default: auto)",
    )
    group.add_argument(
        "--policy",
        choices=POLICIES,
        help="which expert leaves when a slot is needed, and which misses are worth a slot "
        "(default: reuse-tables)",
    )
    group.add_argument(
        "--planner",
        choices=PLANNERS,
        help="what divides the misses where --fill is auto (default: fluid)",
    )
    group.add_argument(
        "--fill-behind",
        choices=FILL_BEHIND_MODES,
        help="whether experts that the CPU runs are copied too, off the critical path; auto: where "
        "that pays (default: auto)",
    )
    group.add_argument(
        "--prefetch",
        type=number(int, 0, "layers"),
        metavar="N",
        help="guess what the next N layers will ask for and copy it while the link is idle "
        "(default: 0, none)",
    )
    group.add_argument(
        "--host-gbps",
        type=_positive,
        metavar="X",
        help="state B_H, the rate of the CPU kernel in GB/s, instead of measuring it",
    )
    group.add_argument(
        "--link-gbps",
        type=_positive,
        metavar="Y",
        help="state B_P, the rate of fills in GB/s, instead of measuring it",
    )
    group.add_argument(
        "--probe",
        choices=PROBE_MODES,
        help="measure link and CPU for a second while the workers start; auto: unless they were "
        "calibrated or stated, or a cache may hold all experts (default: auto)",
    )
    group.add_argument(
        "--preload",
        choices=PRELOAD_MODES,
        help="fill free slots before anybody asks for an expert; auto: where all experts have one "
        "(default: auto)",
    )
    group.add_argument(
        "--emulate-link-gbps",
        type=_positive,
        metavar="Z",
        help="pace fills to Z GB/s, as a link of that rate would (default: as fast as it goes)",
    )
    group.add_argument(
        "--cpu-workers",
        type=number(int, 0, "workers"),
        metavar="N",
        help="cpu_workers to start; with 0 every miss is filled (default: 1, or one per node of "
        "--numa-nodes)",
    )
    group.add_argument(
        "--numa-nodes",
        type=numa_nodes,
        metavar="N,M",
        help="divide the experts' memory evenly among these NUMA nodes, and bind the cpu_workers "
        "to them: each computes what lies on its own node (default: wherever the system puts it)",
    )
    group.add_argument(
        "--huge-pages",
        choices=HUGE_PAGES_MODES,
        help="auto: the experts lie in huge pages that were set aside (vm.nr_hugepages) if enough "
        "of them are free; off: those are left to others (default: auto)",
    )
    group.add_argument(
        "--max-context",
        type=number(int, 1, "tokens"),
        metavar="N",
        help="longest sequence, prompt included (default: the model's own limit)",
    )
    group.add_argument(
        "--max-num-seqs",
        type=number(int, 1, "sequences"),
        metavar="N",
        help="requests that are served at once and decode together; more wait (default: 4)",
    )
    group.add_argument(
        "--latency-log",
        type=Path,
        metavar="FILE",
        help="write one JSON line per layer-step; read it with `headrace latency FILE`",
    )
    group.add_argument(
        "--record-routing",
        type=Path,
        metavar="FILE.npz",
        help="write which experts every decode step chose, for `headrace simulate` and for replays",
    )
    group.add_argument(
        "--replay-routing",
        type=Path,
        metavar="FILE.npz",
        help="take the experts of a recorded trace in place of the router's: what a cache does "
        "with a model of that shape, whatever its weights (the text means nothing then)",
    )
    group.add_argument(
        "--worker-timeout",
        type=number(float, 0.1, "seconds"),
        metavar="S",
        help="a worker that owes an answer for so long is killed (default: 60)",
    )
    group.add_argument(
        "--dense-path",
        choices=DENSE_PATHS,
        help="how single tokens run outside the experts. eager: as transformers does; traced: "
        "recorded at the start, then replayed bit for bit; compiled: the recording compiled by "
        "torch, after a first start that takes minutes, needs a C++ compiler; native: on the "
        "experts' kernels, fastest, on the cpu device (default: native, else traced)",
    )
    group.add_argument(
        "--eager",
        action="store_const",
        dest="dense_path",
        const="eager",
        help="the same as --dense-path eager",
    )
    group.add_argument(
        "--max-isa",
        choices=MAX_ISAS,
        metavar="ISA",
        help="the most that workers may use of the processor for experts, one of "
        f"{', '.join(MAX_ISAS)}; all give the same bits but torch and, for bfloat16 "
        "experts, avx512_bf16 and amx (default: best)",
    )
    group.add_argument(
        "--digest-logits",
        action="store_true",
        default=None,
        help="hash the logits of every sampled token (for comparing runs)",
    )


#: Flag of add_pipeline_flags -> field of PipelineSettings.
_FIELDS = {
    "slots": "slots",
    "device": "device",
    "dtype": "dtype",
    "expert_dtype": "expert_dtype",
    "fill": "fill",
    "policy": "policy",
    "planner": "planner",
    "fill_behind": "fill_behind",
    "prefetch": "prefetch",
    "host_gbps": "host_gbps",
    "link_gbps": "link_gbps",
    "emulate_link_gbps": "emulate_link_gbps",
    "probe": "probe",
    "preload": "preload",
    "cpu_workers": "num_cpu_workers",
    "numa_nodes": "numa_nodes",
    "huge_pages": "huge_pages",
    "max_context": "max_context",
    "max_num_seqs": "max_num_seqs",
    "latency_log": "latency_log",
    "record_routing": "record_routing",
    "replay_routing": "replay_routing",
    "worker_timeout": "worker_timeout_s",
    "digest_logits": "digest_logits",
    "dense_path": "dense_path",
    "dense_dtype": "dense_dtype",
    "max_isa": "max_isa",
}


def given_pipeline_flags(options: argparse.Namespace) -> dict[str, Any]:
    """The pipeline flags that were given: name as typed (without dashes) -> value."""
    values = {name: getattr(options, name) for name in _FIELDS}
    return {name.replace("_", "-"): value for name, value in values.items() if value is not None}


def pipeline_arguments(options: argparse.Namespace) -> list[str]:
    """The given flags again, as arguments for another headrace process."""
    arguments = []
    for name, value in given_pipeline_flags(options).items():
        arguments.append(f"--{name}")
        if value is not True:
            arguments.append(str(value))
    return arguments


def settings_from(options: argparse.Namespace, run_dir: Path, **more: Any) -> PipelineSettings:
    """Settings of the orchestrator from parsed flags."""
    from orchestrator.settings import PipelineSettings
    from protocol.machine import parse_cpu_list

    values = {field: getattr(options, name) for name, field in _FIELDS.items()}
    given = {field: value for field, value in values.items() if value is not None}
    if "numa_nodes" in given and "num_cpu_workers" not in given:
        given["num_cpu_workers"] = len(parse_cpu_list(given["numa_nodes"]))
    return PipelineSettings(model_dir=options.model, run_dir=run_dir, **given, **more)
