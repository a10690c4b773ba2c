"""The GPUs of a deployment's instances, and what these take of them. Pure; sizes are bytes.

The fleet chooses them and names them in its orders; an instance that serves reports them. A server
that has just started knows the first instances' from the deployment's record, and the others' once
these serve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvmig.core.api_records import InstanceRow
from kvmig.fleet.device_room import Places

Gpus = tuple[str, ...]


def _as_they_are(gpus: Gpus) -> Gpus:
    return gpus


def _none(row: InstanceRow) -> Gpus:
    return ()


@dataclass(eq=False)
class InstancePlaces:
    """The places of one deployment's instances."""

    by_instance: dict[str, Gpus] = field(default_factory=dict)
    """UUIDs by instances' names; those of instances that are gone may be among them."""
    each: int = 0
    """Bytes that an instance may take of each of its GPUs."""
    parked: int = 0
    """The same while it is parked."""
    uuids: Callable[[Gpus], Gpus] = _as_they_are
    """Makes UUIDs of the names that instances use."""
    actual: Callable[[InstanceRow], Gpus] = _none
    """The UUIDs that Ray has given an instance, which may be others than were chosen."""
    coming: Places = ()
    """Places of instances that are being ordered."""
    measured: dict[str, int] = field(default_factory=dict)
    """Bytes that each instance used at most of any of its GPUs, by names."""

    def gpus_of(self, row: InstanceRow) -> Gpus:
        """GPUs of one instance that the deployment reports."""
        return self.actual(row) or self.by_instance.get(row.id) or self.uuids(row.gpus)

    def size_of(self, name: str) -> int:
        """Bytes that an instance takes of each of its GPUs."""
        return self.measured.get(name) or self.each

    def gpus(self, rows: Sequence[InstanceRow]) -> list[Gpus]:
        """GPUs of each instance, those that are being ordered included."""
        return [gpus for _, gpus in self._places(rows)]

    def held(self, rows: Sequence[InstanceRow], parked: bool = False) -> Counter[str]:
        """Bytes that are taken of each GPU. rows: the instances that the deployment reports."""
        held: Counter[str] = Counter()
        for name, gpus in self._places(rows):
            size = self.parked if parked else self.size_of(name)
            held.update(dict.fromkeys(gpus, size))
        return held

    def more(self, rows: Sequence[InstanceRow]) -> Counter[str]:
        """Bytes that are taken beyond that of each GPU once it isn't parked any more."""
        awake, asleep = self.held(rows), self.held(rows, parked=True)
        return Counter({gpu: max(0, size - asleep[gpu]) for gpu, size in awake.items()})

    def measure(
        self, rows: Sequence[InstanceRow], used_by: Callable[[str, Sequence[int]], int]
    ) -> dict[str, int]:
        """Take what serving instances use; by names, of those of which that is known.

        used_by: bytes of a GPU, by UUID, that a process and those below it have.
        """
        found = {}
        for one in rows:
            if one.state == "serving" and one.pid:
                gpus = self.gpus_of(one)
                used = max((used_by(gpu, [one.pid]) for gpu in gpus), default=0)
                if used:
                    found[one.id] = used
                    self.measured[one.id] = max(used, self.measured.get(one.id, 0))
        return found

    def _places(self, rows: Sequence[InstanceRow]) -> Iterator[tuple[str, Gpus]]:
        known = {one.id: self.gpus_of(one) for one in rows}
        yield from (known or self.by_instance).items()
        yield from (("", gpus) for gpus in self.coming)
