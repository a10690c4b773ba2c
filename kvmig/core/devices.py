"""The GPUs of one host, as a record: what each has, what is used and by whom, what it reaches.

`kvmig.process.nvml.read_devices` makes an `DeviceInventory`; everything else decides on it:

    inventory = read_devices()              # what CUDA_VISIBLE_DEVICES leaves of this host's
    inventory.devices                       # in the order in which CUDA counts them; may be empty
    inventory.missing                       # why there are none, or not all; empty: nothing to say
    one = inventory.device("0")             # by the id that CUDA_VISIBLE_DEVICES gives it
    one.uuid, one.name, one.capability      # "GPU-8f..." or "MIG-1c...", "NVIDIA H100", (9, 0)
    one.total, one.used, one.free           # bytes, as a process sees them that computes there
    one.processes                           # whose the used bytes are, as far as the driver says
    one.used_by_others({4711})              # bytes of all but these processes

Sizes are bytes. `DeviceRecord.id` names a device in CUDA_VISIBLE_DEVICES, `DeviceRecord.uuid` in a
database: an index means another GPU after one was taken out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

GIB = 1 << 30
TAKE_TURNS = "its instances take turns; under MPS (--mps) they don't"
"""What is said of a device that several instances compute on without MPS."""


class DeviceProcess(msgspec.Struct, frozen=True):
    """A process that holds memory of a device."""

    pid: int
    used: int | None = None
    """Bytes; None: the driver doesn't say."""
    name: str = ""
    """The name of its program; empty where the process is not visible, as from a container."""
    computes: bool = True
    """False: it only draws, as a display server does."""

    def __str__(self) -> str:
        size = "an unknown amount" if self.used is None else in_gib(self.used)
        return f"process {self.pid}{f' ({self.name})' if self.name else ''} has {size}"


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or one part of a GPU that is split (MIG)."""

    id: str
    """The name in CUDA_VISIBLE_DEVICES: the index, or the UUID where the user has given that."""
    index: int
    """The index of the GPU on this host, in PCI order."""
    uuid: str
    name: str
    total: int
    """Bytes that processes can have; what the driver keeps for itself isn't counted."""
    used: int = 0
    processes: tuple[DeviceProcess, ...] = ()
    """The processes that the driver names; their sizes may add up to less than `used`."""
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability."""
    parent: str = ""
    """UUID of the GPU that this is a part of; empty: it is a whole one."""
    mps: bool = False
    """Whether processes compute there at the same time (MPS); else they take turns."""
    peers: tuple[str, ...] = ()
    """UUIDs of the devices whose memory it reaches."""
    nvlinks: tuple[str, ...] = ()
    """UUIDs of those that it reaches over NVLink."""
    busy: float | None = None
    """Part of the driver's last sampling period in which it computed, 0 to 1; None: not known."""
    watts: float | None = None
    """Power that it draws; None: not known."""

    @property
    def free(self) -> int:
        """Bytes that no process has."""
        return max(0, self.total - self.used)

    def used_by_others(self, ours: Collection[int] = ()) -> int:
        """Bytes that are not these processes'; bytes without a named process count, too."""
        own = sum(one.used or 0 for one in self.processes if one.pid in ours)
        return max(0, self.used - own)

    def whose(self, ours: Collection[int] = ()) -> str:
        """Say who has its memory, the largest first; empty: no process has any."""
        others = [one for one in self.processes if one.pid not in ours]
        others.sort(key=lambda one: -1 if one.used is None else one.used, reverse=True)
        said = [str(one) for one in others]
        named = sum(one.used or 0 for one in others)
        if (rest := self.used_by_others(ours) - named) >= GIB // 10:
            said.append(f"{in_gib(rest)} are of processes that the driver doesn't name")
        return ", ".join(said)

    def __str__(self) -> str:
        part = f"a part of GPU {self.index}" if self.parent else f"GPU {self.index}"
        return f"{part} ({self.name}, {self.uuid})"


class DeviceInventory(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one host that a process may use."""

    node: str = ""
    """The host's name."""
    devices: tuple[DeviceRecord, ...] = ()
    missing: str = ""
    """The reason why there are no devices, or which are left out; empty: there is none."""

    def device(self, name: str) -> DeviceRecord:
        """The one with that id, UUID or index. Raises KeyError."""
        return find_device(self.devices, name)

    def visible(self, words: str | None) -> DeviceInventory:
        """What CUDA_VISIBLE_DEVICES leaves of a host's devices, in its order; None: all.

        As CUDA has it: indices in PCI order, UUIDs or their unique beginnings; the first word that
        names no device hides those behind it; a device that is named twice leaves none.
        """
        if words is None:
            return self
        chosen: list[DeviceRecord] = []
        missing = self.missing
        for word in map(str.strip, words.split(",")):
            found = _named(self.devices, word)
            if found is None:
                if word and word != "-1":
                    known = ", ".join(one.id for one in self.devices) or "none"
                    missing = (
                        f"CUDA_VISIBLE_DEVICES is {words}: {word} names no device (there are"
                        f" {known}), so it and those behind it are not used"
                    )
                break
            chosen.append(msgspec.structs.replace(found, id=word))
        if len({one.uuid for one in chosen}) < len(chosen):
            return msgspec.structs.replace(
                self, devices=(), missing=f"CUDA_VISIBLE_DEVICES is {words}: names a device twice"
            )
        return msgspec.structs.replace(self, devices=tuple(chosen), missing=missing)


def find_device(devices: Collection[DeviceRecord], name: str) -> DeviceRecord:
    """The one with that id, UUID, or index as nvidia-smi has it. Raises KeyError.

    The parts of a GPU that is split have no index of their own.
    """
    for one in devices:
        if name in (one.id, one.uuid):
            return one
    for one in devices:
        if name == str(one.index) and not one.parent:
            return one
    raise KeyError(name)


def in_gib(size: int) -> str:
    """A size for people who compare it with what nvidia-smi says: 7.81 GiB."""
    return f"{size / GIB:.2f} GiB"


def _named(devices: Sequence[DeviceRecord], word: str) -> DeviceRecord | None:
    if word.isdecimal():
        whole = [one for one in devices if one.index == int(word)]
        return whole[0] if whole else None  # of a GPU that is split CUDA takes the first part
    found = [one for one in devices if word.startswith(("GPU-", "MIG-")) and _is(one, word)]
    return found[0] if len(found) == 1 or (found and found[0].uuid == word) else None


def _is(device: DeviceRecord, word: str) -> bool:
    return device.uuid.startswith(word)
