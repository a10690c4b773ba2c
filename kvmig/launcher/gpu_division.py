"""Which GPUs each instance gets, and how many bytes of each: decided before anything loads.

    division = divide(devices, workers={"i0": 1, "i1": 1})     # both on one GPU: half of it each
    division.place("i0").gpus, division.place("i0").size       # ("0",), bytes of each
    check(division, needs)                                     # raises NoRoom, which names bytes
    flags(division.place("i0"), ...)                           # what vLLM is started with

vLLM by itself takes 0.92 of a GPU, refuses to start where less is free, and counts what others
take or give back while it measures as its own. So each instance gets a size. The first of a kind
measures what it needs without its KV cache, alone; all later ones get their KV cache in bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from kvmig.core.devices import GIB, TAKE_TURNS, DeviceRecord, in_gib
from kvmig.core.errors import StartupError

OUTSIDE = GIB
"""Bytes of a GPU that a worker needs and its engine does not count: CUDA's contexts, also
kvmig's own, and buffers of migrations."""
NOBODYS = 0.02
"""Part of a GPU that is given to no instance: the driver's own needs grow with what runs there."""
USUAL_SHARE = 0.92
"""vLLM's default of --gpu-memory-utilization: one that is alone on a GPU takes no more."""
LEAST_SHARE = "0.01"
"""vLLM starts only where this part of a GPU is free. Where its cache's size is given, it means
nothing else."""
KV_LEAST = 256 << 20
"""Bytes of KV cache below which an instance isn't worth its start."""
SHARE_FLAG, SIZE_FLAG = "--gpu-memory-utilization", "--kv-cache-memory-bytes"


class NoRoom(StartupError):
    """An instance fits on no GPU."""


class GpuPlace(msgspec.Struct, frozen=True):
    """An instance's part of the host's GPUs."""

    gpus: tuple[str, ...] = ()
    """Ids, one for each worker; none: it runs on a CPU."""
    size: int = 0
    """Bytes of each that it may have in all; 0: they are not divided."""


class GpuNeed(msgspec.Struct, frozen=True):
    """What each worker of an instance needs of its GPU, as far as it is known."""

    weights: int = 0
    """Bytes; 0: not known."""
    measured: int = 0
    """Bytes of all but the KV cache, as the engine of the first such instance has measured; 0: none
    has."""
    asked: int = 0
    """Bytes that the user's own flags give it; 0: they give none."""
    part: float = 0.0
    """Part of a GPU that the user's own flags give it, instead of bytes; 0: they give none."""

    def on(self, total: int) -> GpuNeed:
        """The same of a GPU of this size. total: bytes."""
        if not self.part:
            return self
        return msgspec.structs.replace(self, asked=int(self.part * total), part=0.0)

    @property
    def least(self) -> int:
        """Bytes without which an instance can't serve."""
        return OUTSIDE + (self.asked or (self.measured or self.weights) + KV_LEAST)

    def __str__(self) -> str:
        if self.asked:
            return (
                f"{in_bytes(self.least)}: {in_gib(self.asked)} by its flags, {in_gib(OUTSIDE)} for"
                " CUDA"
            )
        content = "weights and working memory" if self.measured else "weights"
        return (
            f"{in_bytes(self.least)}: {in_gib(self.measured or self.weights)} of {content},"
            f" {in_gib(OUTSIDE)} for CUDA, at least {in_gib(KV_LEAST)} of KV cache"
        )


class GpuDivision:
    """The planned instances' places. Others may come on what is left."""

    def __init__(
        self,
        devices: Sequence[DeviceRecord],
        budget: Mapping[str, int],
        places: Mapping[str, GpuPlace],
        each: int = 0,
    ) -> None:
        """budget: bytes of each device, by its id, for all instances; places: by instance. each:
        bytes of each of its GPUs that an instance has; 0: what the others leave."""
        self.each = each
        self.devices = {one.id: one for one in devices}
        self.budget = dict(budget)
        self.places = dict(places)

    def place(self, name: str) -> GpuPlace:
        """Return an instance's part; one that was not planned has none."""
        return self.places.get(name, GpuPlace())

    def left(self, gpu: str) -> int:
        """Bytes of a device that no instance has."""
        return self.budget[gpu] - sum(one.size for one in self.places.values() if gpu in one.gpus)

    def having(self, gpu: str) -> list[str]:
        """Instances that have a part of it."""
        return sorted(name for name, one in self.places.items() if gpu in one.gpus)

    def add(self, name: str, workers: int, given: Sequence[str] = ()) -> GpuPlace:
        """A place on what is left, for an instance that wasn't planned. given: its GPUs."""
        chosen = tuple(given) or _choose(
            list(self.devices.values()),
            workers,
            {gpu: self.left(gpu) for gpu in self.devices},
            Counter(gpu for place in self.places.values() for gpu in place.gpus),
        )
        size = min((_at_most(self.devices[gpu], self.left(gpu)) for gpu in chosen), default=0)
        self.places[name] = place = GpuPlace(chosen, self.each or max(0, size))
        return place

    def resize(self, name: str, size: int) -> None:
        """Set the bytes of each of its GPUs that an instance has."""
        self.places[name] = msgspec.structs.replace(self.places[name], size=size)

    def remove(self, name: str) -> None:
        """Free the part of an instance."""
        self.places.pop(name, None)

    def lines(self) -> list[str]:
        """Describe who gets what: one line for each device in use."""
        said = []
        for gpu, device in self.devices.items():
            if names := self.having(gpu):
                sizes = {self.places[name].size for name in names}
                size = " or ".join(in_gib(one) for one in sorted(sizes) if one)
                each = f", {size} each" if size and len(names) > 1 else f", {size}" if size else ""
                whose = device.whose()
                used = f"; {in_gib(device.used)} are in use: {whose}" if whose else ""
                said.append(f"{device}: {', '.join(names)}{each} of {in_gib(device.total)}{used}")
                if len(names) > 1 and not device.mps:
                    said.append(f"{device}: {TAKE_TURNS}")
        return said


def divide(
    devices: Sequence[DeviceRecord],
    workers: Mapping[str, int],
    most: int = 0,
    given: Mapping[str, Sequence[str]] | None = None,
    each: int = 0,
) -> GpuDivision:
    """Give each instance a GPU for each of its workers, and divide what is free of them.

    workers: of each planned instance. most: bytes of each GPU that all may have together; 0: what
    is free. given: GPUs of some instances; the others get those where they'd have most, and that
    reach each other. each: bytes of each of its GPUs that an instance has; 0: an equal part. Raises
    NoRoom where an instance has more workers than there are GPUs.
    """
    budget = {one.id: _budget(one, most) for one in devices}
    taken: Counter[str] = Counter()
    chosen: dict[str, tuple[str, ...]] = {}
    for name, count in workers.items():
        own = tuple((given or {}).get(name, ()))
        chosen[name] = own or _choose(devices, count, budget, taken)
        taken.update(chosen[name])
    by_id = {one.id: one for one in devices}
    places = {
        name: GpuPlace(
            gpus,
            each
            or min((_at_most(by_id[gpu], budget[gpu] // taken[gpu]) for gpu in gpus), default=0),
        )
        for name, gpus in chosen.items()
    }
    return GpuDivision(devices, budget, places, each)


def check(division: GpuDivision, needs: Mapping[str, GpuNeed]) -> None:
    """Raise NoRoom for the first of these instances that can't serve on what it gets."""
    for name, given in needs.items():
        place = division.place(name)
        for gpu in place.gpus:
            need = given.on(division.devices[gpu].total)
            free, least = place.size, need.least
            if need.asked:  # the user may leave nothing for others
                free, least = division.devices[gpu].free // len(division.having(gpu)), need.asked
            if free < least:
                raise NoRoom(refusal(division, name, gpu, need, free))


def need_by_flags(
    words: Sequence[str], share: float, kv_bytes: int | None, need: GpuNeed
) -> GpuNeed:
    """What an instance needs: by the user's own flags where they set it, else as it is known.

    words: all its flags; share, kv_bytes: their values, or the engine's defaults.
    """
    if kv_bytes is not None:
        return GpuNeed(need.weights, asked=need.weights + kv_bytes)
    if SHARE_FLAG in _names(words):
        return GpuNeed(need.weights, part=share)
    return need


def refusal(division: GpuDivision, name: str, gpu: str, need: GpuNeed, free: int) -> str:
    """Describe in bytes why an instance doesn't fit, and who has the rest. free: for it."""
    device = division.devices[gpu]
    has = [f"{one} has {in_gib(division.places[one].size)}"
           for one in division.having(gpu) if one != name]  # fmt: skip
    whose = device.whose()
    if whose:
        has.append(whose)
    if (held := device.free - division.budget[gpu]) > device.total * NOBODYS + GIB:
        has.append(f"{in_gib(held)} are kept from this server")
    rest = f"; {', '.join(has)}" if has else ""
    return (
        f"instance {name} doesn't fit on {device}: it needs {need}; of {in_gib(device.total)}"
        f" {in_bytes(max(0, free))} are free for it{rest}"
    )


def flags(
    place: GpuPlace, total: int, words: Sequence[str], need: GpuNeed, arena: int = 0
) -> list[str]:
    """What vLLM is started with to keep to its place; the user's own flags stay as they are.

    total: bytes of its smallest device. words: the user's flags. arena: KV cache that it shares
    with others of a unit, which is no part of its own; 0: it shares none.
    """
    given = _names(words)
    share = [] if SHARE_FLAG in given else [SHARE_FLAG, LEAST_SHARE]
    if SIZE_FLAG in given:
        return share
    if arena:
        return [*share, SIZE_FLAG, str(arena)]
    if SHARE_FLAG in given or not place.size:
        return []
    if need.measured:
        return [*share, SIZE_FLAG, str(max(0, place.size - OUTSIDE - need.measured))]
    own = share_of(place, total)
    return [] if own == USUAL_SHARE else [SHARE_FLAG, f"{own:.4f}"]


def share_of(place: GpuPlace, total: int) -> float:
    """The part of a device that an engine may take that measures by itself, rounded down."""
    return max(0.0001, math.floor((place.size - OUTSIDE) / total * 10_000) / 10_000)


def measured(place: GpuPlace, total: int, kv_bytes: int) -> int:
    """Bytes of all but the KV cache, of an engine that has measured `kv_bytes` for it."""
    return max(0, int(share_of(place, total) * total) - kv_bytes)


def measures(words: Sequence[str]) -> bool:
    """Whether an engine with these flags measures how much KV cache it can have."""
    return SIZE_FLAG not in _names(words)


def no_gpu_for(each: int, node: str) -> str:
    """Why an instance can't have bytes of a GPU on a host without any that it can measure."""
    return (
        f"--instance-gpu-memory is {each}, must be left out: NVML shows no GPU on {node} that the"
        " instance may use"
    )


def sized(words: Sequence[str]) -> bool:
    """Whether the user's own flags set how much memory an engine takes."""
    return bool({SHARE_FLAG, SIZE_FLAG} & _names(words))


def _names(words: Sequence[str]) -> set[str]:
    """Flags among a command's words, as users may write them."""
    return {word.split("=")[0].replace("_", "-") for word in words}


def _budget(device: DeviceRecord, most: int) -> int:
    free = max(0, device.free - int(device.total * NOBODYS))
    return min(free, most) if most else free


def _at_most(device: DeviceRecord, size: int) -> int:
    """No more than an instance that is alone there would take by itself."""
    return min(size, math.ceil(device.total * USUAL_SHARE) + OUTSIDE)


def _choose(
    devices: Sequence[DeviceRecord],
    workers: int,
    budget: Mapping[str, int],
    taken: Mapping[str, int],
) -> tuple[str, ...]:
    """A device for each worker: where an instance gets most, then those that reach the others."""
    if not devices:
        return ()
    if workers > len(devices):
        raise NoRoom(
            f"--tensor-parallel-size is {workers}, must be at most {len(devices)}, the number of"
            f" GPUs here ({', '.join(one.id for one in devices)})"
        )
    chosen: list[DeviceRecord] = []
    while len(chosen) < workers:
        left = [one for one in devices if one not in chosen]

        def worth(one: DeviceRecord) -> tuple[int, int, int]:
            links = sum(other.uuid in one.nvlinks for other in chosen)
            peers = sum(other.uuid in one.peers for other in chosen)
            return budget[one.id] // (taken.get(one.id, 0) + 1), links, peers

        chosen.append(max(left, key=worth))  # the first of equals
    return tuple(one.id for one in chosen)


def in_bytes(size: int) -> str:
    """A size to the byte, and as nvidia-smi has it."""
    return f"{size} bytes ({in_gib(size)})"
