"""Flag, environment, file, default: in this order, by one name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from orchestrator.cli.sources import add_config, fill_in
from protocol.errors import UserError
from protocol.worker_flags import number


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_config(made)
    made.add_argument("--max-context", type=number(int, 1, "tokens"))
    made.add_argument("--device", choices=("cpu", "cuda"))
    made.add_argument("--cors-origins")
    made.add_argument("--latency-log", type=Path)
    made.add_argument("--digest-logits", action="store_true", default=None)
    return made


def resolve(
    flags: list[str], environ: dict[str, str], text: str | None, folder: Path
) -> tuple[argparse.Namespace, dict[str, str]]:
    made = parser()
    if text is not None:
        (folder / "c.toml").write_text(text)
        flags = [*flags, "--config", str(folder / "c.toml")]
    options = made.parse_args(flags)
    return options, fill_in(made, options, environ)


def test_each_wins_over_the_next(tmp_path: Path) -> None:
    text = 'max-context = 1\ndevice = "cuda"\nlatency_log = "x.log"\ndigest-logits = true\n'
    environ = {"HEADRACE_MAX_CONTEXT": "2", "HEADRACE_DEVICE": "cpu", "HEADRACE_OTHER": "1"}
    options, sources = resolve(["--max-context", "3"], environ, text, tmp_path)
    assert (options.max_context, options.device) == (3, "cpu")
    assert options.latency_log == Path("x.log")
    assert options.digest_logits is True
    assert options.cors_origins is None
    config = str(tmp_path / "c.toml")
    assert sources == {
        "max-context": "flag",
        "device": "HEADRACE_DEVICE",
        "latency-log": config,
        "digest-logits": config,
    }


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('cors-origins = ["a", "b"]')
    options, _ = resolve([], {"HEADRACE_CONFIG": str(tmp_path / "c.toml")}, None, tmp_path)
    assert options.cors_origins == "a,b"


@pytest.mark.parametrize("off", ["0", "false", "no", "off"])
def test_a_switch_can_be_off(off: str, tmp_path: Path) -> None:
    options, _ = resolve([], {"HEADRACE_DIGEST_LOGITS": off}, None, tmp_path)
    assert options.digest_logits is None


@pytest.mark.parametrize(
    ("environ", "text", "says"),
    [
        ({"HEADRACE_MAX_CONTEXT": "many"}, None, "HEADRACE_MAX_CONTEXT: 'many'"),
        ({"HEADRACE_DEVICE": "tpu"}, None, "HEADRACE_DEVICE: invalid choice"),
        ({"HEADRACE_DIGEST_LOGITS": "maybe"}, None, "neither true nor false"),
        ({}, "max-contxt = 5", "did you mean max-context?"),
        ({}, "max-context = [5]", "max-context in"),
        ({}, "max-context = true", "max-context in"),
        ({}, "max-context = 0", "max-context in"),
        ({}, "max-context =", "not valid TOML"),
        ({}, "max-context = " + "[" * 5000, "nested too deeply"),
        ({}, "max-context = " + "1" * 5000, "too long"),
        ({"HEADRACE_CONFIG": "/nowhere/c.toml"}, None, "cannot be read"),
    ],
)
def test_a_complaint_names_the_place(
    environ: dict[str, str], text: str | None, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says.replace("?", r"\?")):
        resolve([], environ, text, tmp_path)
