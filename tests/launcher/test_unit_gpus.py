"""The GPUs of units, which are taken from Ray: here a made-up one gives the GPUs, and time is the
test's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmig.core.errors import StartupError
from kvmig.launcher.unit_gpus import (
    AGAIN_S,
    PATIENCE_S,
    GpuHolder,
    GpuWish,
    UnitGpu,
    UnitGpus,
    assign_gpus,
)

UNIT = "/run/unit-u.sock"


@dataclass(eq=False)
class MadeUpHolder:
    """One that Ray has given a GPU, gives one later, or that has ended."""

    ray: MadeUpRay
    uuid: str = ""
    gone: bool = False

    def given(self) -> str:
        if self.gone:
            raise StartupError("the actor died")
        return self.uuid

    def release(self) -> None:
        self.ray.free[:0] = [self.uuid] if self.uuid else []
        self.ray.holders = {at: one for at, one in self.ray.holders.items() if one is not self}


@dataclass(eq=False)
class MadeUpRay:
    """Gives the first of the GPUs that are free."""

    free: list[str] = field(default_factory=list)
    holders: dict[int, MadeUpHolder] = field(default_factory=dict)
    now: float = 0.0

    def find_holders(self, fleet: str) -> dict[int, GpuHolder]:
        return dict(self.holders)

    def take_gpu(self, fleet: str, number: int) -> GpuHolder:
        assert number not in self.holders
        self.holders[number] = MadeUpHolder(self, self.free.pop(0) if self.free else "")
        return self.holders[number]

    def made(self) -> UnitGpus:
        return UnitGpus(self, lambda: self.now)

    @property
    def held(self) -> list[str]:
        return [one.uuid for one in self.holders.values()]


def turns(gpus: UnitGpus, *allowed: str, count: int = 5) -> UnitGpu:
    for _ in range(count):
        found = gpus.hold_gpus({UNIT: GpuWish(allowed)})[UNIT]
    return found


def all_turns(gpus: UnitGpus, wishes: Mapping[str, GpuWish], count: int = 9) -> dict[str, UnitGpu]:
    for _ in range(count):
        found = gpus.hold_gpus(wishes)
    return found


def one(*allowed: str) -> GpuWish:
    return GpuWish(allowed)


def test_the_first_gpu_that_it_may_have_is_its_own() -> None:
    ray = MadeUpRay(["g0", "g1"])
    assert turns(ray.made(), "g0", "g1") == UnitGpu(("g0",))
    assert (ray.held, ray.free) == (["g0"], ["g1"])


def test_gpus_that_it_may_not_have_go_back() -> None:
    ray = MadeUpRay(["g0", "g1", "g2"])
    assert turns(ray.made(), "g2") == UnitGpu(("g2",))
    assert (ray.held, sorted(ray.free)) == (["g2"], ["g0", "g1"])


def test_a_unit_without_gpus_takes_none() -> None:
    ray = MadeUpRay(["g0"])
    assert turns(ray.made()) == UnitGpu()
    assert ray.held == []


def test_while_ray_has_given_none_it_waits_and_asks_for_one_only() -> None:
    ray = MadeUpRay()
    assert turns(ray.made(), "g0") == UnitGpu(why="Ray has not given GPU g0 yet")
    assert ray.held == [""]


def test_where_others_have_the_gpu_what_was_taken_goes_back_and_is_asked_for_again() -> None:
    ray = MadeUpRay(["g0"])
    gpus = ray.made()
    turns(gpus, "g1")
    assert ray.held == ["g0", ""], "nothing more while one is awaited"
    ray.now += PATIENCE_S
    why = "Ray has given GPU g1 to others, or does not have it"
    assert turns(gpus, "g1") == UnitGpu(why=why)
    assert ray.held == []
    ray.free = ["g1"]
    assert turns(gpus, "g1") == UnitGpu(why=why)
    ray.now += AGAIN_S
    assert turns(gpus, "g1") == UnitGpu(("g1",))


def test_the_agent_that_comes_after_this_one_finds_the_gpu() -> None:
    ray = MadeUpRay(["g0", "g1"])
    first = ray.made()
    turns(first, "g1")
    first.forget_all()
    assert ray.held == ["g1"]
    assert turns(ray.made(), "g1", count=1) == UnitGpu(("g1",))
    assert ray.held == ["g1"]


def test_a_unit_that_is_wanted_no_more_gives_its_gpu_back() -> None:
    ray = MadeUpRay(["g0"])
    gpus = ray.made()
    turns(gpus, "g0")
    assert ray.held == ["g0"]
    gpus.hold_gpus({})
    assert (ray.held, ray.free) == ([], ["g0"])


def test_a_gpu_whose_holder_has_died_is_taken_again() -> None:
    ray = MadeUpRay(["g0"])
    gpus = ray.made()
    turns(gpus, "g0")
    ray.holders.pop(0).gone = True
    ray.free = ["g0"]
    assert turns(gpus, "g0", count=1).uuids == ()
    assert turns(gpus, "g0") == UnitGpu(("g0",))


def test_a_holder_that_never_had_its_gpu_says_why_and_the_next_one_comes_after_a_pause() -> None:
    ray = MadeUpRay(["g0"])
    gpus = ray.made()
    turns(gpus, "g1", count=2)
    assert ray.held == ["g0", ""]
    ray.holders.pop(1).gone = True  # NVML shows its GPU to nobody, for example
    assert turns(gpus, "g1") == UnitGpu(why="the actor died")
    assert (ray.held, ray.free) == ([], ["g0"])
    ray.now += AGAIN_S
    turns(gpus, "g1", count=1)
    assert ray.held == ["g0"]


def test_units_that_name_each_others_gpus_get_their_own() -> None:
    """Ray gives the first one what the second one names."""
    ray = MadeUpRay(["g0", "g1"])
    found = all_turns(ray.made(), {"a": one("g1"), "b": one("g0")})
    assert found == {"a": UnitGpu(("g1",)), "b": UnitGpu(("g0",))}
    assert sorted(ray.held) == ["g0", "g1"]


def test_a_unit_of_several_gpus_has_all_that_it_names_in_their_order() -> None:
    ray = MadeUpRay(["g0", "g1", "g2"])
    wishes = {"a": GpuWish(("g2", "g0"), 2), "b": one("g0", "g1")}
    found = all_turns(ray.made(), wishes)
    assert found == {"a": UnitGpu(("g2", "g0")), "b": UnitGpu(("g1",))}


def test_a_unit_that_lacks_one_of_its_gpus_says_which_and_keeps_the_other() -> None:
    ray = MadeUpRay(["g0"])
    gpus, wishes = ray.made(), {"a": GpuWish(("g0", "g1"), 2)}
    assert all_turns(gpus, wishes) == {"a": UnitGpu(why="Ray has not given GPU g1 yet")}
    ray.now += PATIENCE_S
    why = "Ray has given GPU g1 to others, or does not have it"
    assert all_turns(gpus, wishes) == {"a": UnitGpu(why=why)}
    assert ray.held == ["g0"]


def test_a_unit_that_comes_does_not_wait_for_the_pause_of_another_one() -> None:
    ray = MadeUpRay(["g0"])
    gpus = ray.made()
    turns(gpus, "g1")
    ray.now += PATIENCE_S
    turns(gpus, "g1")
    found = all_turns(gpus, {UNIT: one("g1"), "b": one("g0")})
    assert found["b"] == UnitGpu(("g0",))


def test_a_unit_keeps_the_gpu_that_it_has_where_another_one_may_have_that_alone() -> None:
    before = {"a": ("g0",)}
    wishes = {"a": one("g0", "g1"), "b": one("g0")}
    assert assign_gpus(wishes, ["g0", "g1"], before) == {"a": ("g0",), "b": ()}
    assert assign_gpus(wishes, ["g0", "g1"], {}) == {"a": ("g1",), "b": ("g0",)}
