"""A cluster of real engines under a mixed load and faults: is every answer right still?

    python -m bench.chaos [--minutes M] [--seed S] [--units] [--out FILE.json] [--check]

Three instances of the bundled model behind two front ends. Clients stream greedy, seeded, n = 2,
log-probability, stop-string and chat completions with short and long prompts, leave early, read
slowly, or take answers as a whole. Migrations are forced at a steady rate. Meanwhile processes
are killed, stopped and run out of memory, at random and at each state of the handshake; what
llumlets tell each other is cut, late or changed; /dev/shm and the log's disk are full; the wall
clock jumps. The seed draws calls and faults, and every fault is logged with its time. With --units
the instances share KV cache in a unit, and every third fault kills its agent.

Every answer is compared with the one that it must be. A call may fail only where its front
end died. Afterwards nothing may be left. docs/faults.md tells what each figure means.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from bench import report
from bench.chaos.clients import Outcome
from bench.chaos.place import Place
from bench.chaos.plan import plan
from bench.chaos.run import ZERO, Findings, Load, run, summarise
from bench.chaos.unit import TARGETS as OF_UNIT
from bench.chaos.unit import Unit


def samples(found: Findings) -> list[dict[str, Any]]:
    """Every fault, and every call that did not end well."""
    rows = [one.row() for one in found.nemesis.done]
    rows += [_told(one, found) for one in found.ledger.outcomes if one.error or one.verdict.what]
    held = [*found.after.rows, *({"orphan": name} for name in found.after.orphans)]
    return rows + [{"left_over": row} for row in held]


def _told(one: Outcome, found: Findings) -> dict[str, Any]:
    return {
        "call": one.call.kind,
        "manner": one.call.manner,
        "at_s": round(one.at, 2),
        "error": one.error,
        "wrong": one.verdict.what,
        "front_end_died": one.port in found.nemesis.doomed,
        "body": one.call.body,
    }


def fault_rows(found: Findings) -> list[tuple[str, int]]:
    """By kind; those that were never reached aside."""
    return sorted(
        Counter(
            f"{one.fault.kind}{', not reached' if 'not reached' in one.note else ''}"
            for one in found.nemesis.done
        ).items()
    )


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    load = Load(0, 0)
    root.add_argument("--minutes", type=float, help="of load: 10, or 0.5 with --quick")
    root.add_argument("--seed", type=int, default=1, help="draws calls, migrations and faults")
    root.add_argument("--every", type=float, default=6.0, help="seconds from fault to fault")
    root.add_argument("--clients", type=int, default=load.clients, help="calls at a time")
    root.add_argument("--moves", type=float, default=load.moves_per_s, help="migrations a second")
    root.add_argument("--instances", type=int, default=load.instances)
    root.add_argument("--front-ends", type=int, default=load.front_ends)
    root.add_argument("--model", default=load.model, help="count, or device20ms for its pace")
    root.add_argument("--transport", default=load.transport, help="as of kvmig.serve")
    root.add_argument("--units", action="store_true", help="KV cache shared in a unit")
    root.add_argument("--log", type=Path, help="keep what the server printed there")
    options = root.parse_args(argv)
    minutes = options.minutes or (0.5 if options.quick else 10)
    load = Load(
        options.seed, minutes * 60, options.instances, options.front_ends, options.clients,
        options.moves, options.model, options.transport,
    )  # fmt: skip
    with Place() as place:
        unit = Unit(place) if options.units else None
        faults = plan(options.seed, load.seconds, options.every, place.private, options.units)
        flags = [*load.flags, *(unit.flags if unit else ())]
        settings = {
            "minutes": minutes, "seed": load.seed, "every_s": options.every,
            "clients": load.clients, "moves_per_s": load.moves_per_s,
            "flags": [flag.replace(f"{place.folder}/", "") for flag in flags],
            "private_shm_and_log": place.private, "clock": place.faked,
        }  # fmt: skip
        result = report.begin("chaos-units" if unit else "chaos", settings)
        report.say("starting a cluster")
        try:
            found = run(load, faults, place, unit)
        finally:
            if options.log is not None and place.log.exists():
                shutil.copyfile(place.log, options.log)
    result.samples = samples(found)
    result.summary = summarise(found)
    result.targets = {name: {"max": 0} for name in ZERO}
    if unit:
        result.samples += [asdict(one) for one in unit.ends]
        result.samples += [{"at_most": msgspec.to_builtins(one)} for one in unit.at_most]
        result.summary |= unit.figures()
        result.targets |= OF_UNIT
    tables = [report.table("Faults", ("kind", "times"), fault_rows(found))]
    tables.append(report.table("Calls", ("kind", "times"), sorted(found.ledger.kinds.items())))
    return report.finish(result, options, tables)


if __name__ == "__main__":
    sys.exit(main())
