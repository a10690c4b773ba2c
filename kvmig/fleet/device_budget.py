"""The GPUs of this host for the fleet: what each model claims of them, and what is known of that.

It has no GPU where the host has none; models then only need the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvmig.core.errors import ConfigError
from kvmig.core.model_sizes import ModelSizes
from kvmig.fleet import device_room
from kvmig.fleet.device_claims import REST, DeviceClaim, KnownSizes, claim_of, need_of
from kvmig.fleet.device_room import DeviceNeed, Strategy
from kvmig.fleet.device_sizes import RememberedSizes, sizes_key
from kvmig.fleet.device_watch import DeviceWatch
from kvmig.fleet.memory_figures import ASSUMED, MeasuredRest, MemoryFigures, MemoryShape
from kvmig.fleet.model_folders import ModelFolders
from kvmig.fleet.model_shapes import heads_of, shape_of, weight_files
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.tensor_parallel import candidates, is_open, sized, split


class DeviceBudget:
    """Claims of models on the GPUs that are watched."""

    def __init__(
        self,
        watch: DeviceWatch | None = None,
        strategy: Strategy = "spread",
        uses: Callable[[ModelSpec], bool] = lambda spec: True,
        folders: ModelFolders | None = None,
    ) -> None:
        """watch: None: there are no GPUs. uses: whether instances of a model use GPUs where there
        are some. folders: what models' files say; None: they are read when they are needed."""
        self.watch = watch or DeviceWatch()
        self.strategy = strategy
        self._uses = uses
        self.folders = folders or ModelFolders()
        self._sizes: dict[str, ModelSizes] = {}
        self._measured: dict[str, int] = {}
        self.figures = MemoryFigures()
        """What instances were measured to take apart from weights and KV cache."""

    @property
    def there(self) -> bool:
        """Whether there are GPUs."""
        return bool(self.watch.inventory.devices)

    def recall(self, known: RememberedSizes) -> None:
        """Take what an earlier server knew."""
        if known.sizes is not None:
            self._sizes[known.started_as] = known.sizes
        self._measured[known.started_as] = known.measured

    def to_remember(self, spec: ModelSpec) -> RememberedSizes:
        """What the next server is to know of a model."""
        return RememberedSizes(sizes_key(spec), self.sizes(spec), self.measured(spec))

    def learn(self, spec: ModelSpec, sizes: ModelSizes) -> None:
        """Take what the model's engine says of it."""
        self._sizes[sizes_key(spec)] = sizes

    def sizes(self, spec: ModelSpec) -> ModelSizes | None:
        """What its engine has said; None: it wasn't asked. Where the fleet chooses the number of
        GPUs, the engine was asked for one."""
        found = self._sizes.get(sizes_key(spec))
        if found is None and is_open(spec) and spec.workers > 1:
            of_one = self._sizes.get(sizes_key(sized(spec, 0)))
            return None if of_one is None else split(of_one, spec.workers)
        return found

    def open_sizes(self, spec: ModelSpec, groups: Iterable[Sequence[str]]) -> tuple[int, ...]:
        """The numbers of GPUs that an instance may have where the fleet chooses, the preferred one
        first. groups: the GPUs, in each of which all reach each other."""
        allowed = set(self.named(spec.gpus))
        there = (sum(not allowed or one in allowed for one in group) for group in groups)
        return candidates(max(there, default=1), heads_of(self.folders.facts_of(spec)))

    def measure(self, spec: ModelSpec, used: int, at: float) -> bool:
        """Take what an instance uses of a GPU; whether that is more than was known. at: Unix
        time."""
        key = sizes_key(spec)
        if used <= self._measured.get(key, 0):
            return False
        self._measured[key] = used
        claim = claim_of(spec, KnownSizes(sizes=self._sizes.get(key)), self._largest)
        if claim is not None and claim.basis == "flags" and claim.kv and claim.weights:
            rest = max(0, used - claim.weights - claim.kv)
            shape = self._shape(spec, claim.weights)
            self.figures.learn(MeasuredRest(shape=shape, rest=rest, model=spec.name, at=at))
        return True

    def measure_in_unit(self, spec: ModelSpec, used: int, at: float) -> bool:
        """Take what an instance uses of a GPU besides its unit's KV cache; whether that is more
        than was known. at: Unix time."""
        claim = self.claim(spec)
        if claim is None or not claim.weights:
            return False
        shape, rest = self._shape(spec, claim.weights), max(0, used - claim.weights)
        return self.figures.learn(MeasuredRest(shape=shape, rest=rest, model=spec.name, at=at))

    def measured(self, spec: ModelSpec) -> int:
        """Bytes of each GPU that an instance used at most; 0: none has run."""
        return self._measured.get(sizes_key(spec), 0)

    def known(self, spec: ModelSpec) -> KnownSizes:
        """Collect what is known of a model beyond its specification."""
        files, sizes = weight_files(spec, self.folders.facts_of(spec)), self.sizes(spec)
        weights = files // spec.workers if sizes is None else sizes.weights
        found = self.figures.nearest(self._shape(spec, weights)) if self.there else None
        return KnownSizes(
            files,
            sizes,
            REST if found is None else found.rest,
            self.measured(spec),
            ASSUMED if found is None else found.basis,
        )

    def claim(self, spec: ModelSpec) -> DeviceClaim | None:
        """What an instance claims of each of its GPUs; None: it uses none."""
        if not self.there or not self._uses(spec):
            return None
        return claim_of(spec, self.known(spec), self._largest)

    def parked(self, spec: ModelSpec) -> int:
        """Bytes of each of its GPUs that a parked instance has."""
        claim = self.claim(spec)
        return 0 if claim is None else claim.parked

    def need(self, spec: ModelSpec) -> DeviceNeed | None:
        """What an instance wants of GPUs; a GPU that isn't there stays in it by its name."""
        need = need_of(spec, self.claim(spec))
        if need is None:
            return None
        return replace(need, only=frozenset(map(self._uuid, need.only)))

    def ids(self, uuids: tuple[str, ...]) -> tuple[str, ...]:
        """Translate UUIDs into the launcher's ids; none where Ray chooses the GPUs."""
        if self.watch.elsewhere:
            return ()
        return tuple(self.watch.inventory.device(one).id for one in uuids)

    def uuids(self, ids: tuple[str, ...]) -> tuple[str, ...]:
        """Translate the launcher's ids into UUIDs; those that aren't there are left out."""
        known = {one.id: one.uuid for one in self.watch.inventory.devices}
        return tuple(known[one] for one in ids if one in known)

    def named(self, gpus: tuple[str, ...]) -> tuple[str, ...]:
        """UUIDs of GPUs that people name; a GPU that isn't there stays as it is."""
        return tuple(map(self._uuid, gpus))

    def check(self, spec: ModelSpec) -> None:
        """Raises ConfigError for a model that can never start on the GPUs here."""
        where, inventory = f"model {spec.name}", self.watch.inventory
        if not self.there:
            for field in ("gpus", "gpus_per_instance", "gpu_memory", "unit"):
                if field == "unit" and self.watch.elsewhere:  # workers' CPUs have units
                    continue
                if value := getattr(spec, field):
                    why = inventory.missing or "this host has none that the fleet may use"
                    raise ConfigError(
                        f"{where}: {field} is {value!r:.100}, must be left out: there is no GPU"
                        f" ({why})"
                    )
            return
        for one in spec.gpus:
            if self._uuid(one) == one and one not in {gpu.uuid for gpu in inventory.devices}:
                there = ", ".join(f"{gpu.id} ({gpu.uuid})" for gpu in inventory.devices)
                raise ConfigError(f"{where}: gpus has {one!r:.100}, must be some of {there}")
        if spec.instances.target_kind == "freeness":
            raise ConfigError(
                f"{where}: instances.target_kind is 'freeness', must be concurrency or rps on a"
                " host with GPUs, where the fleet gives each instance its own"
            )
        tried = [spec]
        if is_open(spec):
            groups = device_room.groups_of(self.watch.memory({}, {}))
            tried = [sized(spec, gpus) for gpus in self.open_sizes(spec, groups)]
        wrong = [self._too_large(where, one) for one in tried]
        if all(wrong):
            raise ConfigError(wrong[-1])

    def _too_large(self, where: str, spec: ModelSpec) -> str:
        """Why its first instances would have no room on empty GPUs; empty: they would."""
        if (need := self.need(spec)) is None:
            return ""
        devices = self.watch.memory({}, {})
        if wrong := device_room.too_large(where, need, devices):
            return wrong
        groups, empty = device_room.groups_of(devices), {one.id: one.total for one in devices}
        least = max(1, spec.least)
        if (most := device_room.most_instances(empty, need, groups, least)) >= least:
            return ""
        return (
            f"{where}: instances.min is {least}, must be at most {most}: an instance needs"
            f" {device_room.wanted(need)}"
        )

    @property
    def device(self) -> str:
        """The kind of GPU that instances run on; cpu where there is none."""
        return next((one.name for one in self.watch.inventory.devices), "cpu")

    def _shape(self, spec: ModelSpec, weights: int) -> MemoryShape:
        facts = self.folders.facts_of(spec)
        return shape_of(spec, facts, self.device, "gpu", weights, self.sizes(spec))

    @property
    def _largest(self) -> int:
        return max((one.total for one in self.watch.inventory.devices), default=0)

    def _uuid(self, name: str) -> str:
        """The UUID of the GPU with this name; where there is none, the name as it is."""
        try:
            return self.watch.inventory.device(name).uuid
        except KeyError:
            return name
