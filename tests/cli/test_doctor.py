"""The doctor's sentences on machines that nobody here owns, and its report on this one."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from orchestrator.cli import doctor
from orchestrator.cli import doctor_findings as findings_of
from orchestrator.cli.doctor_findings import BindFacts, CudaFacts, Finding, KernelFacts
from protocol import machine as machine_facts

GIB = 1 << 30
CPUS = machine_facts.Cpus((0, 1, 2, 3), (0, 1, 2, 3), (), (), None)
NODE = machine_facts.NumaNode(0, (0, 1, 2, 3), 64 * GIB, 32 * GIB, True)
MACHINE = machine_facts.Machine(
    cpus=CPUS,
    memory=machine_facts.Memory(64 * GIB, 40 * GIB, None, None, 40 * GIB),
    nodes=(NODE,),
    huge_pages=machine_facts.HugePages("madvise", "advise", ()),
    memlock_bytes=8 << 20,
    shm_total_bytes=64 << 20,
    shm_free_bytes=64 << 20,
    containers=(),
)


def change(**parts: Any) -> machine_facts.Machine:
    return dataclasses.replace(MACHINE, **parts)


def by_topic(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.topic for finding in findings}) == len(findings)
    for finding in findings:
        assert finding.fact
        assert finding.meaning
    return {finding.topic: finding for finding in findings}


def test_plain_cores() -> None:
    found = by_topic(findings_of.cores(CPUS))
    assert set(found) == {"cores"}
    assert "4 threads" in found["cores"].meaning
    one = machine_facts.Cpus((0, 1), (0,), (), (), None)
    assert findings_of.cores(one)[0].status == "warn"


@pytest.mark.parametrize(("quota", "status"), [(1.5, "note"), (8.0, "ok")])
def test_quota_matters_only_when_it_binds(quota: float, status: str) -> None:
    found = by_topic(findings_of.cores(dataclasses.replace(CPUS, quota=quota)))
    assert found["cpu quota"].status == status
    assert ("2 threads" in found["cores"].meaning) == (quota == 1.5)


def test_hybrid_cores_name_the_fast_ones() -> None:
    cpus = dataclasses.replace(CPUS, performance=(0, 1), efficiency=(2, 3))
    assert "taskset -c 0-1" in by_topic(findings_of.cores(cpus))["hybrid cores"].meaning


def test_cpu_features_of_both_kinds() -> None:
    (intel,) = findings_of.cpu_features("x86_64", frozenset({"avx2", "avx512f"}))
    assert intel.status == "ok"
    assert "found AVX2, AVX-512;" in intel.fact
    assert "AMX bf16" in intel.fact.partition("missing")[2]
    (arm,) = findings_of.cpu_features("aarch64", frozenset({"asimd", "sve"}))
    assert arm.fact.startswith("found NEON, SVE;")
    (old,) = findings_of.cpu_features("x86_64", frozenset({"sse2"}))
    assert (old.status, "AVX2" in old.meaning) == ("warn", True)
    (unknown,) = findings_of.cpu_features("riscv64", frozenset())
    assert unknown.status == "note"


def test_memory_and_its_limit() -> None:
    assert set(by_topic(findings_of.memory(MACHINE))) == {"memory"}
    limited = machine_facts.Memory(64 * GIB, 40 * GIB, 4 * GIB, 2 * GIB, 2 * GIB)
    found = by_topic(findings_of.memory(change(memory=limited)))
    assert found["memory"].status == "warn"
    assert "4.29 GB" in found["memory limit"].fact


def test_huge_pages_say_how_to_get_them() -> None:
    assert findings_of.huge_pages(MACHINE)[0].status == "ok"
    pool = machine_facts.HugetlbPool(2 << 20, 10, 10)
    pages = machine_facts.HugePages("madvise", "never", (pool,))
    found = by_topic(findings_of.huge_pages(change(huge_pages=pages)))
    assert "shmem_enabled" in found["huge pages"].meaning
    assert "10 of 10 pages of 2 MiB" in found["reserved pages"].fact


def test_missing_system_calls() -> None:
    good = by_topic(findings_of.limits(MACHINE, KernelFacts()))
    assert {finding.status for finding in good.values()} == {"ok"}
    bad = by_topic(findings_of.limits(MACHINE, KernelFacts(has_memfd=False)))
    assert bad["system calls"].status == "fail"
    old = by_topic(findings_of.limits(MACHINE, KernelFacts(has_populate=False)))
    assert old["system calls"].status == "warn"
    unlimited = findings_of.limits(change(memlock_bytes=None), KernelFacts())
    assert by_topic(unlimited)["locked memory"].fact == "limit unlimited"
    no_shm = findings_of.limits(change(shm_total_bytes=None), KernelFacts())
    assert by_topic(no_shm)["/dev/shm"].fact == "missing"
    windows = findings_of.limits(change(containers=("wsl2",)), KernelFacts())
    assert "Windows" in by_topic(windows)["container"].meaning


def test_numa_names_a_command_per_usable_node() -> None:
    nodes = (
        NODE,
        machine_facts.NumaNode(1, (4, 5), GIB, GIB, True),
        machine_facts.NumaNode(2, (), GIB, GIB, True),
    )
    bound = BindFacts(level="membind", message="bound")
    found = by_topic(findings_of.numa(change(nodes=nodes), bound, has_numactl=True))
    assert "--numa-node 1`" in found["NUMA"].meaning
    assert "--numa-node 2" not in found["NUMA"].meaning
    assert found["binding"].status == "ok"
    half = BindFacts(level="cpu-only", message="EPERM")
    two = findings_of.numa(change(nodes=nodes), half, has_numactl=True)
    assert by_topic(two)["binding"].status == "warn"
    one = findings_of.numa(MACHINE, half, has_numactl=True)
    assert by_topic(one)["binding"].status == "note"
    failed = findings_of.numa(MACHINE, BindFacts(error="no answer"), has_numactl=True)
    assert "no answer" in by_topic(failed)["binding"].meaning


def test_a_program_that_is_not_there_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    without_probes(monkeypatch)
    monkeypatch.setattr("shutil.which", lambda _: None)
    without = by_topic(doctor.examine(MACHINE))["binding"].meaning
    assert "--numa-node works" in without
    assert "numactl is not installed (a package of the system" in without
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/numactl")
    assert by_topic(doctor.examine(MACHINE))["binding"].meaning == "--numa-node and numactl work"


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (CudaFacts(error="boom"), "warn", "boom"),
        (CudaFacts(torch_version="2.13"), "ok", "--device cpu"),
        (CudaFacts(torch_version="2.13", has_driver=True), "warn", "without CUDA"),
        (CudaFacts(cuda_version="13.0", has_driver=True), "warn", "--gpus all"),
    ],
)
def test_without_cuda(facts: CudaFacts, status: str, words: str) -> None:
    (found,) = findings_of.cuda(facts)
    assert found.status == status
    assert words in f"{found.fact} {found.meaning}"


def test_with_cuda_each_ability_is_told() -> None:
    facts = CudaFacts(
        cuda_version="13.0",
        is_available=True,
        has_driver=True,
        devices=["H200"],
        total_bytes=139 * GIB,
        can_pin="",
        can_register="error 801",
    )
    found = by_topic(findings_of.cuda(facts))
    assert "H200" in found["CUDA"].fact
    assert found["pinned memory"].status == "ok"
    assert found["pinning the store"].status == "warn"
    assert "error 801" in found["pinning the store"].fact
    assert found["CUDA IPC"].status == "note"


def test_missing_package_fails() -> None:
    found = by_topic(findings_of.packages("3.11.7", {"torch": "2.13", "uvloop": None}))
    assert found["packages"].status == "fail"
    assert "uvloop" in found["packages"].fact


def test_probes_answer_for_this_machine() -> None:
    assert doctor.probe_kernel().has_memfd
    assert doctor.package_versions()["msgspec"]


@pytest.mark.process
def test_probe_that_takes_too_long_is_ended() -> None:
    facts = doctor.probe_binding(0, timeout_s=0.001)
    assert facts.error == "no answer within 0.001 s"


@pytest.mark.process
def test_probe_that_breaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CUDA_PROBE", "raise SystemExit('driver went away')")
    assert doctor.probe_cuda().error == "driver went away"
    monkeypatch.setattr(doctor, "_CUDA_PROBE", "print('[1, 2')")
    assert doctor.probe_cuda().error == "it ended with code 0"


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    return parser.parse_args(["doctor", *words])


def without_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_cuda", CudaFacts)
    monkeypatch.setattr(doctor, "probe_binding", lambda _node: BindFacts("membind", "bound"))


def test_report_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    without_probes(monkeypatch)
    output = io.StringIO()
    doctor.print_report(doctor.examine(machine_facts.read_machine()), Console(file=output))
    for topic in ("cores", "memory", "NUMA", "huge pages", "CUDA", "packages"):
        assert topic in output.getvalue()
    assert output.getvalue().isascii()


def test_report_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_probes(monkeypatch)
    args = parse("--json")
    assert args.func(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_run"] is True
    assert report["machine"]["cpus"]["allowed"] == sorted(os.sched_getaffinity(os.getpid()))
    assert {"topic", "status", "fact", "meaning"} == set(report["findings"][0])


def test_exit_code_says_that_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_probes(monkeypatch)
    monkeypatch.setattr(doctor, "package_versions", lambda: {"torch": None})
    args = parse()
    assert args.func(args) == 1
    assert "cannot run here yet" in capsys.readouterr().out


@pytest.mark.process
def test_whole_report_never_imports_torch_here(tiny_env: dict[str, str]) -> None:
    code = (
        "import argparse, sys\n"
        "from orchestrator.cli import doctor\n"
        "code = doctor.run_doctor(argparse.Namespace(json=True))\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=tiny_env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cuda = [one for one in json.loads(done.stdout)["findings"] if one["topic"] == "CUDA"]
    assert len(cuda) == 1
    assert "could not be asked" not in cuda[0]["fact"]
