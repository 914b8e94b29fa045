"""Numbers out of samples."""

from __future__ import annotations

import random

import pytest

from orchestrator.calibrate.course import working_sets
from orchestrator.calibrate.fits import first_flat, fit_line, row_part
from orchestrator.calibrate.store import TOP_K, bench_layout, gated_form

MB = 1e6


def samples(fixed_s: float, rate: float, noise: float, seed: int = 1) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    return [
        (size * MB, (fixed_s + size * MB / rate) * rng.uniform(1 - noise, 1 + noise))
        for size in (10, 20, 40, 80)
        for _ in range(12)
    ]


def test_a_line_without_noise_is_found_exactly() -> None:
    line = fit_line(samples(50e-6, 20e9, 0.0))
    assert line.fixed_s == pytest.approx(50e-6)
    assert line.bytes_per_s == pytest.approx(20e9)
    assert line.error_part < 1e-9


def test_noise_shows_in_the_error_and_hardly_in_the_rate() -> None:
    line = fit_line(samples(50e-6, 20e9, 0.05))
    assert line.bytes_per_s == pytest.approx(20e9, rel=0.03)
    assert 0.002 < line.error_part < 0.03
    assert fit_line(samples(50e-6, 20e9, 0.2)).error_part > line.error_part


def test_interrupted_samples_are_left_out() -> None:
    disturbed = [*samples(50e-6, 20e9, 0.01), (10 * MB, 0.5), (80 * MB, 0.9)]
    assert fit_line(disturbed).bytes_per_s == pytest.approx(20e9, rel=0.02)


def test_a_fixed_cost_is_never_negative() -> None:
    line = fit_line([(10 * MB, 0.9e-3), (20 * MB, 2e-3), (40 * MB, 4.1e-3)])
    assert line.fixed_s == 0.0
    assert line.bytes_per_s == pytest.approx(10e9, rel=0.05)


def test_too_little_is_no_line() -> None:
    with pytest.raises(ValueError, match="three samples"):
        fit_line([(10 * MB, 1e-3)] * 9)


def test_where_a_sweep_is_flat() -> None:
    assert first_flat([(1, 90.0), (2, 50.0), (4, 21.0), (8, 20.0), (16, 20.5)]) == 4
    assert first_flat([(1, 90.0), (2, 50.0), (4, 20.0)]) is None
    assert first_flat([(1, 20.0), (2, 21.0)]) == 1


def test_what_a_row_costs() -> None:
    assert row_part([(1, 10.0), (2, 11.0), (4, 13.0), (8, 17.0)]) == pytest.approx(0.1)
    assert row_part([(1, 10.0), (8, 9.0)]) == 0.0
    assert row_part([]) == 0.0


def test_working_sets_double_up_to_the_whole_store() -> None:
    layout = bench_layout(gated_form(512, 256), "float32", None, 400_000_000)
    sets = working_sets(layout)
    assert sets[-1] == layout.num_experts[0] > 100
    assert sets == sorted(sets)
    assert sets[0] >= 2 * TOP_K
    assert bench_layout(gated_form(512, 256), "float32", None, 1).num_experts[0] == 2 * TOP_K
