"""What decisions about places cost: processor time on up to 1,000 workers, and memory of reasons.

Workers of three kinds (eight GPUs, four smaller ones in pairs, none) hold the instances of 200
models up to a part of their memory. Each decision is one call of `kvmig.fleet.capacity.plan` as a
fleet's server makes it in a round, with all residents, all filters, scores and the reasons of every
worker: one model that starts on one GPU or on several, spread or packed, by labels; one that has no
room, so that idle models end for it, or instances of busy ones move; and one that nothing helps.
Also 200 models that all wait at once. A figure is the best of some calls, so that other load hardly
matters; each is among the samples. Starts no engine.
"""

from __future__ import annotations

import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench import report
from kvmig.fleet.capacity import ResidentModel, WaitingModel, plan
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed, Strategy
from kvmig.fleet.place_choice import choose_places, explain
from kvmig.fleet.place_history import PlaceHistory
from kvmig.fleet.room_moves import MovableInstance
from kvmig.fleet.worker_nodes import (
    InstanceNeed,
    InstancePlace,
    NodeInstance,
    WorkerNode,
    room_now,
)

GIB = 1 << 30
MIB = 1 << 20
MODELS = 200
FILLED = 0.7
"""Part of the GPUs' memory that instances have."""
MOST_MS = 20.0
NOW = 1000.0


@dataclass
class Site:
    """Workers, and the models that are on them."""

    nodes: list[WorkerNode]
    residents: list[ResidentModel]


def devices_of(name: str, kind: int) -> list[DeviceMemory]:
    """The GPUs of a worker: eight that all reach each other, four in pairs, or none."""
    count, size = ((8, 80), (4, 24), (0, 0))[kind]
    ids = [f"GPU-{name}-{at}" for at in range(count)]
    return [
        DeviceMemory(
            one,
            f"GPU {at} ({one})",
            size * GIB,
            peers=frozenset(ids if count == 8 else ids[at // 2 * 2 : at // 2 * 2 + 2]),
        )
        for at, one in enumerate(ids)
    ]


def make_site(workers: int, models: int, seed: int) -> Site:
    """Fill workers with instances of 1 GPU each, 6 to 30 GiB."""
    chance = random.Random(seed)
    each = [chance.randrange(6, 31) * GIB for _ in range(models)]
    held: list[dict[str, int]] = [{} for _ in range(models)]
    memory: list[dict[str, int]] = [{} for _ in range(models)]
    nodes = []
    for number in range(workers):
        name = f"w{number:04}"
        devices, there = [], []
        for device in devices_of(name, number % 3):
            claims: dict[str, int] = {}
            while sum(claims.values()) < FILLED * device.total:
                model = chance.randrange(models)
                if each[model] > device.total - sum(claims.values()):
                    break
                claims[f"m{model}"] = claims.get(f"m{model}", 0) + each[model]
                held[model][device.id] = held[model].get(device.id, 0) + each[model]
                memory[model][name] = memory[model].get(name, 0) + 2 * GIB
                there.append(NodeInstance(f"m{model}", (device.id,)))
            devices.append(replace(device, claims=claims))
        labels = {"zone": "abc"[number % 3], "rack": str(number // 20)}
        files = frozenset(f"hf:org/m{chance.randrange(models)}" for _ in range(5))
        nodes.append(
            WorkerNode(
                name, 512 * GIB, 500 * GIB, tuple(devices), labels,
                cordoned=chance.random() < 0.02, files=files, instances=tuple(there),
            )
        )  # fmt: skip
    residents = [
        ResidentModel(
            f"m{at}", sum(memory[at].values()), since=0, stay_s=10, idle_s=float(at),
            priority=at % 3, kept=at % 2 == 0, held=held[at], on=memory[at],
        )
        for at in range(models)
        if held[at]
    ]  # fmt: skip
    return Site(nodes, residents)


def one_more(each_gib: int, devices: int = 1, **more: object) -> WaitingModel:
    """A model that starts."""
    made = WaitingModel("new", 2 * GIB, 900.0, DeviceNeed(each_gib * GIB, devices))
    return replace(made, source="hf:org/m7", **more)  # type: ignore[arg-type]


CASES: dict[str, tuple[list[WaitingModel], Strategy]] = {
    "one_gpu": ([one_more(16)], "spread"),
    "one_gpu_pack": ([one_more(16)], "pack"),
    "four_gpus": ([one_more(8, 4)], "spread"),
    "labels": ([one_more(16, selector={"zone": "a"})], "spread"),
    "each_of_four_instances": ([one_more(16, claim=8 * GIB, instances=4)], "spread"),
    "idle_ones_end": ([one_more(78)], "spread"),
    "no_room": ([one_more(79, 8)], "spread"),
    "none_takes_it": ([one_more(16, selector={"zone": "nowhere"})], "spread"),
}


def movable_on(site: Site) -> list[MovableInstance]:
    """All instances, with some live requests."""
    found = []
    for node in site.nodes:
        sizes = {one.id: one.claims for one in node.devices}
        for at, one in enumerate(node.instances):
            each = sizes[one.gpus[0]][one.model]
            need = InstanceNeed(one.model, 2 * GIB, (DeviceNeed(each),))
            place = InstancePlace(node.name, one.gpus, each)
            found.append(MovableInstance(f"i{at}", place, need, 30.0, each // 2, each // 20))
    return found


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of processor time of each call."""
    found = []
    for _ in range(times):
        gc.collect()
        start = time.process_time()
        call()
        found.append((time.process_time() - start) * 1e3)
    return found


def measure_site(workers: int, times: int, seed: int) -> dict[str, list[float]]:
    """Milliseconds of each kind of decision."""
    site = make_site(workers, MODELS, seed)
    found = {}
    for name, (waiting, strategy) in CASES.items():
        found[name] = timed(
            lambda: plan(site.nodes, waiting, site.residents, NOW, strategy),  # noqa: B023
            times,
        )
        instances = sum(one.instances for one in waiting)
        found[name] = [one / instances for one in found[name]]
    busy = [replace(one, kept=True) for one in site.residents]
    large = [one_more(70, patience_s=600.0)]
    movable = movable_on(site)
    if not plan(site.nodes, large, busy, NOW, "spread", movable).moves:
        raise RuntimeError("no move makes room")
    found["instances_move"] = timed(
        lambda: plan(site.nodes, large, busy, NOW, "spread", movable), times
    )
    crowd = [
        replace(one_more(40 + at % 40), name=f"new{at}", since=900.0 + at) for at in range(MODELS)
    ]
    whole = timed(lambda: plan(site.nodes, crowd, site.residents, NOW), max(1, times // 5))
    found["each_of_200_at_once"] = [one / MODELS for one in whole]
    return found


def history_mib(workers: int, decisions: int, seed: int) -> tuple[float, int]:
    """Memory of the reasons that are kept of so many decisions, and their rows."""
    nodes = make_site(workers, MODELS, seed).nodes
    rooms = {one.name: room_now(one, one.available) for one in nodes}
    history = PlaceHistory()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for at in range(decisions):
            need = InstanceNeed(f"m{at % MODELS}", 2 * GIB, (DeviceNeed(40 * GIB, 1 + at % 4),))
            place = (choose_places(rooms, need, 1) or (None,))[0]
            history.keep("deployment", f"i{at}", float(at), explain(rooms, need, place=place))
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / MIB, history.rows
    finally:
        tracemalloc.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 when --check finds a target missed."""
    options = report.parser(__doc__).parse_args(argv)
    sizes, times, decisions = ((1000,), 5, 120) if options.quick else ((10, 100, 1000), 25, 400)
    settings = {"models": MODELS, "workers": list(sizes), "times": times, "filled": FILLED}
    result = report.begin("worker_placement", settings)
    for workers in sizes:
        for name, spent in measure_site(workers, times, seed=workers).items():
            result.samples.append({"workers": workers, "decision": name, "cpu_ms": spent})
            result.summary[f"{name}_{workers}_ms"] = min(spent)
            if workers == sizes[-1]:
                result.targets[f"{name}_{workers}_ms"] = {"max": MOST_MS}
    size, rows = history_mib(sizes[-1], decisions, seed=0)
    result.summary |= {"reasons_mib": size, "reasons_rows": rows}
    result.targets |= {"reasons_mib": {"max": 64.0}}
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
