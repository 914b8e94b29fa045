"""The edges of `headrace`: what a person types wrong, and what must come quickly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli import main as cli
from orchestrator.cli.main import main
from orchestrator.cli.options import numa_nodes

REPO_ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "generate",
    "serve",
    "chat",
    "top",
    "orchestrator",
    "status",
    "latency",
    "plan",
    "calibrate",
    "trace",
    "simulate",
    "doctor",
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bogus"],
        ["generat"],
        ["generate"],
        ["generate", "--prompt", "x", "--slts", "1"],
        ["generate", "--prompt", "x", "--max-tokens", "0"],
        ["generate", "--prompt", "x", "--max-tokens", "many"],
        ["generate", "--prompt", "x", "--temperature", "-1"],
        ["generate", "--prompt", "x", "--temperature", "nan"],
        ["generate", "--prompt", "x", "--seed", "-1"],
        ["generate", "--prompt", "x", "--fill", "some"],
        ["generate", "--prompt", "x", "--fill", "-1"],
        ["generate", "--prompt", "x", "--device", "tpu"],
        ["generate", "--prompt", "x", "--host-gbps", "0"],
        ["generate", "--prompt", "x", "--cpu-workers", "-1"],
        ["orchestrator"],
        ["orchestrator", "--model", "x", "--prompt", "y"],
        ["latency"],
        ["plan"],
        ["plan", "--model", "x", "--slots", "1", "--vram-gb", "1"],
        ["status", "extra"],
    ],
)
def test_wrong_flags_are_one_line_and_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("headrace")
    assert err.count("\n") == 1
    assert "--help" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--prompt", "x", "--top-p", "0"], "headrace: --top-p is 0.0;"),
        (["generate", "--prompt", "x", "--min-p", "nan"], "headrace: --min-p is nan;"),
        (["generate", "--prompt", "x", "--slots", "4"], "--slots belongs to"),
        (["generate", "--prompt", "x", "--run-dir", "/nowhere/at/all"], "no run directory"),
        (["generate", "--prompt", "x", "--run-dir", "/" + 200 * "x"], "shorter --run-dir"),
        (["status", "--run-dir", "/nowhere/at/all"], "no run directory"),
        (["latency", "/nowhere/log"], "cannot be read"),
        (["generate", "--prompt", "\udcff\udcfe"], "not valid UTF-8"),
        (["plan", "--model", "/nowhere", "--slots", "some"], "not a number of experts"),
    ],
)
def test_what_a_person_can_put_right(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["generate", "--promt", "hi"], ["plan", "--modle=x"], ["orchestrator", "--modle", "x"]],
)
def test_a_mistyped_flag_is_named_though_a_required_one_is_missing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert arguments[1].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--link-gbps", "-3", "say a number above 0 (GB/s)"),
        ("--expert-dtype", "int3", "argument --expert-dtype: 'int3' is not known"),
        ("--dense-dtype", "int3", "argument --dense-dtype: 'int3' is not known"),
        ("--max-tokens", "\u0663", "say a number >= 1 (tokens)"),
        ("--max-tokens", "9" * 400, "say a number >= 1 and <= 9.2"),
        ("--host-gbps", "1e308", "say a number above 0 and <= 9.2"),
        ("--numa-nodes", "", "'' is no list of NUMA nodes like 0,1 or 0-3"),
        ("--numa-nodes", "0,", "'0,' is no list of NUMA nodes"),
        ("--numa-nodes", "3-0", "'3-0' is no list of NUMA nodes"),
        ("--numa-nodes", "\u0660", "is no list of NUMA nodes"),
        ("--numa-nodes", "0,0", "'0,0' names node 0 twice"),
        ("--numa-nodes", "0-2,1-4", "'0-2,1-4' names node 1 twice"),
        ("--numa-nodes", "0-99999999999", "no machine has a NUMA node 99999999999;"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(
    flag: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--prompt", "x", flag, value])
    err = capsys.readouterr().err
    assert says in err
    assert ".;" not in err
    assert len(err) < 400


@pytest.mark.parametrize(("text", "nodes"), [("0", "0"), ("0, 1", "0-1"), ("3,0-1", "0-1,3")])
def test_nodes_as_the_kernel_lists_them(text: str, nodes: str) -> None:
    assert numa_nodes(text) == nodes


def test_no_line_of_help_is_longer_than_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 100, command


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["plan", "--help"], ["--version"]])
def test_a_full_disk_is_one_sentence(arguments: list[str], unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "orchestrator.cli.main", *arguments],
            env={**os.environ, "PYTHONPATH": str(REPO_ROOT), "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "headrace: the output cannot be written: No space left on device.\n"


def test_a_closed_stdout_is_one_sentence() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} -P -m orchestrator.cli.main doctor --json >&-"],
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "headrace: stdout is closed; send it to a file, or to /dev/null if nobody reads it.\n"
    )


def test_alone_it_shows_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "headrace generate --model" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"headrace {command}" in capsys.readouterr().out


def test_the_list_of_commands_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert tuple(cli._COMMANDS) == COMMANDS
    for command in (*COMMANDS, "gpu-worker", "cpu-worker", "dma-worker"):
        assert f"    {command}" in out


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_quick_words_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from orchestrator.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'msgspec', 'zmq', 'rich', 'asyncio', 'tokenizers', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("word", ["gpu-worker", "cpu-worker", "dma-worker"])
def test_worker_words_become_the_worker(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def execv(path: str, arguments: list[str]) -> None:
        seen.append([path, *arguments])
        raise SystemExit(0)

    monkeypatch.setattr(cli.os, "execv", execv)
    with pytest.raises(SystemExit):
        main([word, "--numa-node", "0", "--bogus"])
    package = word.replace("-", "_")
    python = sys.executable
    assert seen == [[python, python, "-P", "-m", package, "--numa-node", "0", "--bogus"]]


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(word: str, arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert main(["status"]) == 130
