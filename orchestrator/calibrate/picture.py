"""A calibration drawn: rate over working set, and time per expert over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.calibrate.profile import CalibrationProfile


def draw(profile: CalibrationProfile, path: Path) -> None:
    """Write `path` (.png, .svg, .pdf). Raises UserError where it cannot be written."""
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    sizes = [size / 1e6 for size, _ in profile.working_sets]
    left.semilogx(
        sizes, [rate / 1e9 for _, rate in profile.working_sets], "o-", base=2, label="CPU, sweep"
    )
    for name, alone, beside, colour in (
        ("CPU", profile.cpu_bytes_per_s, profile.cpu_beside_link_bytes_per_s, "tab:green"),
        ("link", profile.link_bytes_per_s, profile.link_beside_cpu_bytes_per_s, "tab:red"),
    ):
        left.axhline(alone / 1e9, ls="-", lw=1, color=colour, label=f"{name} alone")
        other = "link" if name == "CPU" else "CPU"
        left.axhline(
            beside / 1e9, ls="--", lw=1.5, color=colour, label=f"{name} beside the {other}"
        )
    left.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    left.minorticks_off()
    left.set_xlabel("working set, MB")
    left.set_ylabel("GB/s")
    left.set_ylim(bottom=0)
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    right.plot([rows for rows, _ in profile.rows], [s * 1e6 for _, s in profile.rows], "o-")
    right.set_xticks([rows for rows, _ in profile.rows])
    right.set_xlabel("rows per expert")
    right.set_ylabel("us per expert on the CPU")
    right.set_ylim(bottom=0)
    right.grid(alpha=0.3)
    key = profile.key
    experts = f"{key.weight_format} experts of {profile.expert_bytes / 1e6:.2f} MB"
    figure.suptitle(f"{key.machine}\n{experts}; link: {key.link}", fontsize=9)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"The plot cannot be written: {error}.") from None
    finally:
        pyplot.close(figure)
