"""What control groups leave a process: of both versions, inside and outside of a container."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.process import cgroups
from kvmig.process.cgroups import cores, memory_left, memory_limit

GIB = 1 << 30


class Host:
    """A machine's /proc/self and /sys/fs/cgroup, as far as a process there sees them."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.groups = folder / "cgroup"
        self.proc.mkdir()
        self.write("proc/cgroup", "0::/")
        self.write("proc/mountinfo", "23 1 8:1 / / rw - ext4 /dev/sda1 rw")

    def write(self, file: str, text: object) -> None:
        path = self.proc.parent / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def mount(self, folder: str, kind: str, options: str, root: str = "/") -> None:
        with (self.proc / "mountinfo").open("a") as file:
            at = (self.groups / folder).as_posix().rstrip("/")
            file.write(f"31 23 0:28 {root} {at} rw,nosuid - {kind} {kind} {options}\n")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def second(host: Host) -> Host:
    """Version 2, as Kubernetes has it: limits of the pod, in a container of which it runs."""
    host.write("proc/cgroup", "0::/pod/container")
    host.mount("", "cgroup2", "rw")
    host.write("cgroup/pod/memory.max", 8 * GIB)
    host.write("cgroup/pod/memory.current", 6 * GIB)
    host.write("cgroup/pod/memory.stat", f"anon {5 * GIB}\ninactive_file {GIB}")
    host.write("cgroup/pod/cpu.max", "350000 100000")
    host.write("cgroup/pod/container/memory.max", "max")
    host.write("cgroup/pod/container/memory.current", GIB)
    host.write("cgroup/pod/container/cpu.max", "max 100000")
    return host


@pytest.fixture
def first(host: Host) -> Host:
    """Version 1, from within a container that sees its own groups alone."""
    host.write("proc/cgroup", "4:memory:/docker/1f\n2:cpu,cpuacct:/docker/1f\n0::/docker/1f")
    host.mount("memory", "cgroup", "rw,memory", root="/docker/1f")
    host.mount("cpu", "cgroup", "rw,cpu,cpuacct", root="/docker/1f")
    host.write("cgroup/memory/memory.limit_in_bytes", 4 * GIB)
    host.write("cgroup/memory/memory.usage_in_bytes", 3 * GIB)
    host.write("cgroup/memory/memory.stat", f"cache {GIB}\ntotal_inactive_file {GIB // 2}")
    host.write("cgroup/cpu/cpu.cfs_quota_us", 50000)
    host.write("cgroup/cpu/cpu.cfs_period_us", 100000)
    return host


def test_the_least_limit_of_all_groups_counts(second: Host) -> None:
    assert memory_limit(second.proc) == 8 * GIB
    second.write("cgroup/pod/container/memory.max", 2 * GIB)
    assert memory_limit(second.proc) == 2 * GIB


def test_what_the_kernel_takes_back_first_is_still_to_have(second: Host) -> None:
    assert memory_left(second.proc) == 3 * GIB


def test_cores_of_a_quota_are_rounded_down(second: Host) -> None:
    assert cores(second.proc) == 3


def test_a_container_of_the_first_version_finds_its_limits_at_the_mounts(first: Host) -> None:
    assert (memory_limit(first.proc), memory_left(first.proc)) == (4 * GIB, GIB + GIB // 2)


def test_half_a_core_is_one(first: Host) -> None:
    assert cores(first.proc) == 1


def test_a_group_over_its_limit_has_nothing_left(first: Host) -> None:
    first.write("cgroup/memory/memory.usage_in_bytes", 5 * GIB)
    assert memory_left(first.proc) == 0


def test_a_machine_without_groups_has_no_limits(host: Host) -> None:
    assert (memory_limit(host.proc), memory_left(host.proc), cores(host.proc)) == (None, None, None)


def test_no_quota_is_no_limit(first: Host) -> None:
    first.write("cgroup/cpu/cpu.cfs_quota_us", -1)
    assert cores(first.proc) is None


@pytest.fixture
def limited() -> Iterator[tuple[str, ...]]:
    """Words before a command that then runs in a real group of 3 GiB."""
    group = Path("/sys/fs/cgroup/memory", "kvmig-test-cgroups")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory group of version 1 can be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(3 * GIB))
        yield "sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"
    finally:
        group.rmdir()


def test_an_instance_is_planned_for_the_container_and_its_cores(limited: tuple[str, ...]) -> None:
    ask = (
        "from kvmig.launcher.environment import available_memory, total_memory, worker_threads\n"
        "print(total_memory(), available_memory() < 3 << 30, worker_threads([1]))"
    )
    command = [*limited, "taskset", "-c", "0", sys.executable, "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(3 * GIB), "True", "1"]


def test_this_process_has_groups_that_can_be_read() -> None:
    assert list(cgroups.groups("memory", cgroups.PROC))
