"""The result of a calibration as a file, and whether it is for this machine.

One JSON file per (machine, kernel build, format, link) in the user's cache directory, named by a
hash of the four. What was measured on another machine, with another build of the kernels or another
version of this form is not used, and one line says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from orchestrator.core.fluid_split import BranchCosts
from protocol.errors import UserError
from protocol.machine import read_machine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from expert_store.layout import StoreLayout
    from orchestrator.calibrate.course import Measured

log = logging.getLogger("headrace")

PROFILE_VERSION = 1
MAX_PROFILE_BYTES = 1 << 20
_NVIDIA = Path("/proc/driver/nvidia/gpus")


class ProfileKey(msgspec.Struct, frozen=True):
    """What a profile is for."""

    machine: str
    kernel_build: str
    weight_format: str
    link: str

    @property
    def file_name(self) -> str:
        text = "\n".join((self.machine, self.kernel_build, self.weight_format, self.link))
        return hashlib.sha256(text.encode()).hexdigest()[:20] + ".json"


class CalibrationProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates in bytes/s, durations in seconds, errors as parts. See `course.Measured`."""

    version: int
    key: ProfileKey
    measured_at: str
    expert_bytes: int
    num_threads: int
    isa: str
    link_bytes_per_s: float
    link_beside_cpu_bytes_per_s: float
    cpu_bytes_per_s: float
    cpu_beside_link_bytes_per_s: float
    link_fixed_s: float
    cpu_fixed_s: float
    cpu_row_part: float
    link_error_part: float
    cpu_error_part: float
    flat_from_bytes: int | None
    working_sets: list[tuple[int, float]]
    rows: list[tuple[int, float]]

    def costs(self, expert_bytes: int) -> BranchCosts:
        """In the planner's terms, for experts of `expert_bytes`.

        Raises:
            ValueError: a number that no machine has.
        """
        return BranchCosts(
            expert_bytes,
            self.link_bytes_per_s,
            self.link_beside_cpu_bytes_per_s,
            self.cpu_bytes_per_s,
            self.cpu_beside_link_bytes_per_s,
            cpu_fixed_s=self.cpu_fixed_s,
            cpu_row_part=self.cpu_row_part,
            link_fixed_s=self.link_fixed_s,
        )


def profile_of(
    measured: Measured,
    key: ProfileKey,
    *,
    measured_at: str,
    expert_bytes: int,
    num_threads: int,
    isa: str,
) -> CalibrationProfile:
    """Fixed costs are those of the branch and of the way to it. No branch is faster beside the
    other than alone: where it was measured so, that was noise."""
    link, cpu = measured.link, measured.cpu
    return CalibrationProfile(
        version=PROFILE_VERSION,
        key=key,
        measured_at=measured_at,
        expert_bytes=expert_bytes,
        num_threads=num_threads,
        isa=isa,
        link_bytes_per_s=link.bytes_per_s,
        link_beside_cpu_bytes_per_s=min(measured.link_beside_bytes_per_s, link.bytes_per_s),
        cpu_bytes_per_s=cpu.bytes_per_s,
        cpu_beside_link_bytes_per_s=min(measured.cpu_beside_bytes_per_s, cpu.bytes_per_s),
        link_fixed_s=link.fixed_s + measured.link_way_s,
        cpu_fixed_s=cpu.fixed_s + measured.cpu_way_s,
        cpu_row_part=measured.cpu_row_part,
        link_error_part=link.error_part,
        cpu_error_part=cpu.error_part,
        flat_from_bytes=measured.flat_from_bytes,
        working_sets=measured.working_sets,
        rows=measured.rows,
    )


# ---- what it is for ----


def key_of(layout: StoreLayout, device: str, emulate_link_bytes_per_s: float) -> ProfileKey:
    """The key of this machine, now, for the experts of `layout`."""
    weights = layout.weights
    return ProfileKey(
        machine_name(),
        kernel_build(),
        layout.dtype if weights is None else f"{layout.dtype}/{weights.name}",
        link_name(device, emulate_link_bytes_per_s),
    )


def machine_name() -> str:
    """Processor, allowed cpus, quota and memory: what decides how fast experts are computed."""
    machine = read_machine()
    cpus = machine.cpus
    quota = "" if cpus.quota is None else f", quota {cpus.quota:g}"
    return (
        f"{_processor()}, {len(cpus.allowed)} cpus of {len(cpus.physical)} cores{quota}, "
        f"{len(machine.nodes)} nodes, {machine.memory.total_bytes >> 30} GiB"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return os.uname().machine
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return os.uname().machine


def kernel_build() -> str:
    """A hash of the library that computes experts; "torch" where there is none."""
    spec = importlib.util.find_spec("expert_kernels")  # found, not imported: it needs torch
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    for place in places:
        for library in sorted(Path(place).rglob("*.so")):
            return hashlib.sha256(library.read_bytes()).hexdigest()[:16]
    return "torch"


def link_name(device: str, emulate_link_bytes_per_s: float) -> str:
    if device == "cpu":
        paced = emulate_link_bytes_per_s
        return f"emulated at {paced / 1e9:g} GB/s" if paced else "memory to memory"
    names = []
    for information in sorted(_NVIDIA.glob("*/information")):
        try:
            text = information.read_text("utf-8", "replace")
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in text.splitlines() if "Model" in line]
    return f"{device}: {', '.join(names) or 'unknown'}"


# ---- the file ----


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Where profiles lie: $XDG_CACHE_HOME/headrace/calibration, else under ~/.cache."""
    base = environment.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path(environment.get("HOME", "/")) / ".cache"
    return root / "headrace" / "calibration"


def prepare_folder(folder: Path) -> None:
    """Make it, and write to it once: who is about to measure for minutes wants to know first.

    Raises:
        UserError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError as error:
        raise _unwritable(folder, error) from None


def save_profile(profile: CalibrationProfile, folder: Path) -> Path:
    """Write it in place of an older one of the same key, which stays where that fails.

    Raises:
        UserError: the folder cannot be written to.
    """
    path = folder / profile.key.file_name
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2))
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # there may be none
            fresh.unlink()
        raise _unwritable(folder, error) from None
    return path


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"The profile cannot be written to {folder}: {error.strerror}; free space there, or set "
        "XDG_CACHE_HOME to another folder."
    )


def find_profile(key: ProfileKey, folder: Path) -> CalibrationProfile | None:
    """The profile of this key; else None, and one line when there is one that cannot be used."""
    profile = _read(folder / key.file_name)
    if profile is not None and profile.key == key:
        return profile
    for path in _profiles_in(folder):
        other = _read(path)
        if other is None:
            log.warning("the calibration %s is damaged or of another version; ignored", path)
            return None
        if (other.key.weight_format, other.key.link) == (key.weight_format, key.link):
            what = "machine" if other.key.machine != key.machine else "build of the kernels"
            log.warning(
                "the calibration %s is of another %s; ignored, run headrace calibrate", path, what
            )
            return None
    return None


def _profiles_in(folder: Path) -> list[Path]:
    """All there are; none, and one line, where the folder cannot be looked into."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        log.warning(
            "calibrations in %s cannot be read: %s; going on without, see XDG_CACHE_HOME",
            folder,
            error.strerror,
        )
        return []
    return [folder / name for name in sorted(names) if name.endswith(".json")]


def _read(path: Path) -> CalibrationProfile | None:
    try:
        if path.stat().st_size > MAX_PROFILE_BYTES:
            return None
        profile = msgspec.json.decode(path.read_bytes(), type=CalibrationProfile)
        profile.costs(1)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    return profile if profile.version == PROFILE_VERSION else None
