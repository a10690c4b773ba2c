"""The cluster holds the instances and carries out orders about them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import msgspec

from kvmig.controlplane.front_messages import SessionsCarried
from kvmig.controlplane.messages import (
    AddInstances,
    ClusterMember,
    DrainInstance,
    EvacuateInstance,
    OrderRefused,
    RestartInstances,
    ScaleInstances,
    StopDrain,
)
from kvmig.core.background import cancel_tasks
from kvmig.core.config import ClusterConfig, instance_name
from kvmig.core.errors import ConfigError, StartupError
from kvmig.core.order_fence import NO_TOKEN
from kvmig.core.read_progress import note_path
from kvmig.core.storage_reads import StorageReads, StorageSilent
from kvmig.launcher.instance import DrainDeadline, ManagedInstance
from kvmig.launcher.launch import LlumletLaunch, LlumletLauncher, PlannedInstance
from kvmig.launcher.shapes import InstanceShape, InstanceShapes, check_node
from kvmig.process.child import say
from kvmig.rpc.codec import RefusalCounter

log = logging.getLogger(__name__)


class InstanceManager:
    """The instances of a launcher; make it inside a running event loop. `stop` ends them all.

    on_change: called after every change, with all members. on_evacuate: called when an
    instance's requests shall run again elsewhere.
    """

    def __init__(
        self,
        name: str,
        config: ClusterConfig,
        secret: bytes,
        shapes: InstanceShapes,
        launcher: LlumletLauncher,
        weights_of: Callable[[list[str]], str] = lambda argv: "",
        units: Mapping[str, str] = MappingProxyType({}),
        whose: str = "",
        gpus: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        nodes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """name: of its shared memory.

        weights_of: the identity of what an instance with these flags would load now; empty: it
        isn't known. units: where the first instances are in a placement, by name.
        whose: model and address of its server, for the titles of its processes. gpus: of the first
        instances, by name; the launcher chooses the others'. nodes: the same, of Ray nodes' ids.
        """
        self.whose = whose
        self.preferred_weights = ""
        """Weights that new requests begin under as long as an instance with them has room."""
        self.on_change: list[Callable[[list[ClusterMember]], None]] = []
        self.on_evacuate: list[Callable[[EvacuateInstance], None]] = []
        self.on_carry: Callable[[str, float], Awaitable[SessionsCarried]] | None = None
        """Lets front ends move the idle sessions of an instance, within a time; None: there are no
        front ends yet."""
        self.refusals = RefusalCounter()
        """What the launcher refused, counted over all its sockets."""
        self.guests: list[ClusterMember] = []
        """Instances of other servers that can take requests of this one's."""
        self.unlike: dict[str, str] = {}
        """Servers whose instances can't take requests of this one's, and why."""
        self.scheduler_refusals: dict[str, int] = {}
        """What the scheduler refused, by reason, as it reported last."""
        self._name = name
        self._config = config
        self._secret = secret
        self._shapes = shapes
        self._launcher = launcher
        self._weights_of = weights_of
        self._reads = StorageReads()
        self._units = units
        self._gpus = gpus
        self._nodes = nodes
        self._instances: dict[str, ManagedInstance] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        """Instances that are being ended; their names are still taken."""
        self._rolling: asyncio.Task[None] | None = None
        """A rolling restart."""
        self._rolled: RestartInstances | None = None
        """The order of the last one, apart from who has given it."""
        self._rolled_names: tuple[str, ...] = ()
        self._stopped = False

    async def open(self) -> None:
        """Check whether instances can be started. Raises ConfigError or StartupError."""
        await self._launcher.open()

    async def start(self) -> None:
        """Start the first instances, and wait until they are ready; call `open` before.

        Raises StartupError or ConfigError; `stop` it then, too.
        """
        names = [instance_name(number) for number in range(self._config.instances)]
        shapes = {name: self._shapes.shape_of(name) for name in names}
        for name, shape in shapes.items():
            self._launcher.check_room([self._planned(name, shape)], self._gpus.get(name, ()))
        for name, shape in shapes.items():
            gpus, unit = self._gpus.get(name, ()), self._units.get(name, "")
            self._begin(name, shape, gpus, unit, node=self._nodes.get(name, ""))
        # Whichever fails first: others may need minutes more.
        for starting in asyncio.as_completed([self._instances[one].first_start for one in names]):
            if failed := await starting:
                raise StartupError(failed)

    async def stop(self) -> None:
        """End every instance and free what they held. May be called twice."""
        self._stopped = True
        await cancel_tasks(self._rolling)  # the one that is being drained stays as it is
        closing = [instance.close() for instance in self._instances.values()]
        await asyncio.gather(*closing, *self._leaving.values())
        self._instances.clear()
        await self._launcher.close()

    async def let_read(self, within_s: float, at_once: asyncio.Event) -> None:
        """Wait until other engines have read the blocks that instances keep for them: at most that
        long, and no longer than until `at_once`. Nothing new comes to the instances."""

        async def let_all_read() -> None:
            await asyncio.gather(*(one.let_read(within_s) for one in self._instances.values()))

        reading = asyncio.create_task(let_all_read(), name="readers of all instances")
        signal = asyncio.create_task(at_once.wait())
        try:
            await asyncio.wait((reading, signal), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_tasks(reading, signal)

    def members(self) -> list[ClusterMember]:
        """The instances, in the order in which they came."""
        return [instance.member for instance in self._instances.values()]

    def set_guests(self, guests: list[ClusterMember], unlike: dict[str, str]) -> None:
        """Take the instances of other servers, as their scheduler names them, and the servers that
        have none which could take this one's requests."""
        if (guests, unlike) != (self.guests, self.unlike):
            self.guests, self.unlike = guests, unlike
            self.changed()

    # -- orders

    def add(self, order: AddInstances) -> tuple[str, ...]:
        """Start instances; their names, which nothing else has now. Raises OrderRefused."""
        if order.count < 1:
            raise OrderRefused("invalid", f"count is {order.count}, must be 1 or more")
        unit = self._config.unit
        if order.decode_share and (unit is None or unit.shares is None):
            raise OrderRefused(
                "invalid",
                f"decode_share is {order.decode_share}, must be left out: the server has no"
                " --unit-shares",
            )
        most = self._config.lifecycle.max_instances
        taken = self._instances.keys() | self._leaving.keys()
        free = [name for name in map(instance_name, range(most)) if name not in taken]
        free = free[: order.count]
        if len(free) < order.count:
            raise OrderRefused(
                "conflict",
                f"count is {order.count}: --max-instances allows {most}, and there are"
                f" {len(taken)}, those that failed or are about to end included",
            )
        try:
            self._check_node(order.node, order.gpus)
            shapes = [self._shapes.shape_of(name, order.flags, order.tree) for name in free]
            self._launcher.check_room(
                [
                    self._planned(name, shape, order.unit)
                    for name, shape in zip(free, shapes, strict=True)
                ],
                order.gpus,
            )
        except ConfigError as error:
            raise OrderRefused("invalid", str(error)) from error
        except StartupError as error:
            raise OrderRefused("conflict", str(error)) from error
        for name, shape in zip(free, shapes, strict=True):
            parts = order.decode_share // 10
            instance = self._begin(name, shape, order.gpus, order.unit, parts, order.node)
            instance.first_start.add_done_callback(self._say_failure)
        self.changed()
        return tuple(free)

    def drain(self, order: DrainInstance) -> tuple[str, ...]:
        """Drain or end an instance, or drain all; returns their names. Raises OrderRefused."""
        if not order.instance:
            return self._drain_all(order)
        instance = self._find(order.instance)
        deadline = self._deadline(order)
        if order.leave and instance.state in ("serving", "draining"):
            if not self.others_serve(instance):
                if order.last and not order.now:
                    instance.leave_last()
                    return (instance.name,)
                raise OrderRefused(
                    "conflict", f"instance {instance.name} is the only one that serves"
                )
            if not order.now:
                instance.drain(deadline, leave=True)
                return (instance.name,)
        if order.leave:  # at once: nothing runs there, or it shall go on elsewhere
            self.remove_instance(instance)
        else:
            instance.drain(deadline, leave=False)
        return (instance.name,)

    def stop_drain(self, order: StopDrain) -> tuple[str, ...]:
        """Let a draining one serve again, or all; their names. Raises OrderRefused."""
        if not order.instance:
            return self._stop_all_drains()
        instance = self._find(order.instance)
        instance.stop_drain()
        return (instance.name,)

    def _drain_all(self, order: DrainInstance) -> tuple[str, ...]:
        """Drain all instances of this server, whose requests go to other servers."""
        deadline = self._deadline(order)
        own = [one for one in self._instances.values() if one.state != "failed"]
        if not own:
            raise OrderRefused("conflict", "no instance of this server is left to be drained")
        if starting := [one.name for one in own if one.state == "starting"]:
            raise OrderRefused("conflict", f"instance {starting[0]} is starting, wait for it")
        if not any(one.state == "serving" for one in self.guests):
            others = "".join(f"; {server} can't: {why}" for server, why in self.unlike.items())
            raise OrderRefused(
                "conflict", f"no other server serves that could take this one's requests{others}"
            )
        for one in own:
            one.drain(deadline, leave=order.leave)
        return tuple(one.name for one in own)

    def _stop_all_drains(self) -> tuple[str, ...]:
        """Let all that drain serve again."""
        draining = [one for one in self._instances.values() if one.state == "draining"]
        if not draining:
            raise OrderRefused("conflict", "no instance of this server is draining")
        for one in draining:
            one.stop_drain()
        return tuple(one.name for one in draining)

    def restart(self, order: RestartInstances, coming: str = "") -> tuple[str, ...]:
        """Start some again, each once it is drained, one after the other; their names. Members
        show at once which are to.

        With a tree: as that build of the engine. Stops at the first that doesn't serve again, or
        not as that build. A fleet's server that has got no answer gives the same order again; it is
        carried out once. coming: from `look_at_files`. Raises OrderRefused.
        """
        if names := self._repeated(order):
            return names
        deadline = self._deadline(order)
        wanted = self._serving(order.instances, coming)
        before, later = self._shapes.trees, self._shapes.later
        trees = before
        tree: str | None = None
        if order.tree is not None:
            try:
                tree = self._shapes.tree(order.tree)
            except ConfigError as error:
                raise OrderRefused("invalid", f"vllm is {error}") from error
            trees = before.after(tree, tuple(map(self._config.own_name, order.instances)))
        shapes = self._flagged([one.name for one in wanted], order.flags)
        try:
            self._launcher.renew(trees.usual)
        except StartupError as error:
            raise OrderRefused("conflict", str(error)) from error
        self._shapes.trees = trees
        if order.flags is not None:
            self._shapes.later = order.flags

        async def roll() -> None:
            stopped = await self._roll(wanted, deadline, tree, shapes)
            say(f"rolling restart: {stopped or 'done'}")
            if not stopped:
                return
            for one in wanted:
                one.leave_turn()
            self._shapes.trees, self._shapes.later = before, later
            if trees.usual != before.usual:
                try:
                    self._launcher.renew(before.usual)
                except StartupError as error:  # instances start without it then
                    log.warning("%s", error)

        for one in wanted:
            one.await_turn()
        self._rolling = asyncio.create_task(roll(), name="rolling restart")
        self._rolled = _anonymous(order)
        self._rolled_names = tuple(one.name for one in wanted)
        self.preferred_weights = coming
        self.changed()
        return self._rolled_names

    def _serving(self, names: Sequence[str], coming: str) -> list[ManagedInstance]:
        """The instances of these names, or all that serve, if they can start again one after the
        other. Raises OrderRefused."""
        serving = [one for one in self._instances.values() if one.state == "serving"]
        wanted = [self._find(name) for name in dict.fromkeys(names)] or serving
        if len(serving) < 2:
            raise OrderRefused("conflict", self._few(serving, coming))
        if idle := [one.name for one in wanted if one.state != "serving"]:
            raise OrderRefused("conflict", f"instance {idle[0]} doesn't serve")
        return wanted

    async def look_at_files(self, order: AddInstances | RestartInstances) -> str:
        """Look at what an order needs of users' storage, on which nothing here may wait: the folder
        of the engine, and for a restart the weights. Returns the identity of what an instance would
        load now; empty: it isn't known. Raises OrderRefused where the storage doesn't answer."""
        argv, tree = list(self._shapes.argv), order.tree or ""
        restarts = isinstance(order, RestartInstances)
        if not (restarts or tree):
            return ""
        model = next(iter(argv), "")

        def look() -> str:
            note_path(tree, "vllm")
            with suppress(ConfigError):  # which refuses the order
                self._shapes.tree(tree)
            note_path(model, f"model {model}")
            return self._weights_of(argv) if restarts else ""

        try:
            return await self._reads.read(f"model {model}", tree or model, look)
        except StorageSilent as error:
            raise OrderRefused("conflict", str(error)) from error

    def _repeated(self, order: RestartInstances) -> tuple[str, ...]:
        """The names of those that the same order restarts now; none: no rolling restart is under
        way. Raises OrderRefused where another one is."""
        if self._rolling is None or self._rolling.done():
            return ()
        if order.token != NO_TOKEN and _anonymous(order) == self._rolled:
            return self._rolled_names
        raise OrderRefused("conflict", "a rolling restart is under way")

    def _few(self, serving: Sequence[ManagedInstance], coming: str) -> str:
        """Why this few instances can't start again one after the other."""
        verb = "instance serves" if len(serving) == 1 else "instances serve"
        few = f"{len(serving)} {verb}, must be 2 or more"
        names = [one.name for one in self._instances.values() if one.state == "starting"]
        if names:
            few += f" (starting: {', '.join(names)}; wait for them)"
        return f"{few}{_no_room(serving, coming)}"

    def _flagged(self, names: Sequence[str], flags: str | None) -> Mapping[str, InstanceShape]:
        """What instances are with other flags; none: each is as it was. Raises OrderRefused."""
        if flags is None:
            return {}
        before, self._shapes.later = self._shapes.later, flags
        try:
            shapes = {name: self._shapes.shape_of(name) for name in names}
        except ConfigError as error:
            raise OrderRefused("invalid", str(error)) from error
        finally:
            self._shapes.later = before
        return shapes

    async def _roll(
        self,
        instances: Sequence[ManagedInstance],
        deadline: DrainDeadline,
        tree: str | None,
        shapes: Mapping[str, InstanceShape],
    ) -> str:
        """The place and reason of a stop; empty: it didn't stop."""
        await self._launcher.renewed()  # all serve until then
        for instance in instances:
            if self._instances.get(instance.name) is not instance:
                return f"stopped (instance {instance.name} was taken out)"
            try:
                shape = shapes.get(instance.name)
                own = None if shape is None else shape.own
                renewed = instance.restart(deadline, tree, self._shapes.argv, own)
            except OrderRefused as refused:
                return f"stopped ({refused})"
            if failed := await renewed:  # it may take as long as a drain and a start
                return f"stopped at instance {instance.name} ({failed})"
        return ""

    def scale(self, decision: ScaleInstances) -> None:
        """The scheduler's decision. One that has become impossible is logged."""
        try:
            if decision.add:
                say(f"autoscaling: {decision.add} more")
                self.add(AddInstances(0, decision.add))
            if decision.drain:
                say(f"autoscaling: instance {decision.drain} goes")
                self.drain(DrainInstance(0, decision.drain, leave=True))
        except OrderRefused as refused:
            log.warning("autoscaling: %s", refused)

    # -- what its instances need

    def changed(self) -> None:
        """Report the members to all that listen."""
        if not self._stopped:
            members = self.members()
            for tell in self.on_change:
                tell(members)

    def remove_instance(self, instance: ManagedInstance) -> None:
        """Take an instance out that is empty or dead, and end its process."""
        if self._instances.get(instance.name) is not instance:
            return
        del self._instances[instance.name]
        self.changed()
        say(f"instance {instance.name} is taken out")
        ending = asyncio.create_task(instance.close(), name=f"end of {instance.name}")
        self._leaving[instance.name] = ending
        ending.add_done_callback(lambda _: self._leaving.pop(instance.name))

    def others_serve(self, instance: ManagedInstance) -> bool:
        """Whether there is another one that its requests can go to, here or at another server."""
        return any(one.state == "serving" for one in self.guests) or any(
            one.state == "serving" and one is not instance for one in self._instances.values()
        )

    def evacuate(self, instance: ManagedInstance, *, ends: bool) -> None:
        """Let its requests go on elsewhere: a drain's deadline is over.

        ends: those that no other instance has the weights of end with an error.
        """
        self.tell_evacuation(EvacuateInstance(self._config.public_name(instance.name), ends))

    async def carry_sessions(self, instance: ManagedInstance, within_s: float) -> SessionsCarried:
        """Let its idle sessions go to others; the report."""
        if self.on_carry is None:
            return SessionsCarried()
        return await self.on_carry(self._config.public_name(instance.name), within_s)

    def tell_evacuation(self, order: EvacuateInstance) -> None:
        """Let the requests on an instance, of this server or another one, go on elsewhere."""
        for tell in self.on_evacuate:
            tell(order)

    # -- helpers

    def _say_failure(self, first_start: asyncio.Future[str]) -> None:
        if not first_start.cancelled() and (how := first_start.result()):
            say(f"{how}; it is given up")

    def _check_node(self, node: str, gpus: Sequence[str]) -> None:
        """Raises ConfigError."""
        if gpus and not node and self._config.ray is not None:
            raise ConfigError(f"gpus has {gpus[0]}, must be left out with --ray, or node be given")
        if node and self._config.ray is None:
            raise ConfigError(f"node is {node!r:.100}, must be left out without --ray")
        if node:
            check_node("node", node)

    def _planned(self, name: str, shape: InstanceShape, unit: str = "") -> PlannedInstance:
        return PlannedInstance(name, shape.workers, [*self._shapes.argv, *shape.own], unit)

    def _begin(
        self,
        name: str,
        shape: InstanceShape,
        gpus: tuple[str, ...] = (),
        unit: str = "",
        decode_parts: int = 0,
        node: str = "",
    ) -> ManagedInstance:
        config = self._config
        if config.unit is not None:
            own = config.unit.config_for(name, unit, decode_parts)
            config = msgspec.structs.replace(config, unit=own)
        launch = LlumletLaunch(
            cluster=self._name,
            instance=name,
            secret=self._secret,
            config=config,
            engine_argv=[*self._shapes.argv, *shape.own],
            own_flags=shape.own,
            engine_tree=shape.tree,
            gpus=gpus,
            unit=unit,
            node=node,
            whose=self.whose,
        )
        instance = ManagedInstance(launch, shape.workers, self._launcher, self)
        self._instances[name] = instance
        return instance

    def _deadline(self, order: DrainInstance | RestartInstances) -> DrainDeadline:
        usual = self._config.lifecycle.drain_deadline_s
        deadline_s = usual if order.deadline_s is None else order.deadline_s
        if deadline_s < 0:
            raise OrderRefused("invalid", f"deadline_s is {deadline_s:g}, must be 0 or more")
        return DrainDeadline(deadline_s, ends=order.deadline_s is not None)

    def _find(self, public: str) -> ManagedInstance:
        name = self._config.own_name(public)
        if name in self._instances:
            return self._instances[name]
        if guest := next((one for one in self.guests if one.instance == public), None):
            raise OrderRefused(
                "conflict", f"instance {public} is of {guest.server}: order it there"
            )
        known = ", ".join(map(self._config.public_name, self._instances))
        raise OrderRefused("unknown", f"there is no instance {public}, only {known}")

    def public_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """What front ends call these instances."""
        return tuple(map(self._config.public_name, names))


def _anonymous(order: RestartInstances) -> RestartInstances:
    """What is ordered."""
    return msgspec.structs.replace(order, call_id=0, token=NO_TOKEN)


def _no_room(serving: Sequence[ManagedInstance], coming: str) -> str:
    """What to say besides where the only one that serves would come back with other weights."""
    for one in serving:
        if coming and one.weights and coming != one.weights:
            return (
                f": instance {one.name} runs weights {one.weights}, those on disk are {coming}, and"
                " there is no room for both; add an instance first (POST /kvmig/v1/instances)"
            )
    return ""
