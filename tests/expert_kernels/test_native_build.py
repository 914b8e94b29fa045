"""The native kernels on processors other than this one: cross compiled, and run in an emulator."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from expert_kernels.native_library import load_library, usable_isas

REPO_ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not shutil.which("cmake"), reason="no cmake here"),
]
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86-64 machines")


def build_check(folder: Path, *flags: str) -> Path:
    """The program kernel_check, statically linked."""
    configure = ["cmake", "-S", REPO_ROOT, "-B", folder, "-DHEADRACE_BUILD_CHECK=ON", *flags]
    build = ["cmake", "--build", folder, "--target", "kernel_check", "--parallel", "2"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "kernel_check"


def instruction_sets(*command: object) -> list[str]:
    """What kernel_check found, and found equal."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


@needs_x86
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")
def test_all_that_this_processor_has_gives_the_scalar_kernels_bits(tmp_path: Path) -> None:
    check = build_check(tmp_path, "-DCMAKE_CXX_COMPILER=g++")
    assert instruction_sets(check) == usable_isas(load_library())


@needs_x86
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")
@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="no emulator (qemu-user) here")
def test_lesser_x86_processors_use_no_more_than_they_have(tmp_path: Path) -> None:
    check = build_check(tmp_path, "-DCMAKE_CXX_COMPILER=g++")
    assert instruction_sets(check)[0] == "scalar"
    assert instruction_sets("qemu-x86_64", "-cpu", "Nehalem", check) == ["scalar"]
    assert instruction_sets("qemu-x86_64", "-cpu", "Haswell", check) == ["scalar", "avx2"]


@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-g++"), reason="no cross compiler for 64-bit Arm here"
)
def test_arm_kernels_have_the_scalar_ones_bits(tmp_path: Path) -> None:
    check = build_check(
        tmp_path,
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
    )
    if not shutil.which("qemu-aarch64"):
        pytest.skip("it compiles; no emulator (qemu-user) here to run it")
    assert instruction_sets("qemu-aarch64", check) == ["scalar", "neon"]
