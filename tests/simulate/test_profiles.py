"""Machines and models as data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from orchestrator.simulate.profiles import (
    WEIGHT_BITS,
    load_profile,
    model_shape,
    model_shapes,
    profile_names,
)
from protocol.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_machine_states_its_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert len(profile.source) > 20
    costs = profile.costs(13_200_000)
    assert costs.link_bytes_per_s == pytest.approx(profile.link_gbps * 1e9)
    residual = max(profile.host_gbps - profile.link_gbps, 0) * 1e9
    assert costs.cpu_beside_link_bytes_per_s == pytest.approx(residual)


@pytest.mark.parametrize(
    ("name", "link", "host"),
    [("laptop", 11.8, 47.5), ("desktop", 49.0, 53.8), ("workstation", 51.5, 178.0)],
)
def test_the_three_published_machines(name: str, link: float, host: float) -> None:
    profile = load_profile(name)
    assert (profile.link_gbps, profile.host_gbps) == (link, host)
    assert (profile.dense_us, profile.cpu_dispatch_us) == (100.0, 20.0)


def test_a_dozen_models_and_the_size_of_their_experts() -> None:
    shapes = model_shapes()
    assert len(shapes) >= 12
    for shape in shapes.values():
        assert 1 <= shape.top_k <= shape.num_experts
        assert shape.weight_format in WEIGHT_BITS
    assert shapes["gpt-oss-20b"].expert_bytes() == pytest.approx(13.2e6, rel=0.01)
    assert shapes["gpt-oss-20b"].expert_bytes("bf16") == 3 * 2880 * 2880 * 2
    assert shapes["mixtral-8x7b"].expert_bytes() == 3 * 4096 * 14336 * 2
    with pytest.raises(UserError, match="no model shape 'gpt-5'; known: deepseek"):
        model_shape("gpt-5")


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nsource = "measured"\nlink_gbps = 20\nhost_gbps = 60\n'
        "link_beside_cpu_gbps = 15\ncpu_beside_link_gbps = 50\ngpu_expert_us = 7\n"
    )
    costs = load_profile(str(path)).costs(1000)
    assert costs.link_beside_cpu_bytes_per_s == 15e9
    assert costs.cpu_beside_link_bytes_per_s == 50e9
    assert costs.gpu_expert_s == pytest.approx(7e-6)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("link_gbps = ", "is wrong"),
        ('name = "x"\nsource = "y"\nlink_gbps = 1', "host_gbps"),
        ('name = "x"\nsource = "y"\nlink_gbps = 1\nhost_gbps = 0', "must be above 0"),
        ('name = "x"\nsource = "y"\nlink_gbps = nan\nhost_gbps = 1', "must be finite"),
        ('name = "x"\nsource = "y"\nlink_gbps = 1\nhost_gbps = 1\ndense_us = -1', "dense_us"),
        ('name = "x"\nsource = "y"\nlink_gbps = 1\nhost_gbps = 1\nlink = 1', "link"),
        ('name = "x"\nsource = "y"\nlink_gbps = "fast"\nhost_gbps = 1', "link_gbps"),
    ],
)
def test_a_wrong_profile_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=sentence) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("x = " + "[" * 5000, "nested too deeply"),
        ("expert_bytes = " + "1" * 5000, "a number in it is too long"),
        ("expert_bytes = " + "1" * 400, "expert_bytes must be at most 1e"),
        ("link_beside_cpu_gbps = 1e308", "link_beside_cpu_gbps must be at most 1e"),
        ("dense_us = 1e308", "dense_us must be at most 1e"),
        ("cpu_row_part = 1e308", "cpu_row_part must be at most 1000"),
        ("cpu_beside_link_gbps = 1e-320", "cpu_beside_link_gbps must be at least 1e-09"),
        ("link_beside_cpu_gbps = 0\ncpu_beside_link_gbps = 0", "must not both be 0"),
        ("link_beside_cpu_gbps = 0", "must not both be 0"),  # B_H - B_P is 0 as well
    ],
)
def test_a_profile_of_no_machine_is_one_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f'name = "x"\nsource = "y"\nlink_gbps = 30\nhost_gbps = 20\n{line}\n')
    with pytest.raises(UserError, match=sentence) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_rates_themselves_have_bounds(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    for rate, says in (("1e308", "at most 1e"), ("1" * 400, "range"), ("1e-300", "at least 1e-09")):
        path.write_text(f'name = "x"\nsource = "y"\nlink_gbps = {rate}\nhost_gbps = 20\n')
        with pytest.raises(UserError, match=says):
            load_profile(str(path))


def test_a_name_too_long_for_a_file_is_no_profile() -> None:
    with pytest.raises(UserError, match="There is no profile or file 'xxx") as caught:
        load_profile("x" * 5000)
    assert len(str(caught.value)) < 300


def test_an_unknown_profile_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="profiles are: desktop, laptop"):
        load_profile("toaster")
    binary = tmp_path / "x.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load_profile(str(binary))
