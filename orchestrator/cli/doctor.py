"""`headrace doctor`: what this machine can do for Headrace, in plain words.

Facts come from three places: files of /proc and /sys (protocol.machine), harmless calls made here,
and two short-lived processes of their own, each with a bounded wait: one imports torch, which this
process never does, the other binds itself to a NUMA node, which would stick to this one.
`doctor_findings` turns facts into sentences.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.cli import doctor_findings as findings_of
from orchestrator.cli.doctor_findings import BindFacts, CudaFacts, Finding, KernelFacts
from protocol.errors import EXIT_FAULT, EXIT_OK
from protocol.machine import Machine, read_cpu_flags, read_machine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

#: Importing torch from a cold disk takes most of this.
CUDA_TIMEOUT_S = 90.0
BIND_TIMEOUT_S = 30.0
NEEDED_PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "jinja2",
    "pyzmq",
    "msgspec",
    "numpy",
    "uvloop",
    "rich",
    "psutil",
)
_MADV_POPULATE_WRITE = 23  # not in the mmap module; asm-generic/mman-common.h
_COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}

#: Runs in a process of its own. It registers memory and asks for an IPC handle the way the
#: workers do: an allocation of its own, not one of torch's expandable segments.
_CUDA_PROBE = r"""
import ctypes, json, mmap
facts = {}
try:
    ctypes.CDLL("libcuda.so.1")
    facts["has_driver"] = True
except OSError:
    facts["has_driver"] = False
import torch
facts["torch_version"] = torch.__version__
facts["cuda_version"] = torch.version.cuda or ""
facts["is_available"] = torch.cuda.is_available()
if facts["is_available"]:
    facts["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts["total_bytes"] = torch.cuda.get_device_properties(0).total_memory
    def attempt(work):
        try:
            return work() or ""
        except Exception as error:
            return (str(error) or type(error).__name__).splitlines()[0]
    facts["can_pin"] = attempt(lambda: torch.empty(1 << 20, pin_memory=True) is None)
    def register():
        runtime = torch.cuda.cudart()
        torch.zeros(1, device="cuda")
        region = mmap.mmap(-1, 64 << 20)
        view = (ctypes.c_char * len(region)).from_buffer(region)
        address = ctypes.addressof(view)
        code = int(runtime.cudaHostRegister(address, len(region), 0))
        if code:
            return f"cudaHostRegister gave error {code}"
        runtime.cudaHostUnregister(address)
    facts["can_register"] = attempt(register)
    def share():
        driver = ctypes.CDLL("libcuda.so.1")
        torch.zeros(1, device="cuda")
        pointer, handle = ctypes.c_uint64(), (ctypes.c_char * 64)()
        code = driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(2 << 20))
        if code:
            return f"cuMemAlloc gave error {code}"
        code = driver.cuIpcGetMemHandle(handle, pointer)
        driver.cuMemFree_v2(pointer)
        return f"cuIpcGetMemHandle gave error {code}" if code else ""
    facts["can_share"] = attempt(share)
print(json.dumps(facts))
"""

_BIND_PROBE = r"""
import json, sys
from cpu_worker.affinity import bind_node
report = bind_node(int(sys.argv[1]))
print(json.dumps({"level": report.level, "message": report.message}))
"""

_Facts = TypeVar("_Facts", CudaFacts, BindFacts)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `doctor` with the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what this machine can do for Headrace, and what to change",
        description="Look at cores, memory, NUMA, limits, CUDA and packages, and say in plain "
        "words what each means for Headrace. Changes nothing. Exit code 1 when Headrace cannot "
        "run here.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(func=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
    """Print the report. Returns 0, or 1 when a finding says that Headrace cannot run here."""
    machine = read_machine()
    findings = examine(machine)
    if args.json:
        sys.stdout.write(report_json(machine, findings) + "\n")
    else:
        print_report(findings, Console())
    return EXIT_FAULT if any(finding.status == "fail" for finding in findings) else EXIT_OK


def examine(machine: Machine) -> list[Finding]:
    """All findings, in the order in which a person reads them."""
    usable = [node.node for node in machine.nodes if set(node.cpus) & set(machine.cpus.allowed)]
    bind = probe_binding(usable[0]) if usable else BindFacts(error="no node has cpus for us")
    return [
        *findings_of.cores(machine.cpus),
        *findings_of.cpu_features(platform.machine(), read_cpu_flags()),
        *findings_of.memory(machine),
        *findings_of.huge_pages(machine),
        *findings_of.numa(machine, bind, has_numactl=shutil.which("numactl") is not None),
        *findings_of.limits(machine, probe_kernel()),
        *findings_of.cuda(probe_cuda()),
        *findings_of.packages(platform.python_version(), package_versions()),
    ]


def report_json(machine: Machine, findings: list[Finding]) -> str:
    """One JSON object: `can_run`, `findings` and the `machine` they rest on."""
    report = {
        "can_run": all(finding.status != "fail" for finding in findings),
        "findings": findings,
        "machine": machine,
    }
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def print_report(findings: list[Finding], console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for finding in findings:
        fact = Text(finding.fact)
        fact.append(f"\n{finding.meaning}", style="dim")
        status = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(status, Text(finding.topic, style="bold"), fact)
    console.print(table)
    counts = Counter(finding.status for finding in findings)
    if counts["fail"]:
        console.print("\nHeadrace cannot run here yet: see the lines marked fail.")
    elif counts["warn"]:
        console.print("\nHeadrace runs here; the lines marked warn cost speed.")
    else:
        console.print("\nHeadrace runs here.")


# --- facts ------------------------------------------------------------------------------------


def probe_cuda(timeout_s: float = CUDA_TIMEOUT_S) -> CudaFacts:
    """Ask torch in a process of its own; never raises, an `error` says why there is no answer."""
    return _ask(_CUDA_PROBE, [], timeout_s, CudaFacts)


def probe_binding(node: int, timeout_s: float = BIND_TIMEOUT_S) -> BindFacts:
    """Bind a process of its own to this NUMA node; never raises."""
    return _ask(_BIND_PROBE, [str(node)], timeout_s, BindFacts)


def probe_kernel() -> KernelFacts:
    """Try the calls that newer kernels have and sandboxes hide; leaves nothing open."""
    return KernelFacts(
        has_memfd=_works(lambda: os.close(os.memfd_create("headrace-doctor"))),
        has_pidfd=_works(lambda: os.close(os.pidfd_open(os.getpid()))),
        has_populate=_works(_populate_one_page),
    )


def package_versions() -> dict[str, str | None]:
    """Version of each needed package, None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for name in NEEDED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _populate_one_page() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as region:
        region.madvise(_MADV_POPULATE_WRITE)


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except (OSError, AttributeError):  # the kernel, or this Python's build, lacks it
        return False
    return True


def _ask(code: str, arguments: list[str], timeout_s: float, kind: type[_Facts]) -> _Facts:
    """Run `code` in a new interpreter and read the JSON object on its last line.

    The folder that holds our packages goes first on its path, so that it also works from a
    checkout that is not installed. The wait is bounded and the process is gone afterwards.
    """
    above = Path(__file__).resolve().parents[2]
    bootstrap = f"import sys; sys.path.insert(0, {str(above)!r})\n{code}"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", bootstrap, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return kind(error=f"no answer within {timeout_s:g} s")
    except OSError as error:
        return kind(error=str(error))
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(lines[-1], type=kind)
    last_words = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
    return kind(error=last_words[-1])
