"""The memory and cores that a process can use, with and without control groups of either version."""

import os
from pathlib import Path

import pytest

from prelunet.evaluator.machine import cores, machine_memory


def write(root: Path, groups: str, limits: dict[str, str]) -> None:
    for path, text in {"proc/self/cgroup": groups, **limits}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def machine(root: Path, groups: str, limits: dict[str, str]) -> int:
    write(root, groups, limits)
    return machine_memory(root)


def test_a_machine_without_control_groups_has_its_physical_memory(tmp_path: Path) -> None:
    assert machine_memory(tmp_path) == machine_memory(tmp_path / "nothing") > 2**27
    assert machine(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "max\n"}) == machine_memory(tmp_path / "nothing")


def test_the_lowest_limit_of_a_group_and_those_above_it_counts(tmp_path: Path) -> None:
    limits = {"sys/fs/cgroup/a/memory.max": "7000\n", "sys/fs/cgroup/a/b/memory.max": "9000\n"}
    assert machine(tmp_path, "0::/a/b\n", limits) == 7000
    assert machine(tmp_path, "0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "5000\n"}) == 5000
    assert machine(tmp_path, "0::/other\n", {}) > 7000, "another group's limit"


def test_in_a_container_the_limit_is_at_the_root_of_the_tree(tmp_path: Path) -> None:
    limits = {"sys/fs/cgroup/memory.max": "8000\n", "sys/memory.max": "1\n"}  # the latter belongs to no group
    assert machine(tmp_path, "0::/../../pod\n", limits) == 8000


def test_control_groups_of_version_1_are_read(tmp_path: Path) -> None:
    limits = {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "6000\n", "sys/fs/cgroup/x/memory.max": "1\n"}
    assert machine(tmp_path, "8:pids:/x\n4:cpu,memory:/x\n", limits) == 6000
    no_limit = {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n"}
    assert machine(tmp_path, "4:memory:/x\n", no_limit) == machine_memory(tmp_path / "nothing")


# Cores.


@pytest.fixture
def twelve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(12)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)


def cores_under(root: Path, groups: str, limits: dict[str, str]) -> int:
    write(root, groups, limits)
    return cores(root)


@pytest.mark.usefixtures("twelve")
def test_a_process_has_the_cores_of_its_affinity_mask(tmp_path: Path) -> None:
    assert cores(tmp_path) == 12
    assert cores_under(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}) == 12


@pytest.mark.usefixtures("twelve")
@pytest.mark.parametrize(
    ("quota", "found"),
    [("300000 100000", 3), ("150000 100000", 2), ("1000 100000", 1), ("0 100000", 1), ("2000000 100000", 12)],
)
def test_a_cpu_quota_is_rounded_up_to_cores_and_at_least_one(tmp_path: Path, quota: str, found: int) -> None:
    assert cores_under(tmp_path, "0::/a\n", {"sys/fs/cgroup/a/cpu.max": f"{quota}\n"}) == found


@pytest.mark.usefixtures("twelve")
def test_the_lowest_quota_of_a_group_and_those_above_it_counts(tmp_path: Path) -> None:
    limits = {"sys/fs/cgroup/a/cpu.max": "500000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n"}
    assert cores_under(tmp_path, "0::/a/b\n", limits) == 5
    assert cores_under(tmp_path, "0::/other\n", {}) == 12


@pytest.mark.usefixtures("twelve")
def test_quotas_of_version_1_are_read(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/cpu/x"
    limits = {f"{folder}/cpu.cfs_quota_us": "400000\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    assert cores_under(tmp_path, "3:memory:/x\n4:cpu,cpuacct:/x\n", limits) == 4
    assert cores_under(tmp_path, "4:cpu:/x\n", {f"{folder}/cpu.cfs_quota_us": "-1\n"}) == 12


def test_without_an_affinity_mask_all_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores(tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores(tmp_path) == 1
