"""A start on GPUs: its turn, its flags, and a look at what is free by then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvmig.core.config import ClusterConfig, UnitConfig
from kvmig.core.devices import GIB, DeviceInventory, DeviceProcess, DeviceRecord
from kvmig.core.errors import ConfigError, StartupError
from kvmig.launcher import gpu_starts
from kvmig.launcher.gpu_division import NoRoom, divide
from kvmig.launcher.gpu_starts import EngineMemory, GpuStart, GpuStarts
from kvmig.launcher.launch import LlumletLaunch, PlannedInstance
from kvmig.launcher.unit_memory import InstanceUnits, UnitArena

TOTAL = 80 * GIB
SHARE, SIZE = "--gpu-memory-utilization", "--kv-cache-memory-bytes"


class Host:
    """One GPU, two planned instances, and what NVML says now."""

    def __init__(self, folder: Path, instances: int = 2, arena: int = 0) -> None:
        self.device = DeviceRecord(id="0", index=0, uuid="GPU-0", name="H100", total=TOTAL)
        self.fails = False
        self.read = 0
        planned = {f"i{number}": 1 for number in range(instances)}
        config = UnitConfig(path="/u", model="a")
        units = InstanceUnits({"/u": UnitArena("/u", arena)}, config) if arena else None
        known = EngineMemory(divides=True, weights=16 * GIB, units=units)
        division = divide([self.device], planned)
        self.starts = GpuStarts(division, known, "here", self._read, folder)

    def _read(self) -> DeviceInventory:
        self.read += 1
        return DeviceInventory(devices=() if self.fails else (self.device,))

    def has(self, used: int, pid: int = 4711) -> None:
        """Others have so much of it from now on."""
        processes = (DeviceProcess(pid, used, "python3"),)
        self.device = replace(self.device, used=used, processes=processes)

    async def begin(self, name: str, *words: str) -> GpuStart:
        config = ClusterConfig(start_timeout_s=5.0)
        launch = LlumletLaunch(
            cluster="c", instance=name, secret=b"s", config=config, engine_argv=["M", *words]
        )
        return await self.starts.begin(launch, 1)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_starts, "RELEASE_S", 0.3)
    monkeypatch.setattr(gpu_starts, "LOOK_S", 0.02)


async def test_the_first_measures_alone_and_names_the_cache_of_all_that_follow(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path, 3)
    first = await host.begin("i0")
    assert first.flags[0] == SHARE
    second, third = (asyncio.create_task(host.begin(one)) for one in ("i1", "i2"))
    await asyncio.sleep(0.3)
    assert [second.done(), third.done()] == [False, False]

    first.serves(kv_bytes=5 * GIB)
    first.end()
    both = [await second, await third]  # neither waits for the other's end

    assert [one.flags[:3] for one in both] == [[SHARE, "0.01", SIZE]] * 2
    assert all(5 * GIB <= int(one.flags[3]) < 5 * GIB + TOTAL // 10_000 for one in both)
    for one in both:
        one.end()


async def test_one_that_fails_while_it_measures_lets_the_next_one_measure(host: Host) -> None:
    (await host.begin("i0")).end()
    second = await host.begin("i1")
    assert second.flags[0] == SHARE
    assert SIZE not in second.flags
    second.end()


async def test_other_flags_are_measured_anew(host: Host) -> None:
    first = await host.begin("i0")
    first.serves(5 * GIB)
    first.end()
    other = await host.begin("i1", "--max-num-seqs=4")
    assert SIZE not in other.flags
    other.end()


async def test_those_whose_cache_has_a_size_wait_for_nobody_but_one_that_measures(
    host: Host,
) -> None:
    starts = [await host.begin(one, f"{SIZE}=1G") for one in ("i0", "i1")]
    assert [one.flags for one in starts] == [[SHARE, "0.01"]] * 2
    waiting = asyncio.create_task(host.begin("i0", f"{SHARE}=0.4"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    for one in starts:
        one.end()
    own = await waiting
    assert own.flags == []
    own.end()


async def test_what_an_instance_had_that_has_just_ended_is_waited_for(host: Host) -> None:
    host.has(60 * GIB)
    waiting = asyncio.create_task(host.begin("i0"))
    await asyncio.sleep(0.1)
    host.has(0)
    start = await waiting
    assert start.place.size == host.starts.division.place("i0").size
    start.end()


async def test_what_others_have_taken_since_is_missing_and_said(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    host.has(50 * GIB)
    start = await host.begin("i0")
    assert start.place.size == 30 * GIB
    assert f"gets {30 * GIB} bytes of GPU 0, not" in capsys.readouterr().err
    start.end()


async def test_a_start_that_has_no_room_any_more_is_refused_and_holds_no_turn(
    host: Host,
) -> None:
    host.has(70 * GIB)
    with pytest.raises(NoRoom, match=r"\(10\.00 GiB\) are free for it; .* 4711 \(python3\) has 70"):
        await host.begin("i0")
    host.has(0)
    (await host.begin("i1")).end()


async def test_a_start_goes_on_where_nvml_fails(host: Host) -> None:
    host.fails = True
    (await host.begin("i0")).end()
    assert host.read == 1


async def test_instances_of_a_unit_have_the_arenas_addresses_and_measure_nothing(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path, arena=4 * GIB)
    starts = [await host.begin(one) for one in ("i0", "i1")]
    assert [one.flags for one in starts] == [[SHARE, "0.01", SIZE, str(4 * GIB)]] * 2
    assert host.read == 0


def test_a_third_instance_is_refused_before_it_starts_and_leaves_the_plan_as_it_was(
    host: Host,
) -> None:
    before = dict(host.starts.division.places)
    wanted = [PlannedInstance("i2", 1, ["M"])]
    with pytest.raises(StartupError, match=r"instance i2 doesn't fit on GPU 0 .*i0 has 39\.20 GiB"):
        host.starts.check_room(wanted, (), ["i0", "i1"])
    assert host.starts.division.places == before


def test_gpus_are_named_by_index_and_uuid_also_where_the_server_sees_them_by_uuid(
    tmp_path: Path,
) -> None:
    gpus = [
        DeviceRecord(id=f"GPU-{at}", index=at, uuid=f"GPU-{at}", name="H100", total=TOTAL)
        for at in (1, 0)
    ]
    starts = GpuStarts(divide(gpus, {"i0": 1}), EngineMemory(divides=True), turns=tmp_path)
    for named in ("0", "GPU-0"):
        starts.check_gpus([named], 1)
        assert starts.place("i1", 1, [named]).gpus == ("GPU-0",)
    with pytest.raises(ConfigError, match="gpus has 2, allowed are GPU-1, GPU-0"):
        starts.place("i1", 1, ["2"])


async def test_a_third_instance_of_a_unit_is_refused_where_the_cache_leaves_it_no_room(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path, arena=30 * GIB)
    host.starts.check({name: host.starts.need(1) for name in ("i0", "i1")})
    third = [PlannedInstance("i2", 1, ["M"])]
    with pytest.raises(StartupError, match=r"instance i2 doesn't fit .*i0 has 17\.00 GiB, i1 has"):
        host.starts.check_room(third, (), ["i0", "i1"])
    (await host.begin("i1")).end()
    assert host.starts.division.place("i1").size == 17 * GIB
