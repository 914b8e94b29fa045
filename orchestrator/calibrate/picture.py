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
    left.semilogx(sizes, [rate / 1e9 for _, rate in profile.working_sets], "o-", label="CPU")
    for name, rate, style in (
        ("CPU alone", profile.cpu_bytes_per_s, "-"),
        ("CPU beside the link", profile.cpu_beside_link_bytes_per_s, "--"),
        ("link alone", profile.link_bytes_per_s, "-."),
        ("link beside the CPU", profile.link_beside_cpu_bytes_per_s, ":"),
    ):
        left.axhline(rate / 1e9, ls=style, lw=1, color="grey")
        left.annotate(name, (sizes[0], rate / 1e9), fontsize=8, va="bottom")
    left.set_xlabel("working set, MB")
    left.set_ylabel("GB/s")
    left.set_ylim(bottom=0)
    right.plot([rows for rows, _ in profile.rows], [s * 1e6 for _, s in profile.rows], "o-")
    right.set_xlabel("rows per expert")
    right.set_ylabel("us per expert on the CPU")
    right.set_ylim(bottom=0)
    figure.suptitle(f"{profile.key.machine}\n{profile.key.weight_format}", fontsize=9)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"The plot cannot be written: {error}.") from None
    finally:
        pyplot.close(figure)
