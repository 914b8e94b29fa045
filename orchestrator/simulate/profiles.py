"""Machines and models as data: TOML files that state where their numbers are from.

A machine profile needs a name, a source, and the rates of link and host in GB/s (10^9 bytes per
second); everything else has a default:

    name = "laptop"
    source = "who measured this, where"
    link_gbps = 11.8                 # B_P, pinned copies alone
    host_gbps = 47.5                 # B_H, the CPU on expert weights alone
    link_beside_cpu_gbps = 11.8      # default: link_gbps
    cpu_beside_link_gbps = 35.7      # default: max(host_gbps - link_gbps, 0)
    dense_us = 100.0                 # per layer: attention, norms, router, on the GPU
    cpu_dispatch_us = 20.0           # before the CPU's first byte
    link_dispatch_us = 0.0           # before the link's first byte
    fill_fixed_us = 0.0              # per copy
    gpu_expert_us = 0.0              # per expert, on the GPU
    cpu_row_part = 0.0               # cost of one more row on the CPU, part of the first
    expert_bytes = 13_200_000        # unless a model or the trace says
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import msgspec

from orchestrator.core.fluid_split import BranchCosts
from protocol.errors import UserError

_FOLDER = files("orchestrator.simulate") / "profiles"

#: Bits per weight, scales included.
WEIGHT_BITS = {"bf16": 16.0, "fp8": 8.0, "q8_0": 8.5, "q4_k": 4.5, "mxfp4": 4.25, "nvfp4": 4.5}

MAX_EXPERT_BYTES = 10**15
#: Unit, as fields end with it -> the most that a profile may say in it: far above any machine, and
#: low enough for sums and quotients of them to stay finite.
_MOST = {"gbps": 1e6, "us": 1e9, "part": 1e3, "bytes": MAX_EXPERT_BYTES}
_LEAST_GBPS = 1e-9
#: As much of a name as a sentence repeats.
_TOLD_CHARACTERS = 60


class MachineProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module; GB/s, microseconds, bytes."""

    name: str
    source: str
    link_gbps: float
    host_gbps: float
    link_beside_cpu_gbps: float | None = None
    cpu_beside_link_gbps: float | None = None
    dense_us: float = 100.0
    cpu_dispatch_us: float = 20.0
    fill_fixed_us: float = 0.0
    gpu_expert_us: float = 0.0
    cpu_row_part: float = 0.0
    link_dispatch_us: float = 0.0
    expert_bytes: int = 13_200_000

    def __post_init__(self) -> None:
        for field in self.__struct_fields__[2:]:
            value = getattr(self, field)
            if value is None:
                continue
            if not 0 <= value < float("inf"):  # also refuses NaN
                raise ValueError(f"{field} must be finite and at least 0, not {value}")
            if not value and field in ("link_gbps", "host_gbps", "expert_bytes"):
                raise ValueError(f"{field} must be above 0")
            most = _MOST[field.rpartition("_")[2]]
            if value > most:
                raise ValueError(f"{field} must be at most {most:g}")
            if field.endswith("_gbps") and 0 < value < _LEAST_GBPS:
                raise ValueError(f"{field} must be at least {_LEAST_GBPS:g}, not {value:g}")
        if self.link_beside_cpu_gbps == 0 and not self._cpu_beside_link_gbps:
            raise ValueError(
                "link_beside_cpu_gbps and cpu_beside_link_gbps must not both be 0: side by side "
                "neither branch would ever end"
            )

    @property
    def _cpu_beside_link_gbps(self) -> float:
        if self.cpu_beside_link_gbps is None:
            return max(self.host_gbps - self.link_gbps, 0.0)
        return self.cpu_beside_link_gbps

    def costs(self, expert_bytes: int) -> BranchCosts:
        """In the planner's terms, for experts of `expert_bytes`."""
        link_beside = self.link_beside_cpu_gbps
        if link_beside is None:
            link_beside = self.link_gbps
        return BranchCosts(
            expert_bytes,
            self.link_gbps * 1e9,
            link_beside * 1e9,
            self.host_gbps * 1e9,
            self._cpu_beside_link_gbps * 1e9,
            self.fill_fixed_us * 1e-6,
            self.cpu_dispatch_us * 1e-6,
            self.gpu_expert_us * 1e-6,
            self.cpu_row_part,
            self.link_dispatch_us * 1e-6,
        )


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The MoE layers of a model: experts of three matrices, hidden x intermediate."""

    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    source: str
    weight_format: str = "bf16"

    def expert_bytes(self, weight_format: str | None = None) -> int:
        """Bytes of one expert, in the model's own format or another of WEIGHT_BITS."""
        bits = WEIGHT_BITS[weight_format or self.weight_format]
        return int(3 * self.hidden * self.intermediate * bits / 8)


def profile_names() -> list[str]:
    """The machines that come with Headrace."""
    return sorted(entry.name[:-5] for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))


def load_profile(name_or_path: str) -> MachineProfile:
    """A shipped machine by its name, or one from a TOML file.

    Raises:
        UserError: neither, or the file is wrong; one sentence says what.
    """
    if name_or_path in profile_names():
        text, where = (_FOLDER / f"{name_or_path}.toml").read_text("utf-8"), name_or_path
    else:
        path, where = Path(name_or_path), name_or_path
        try:
            is_file = path.is_file()
        except OSError:  # a name that is too long for any file
            is_file = False
        if not is_file:
            known = ", ".join(profile_names())
            raise UserError(
                f"There is no profile or file {name_or_path[:_TOLD_CHARACTERS]!r}; profiles are: "
                f"{known}."
            )
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"The profile {where} cannot be read: {error}.") from None
    try:
        return msgspec.convert(tomllib.loads(text), MachineProfile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UserError(f"The profile {where} is wrong: {error}.") from None
    except RecursionError:
        raise UserError(f"The profile {where} is wrong: it is nested too deeply.") from None
    except ValueError:  # Python reads no whole number of thousands of digits
        raise UserError(f"The profile {where} is wrong: a number in it is too long.") from None


def model_shapes() -> dict[str, ModelShape]:
    """The models whose shapes come with Headrace, by name."""
    text = (files("orchestrator.simulate") / "model_shapes.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, ModelShape])


def model_shape(name: str) -> ModelShape:
    """UserError names the known ones."""
    shapes = model_shapes()
    if name not in shapes:
        raise UserError(f"There is no model shape {name!r}; known: {', '.join(sorted(shapes))}.")
    return shapes[name]
