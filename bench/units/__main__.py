"""Several models share the KV cache of one host: who has it, how soon it comes to who wants it.

Real vLLM behind `kvmig.serve --unit`, one process an engine, and the unit's agent.

--memory: the KV cache that all engines have in memory, what an idle engine takes of memory and of
a core, how long a model waits for memory that others have.
--shift: a load whose heavy model changes, beside the same on static thirds.
--gate: throughput of engines that ask before each step, beside those that don't; what an engine
takes of a core while its requests wait for memory.
--relieve: a burst of a model that has lent its memory to another one, which moves requests away for
it, or doesn't.

Without any of them: all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator

from bench import report
from bench.units import gate, memory, relieve, shift
from bench.units.site import MIB

LONG_RUN = ("wait for memory with *", "throughput with the step gate *")
"""The longest wait of a single repeat is chance, and three pairs don't tell a hundredth apart."""


@contextlib.contextmanager
def said(text: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    report.say(f"{text}: {time.monotonic() - began:.0f} s")


def main(argv: list[str] | None = None) -> int:
    root: argparse.ArgumentParser = report.parser(__doc__, LONG_RUN)
    parts = root.add_argument_group("parts")
    parts.add_argument("--memory", action="store_true", help="who has it, how soon it comes")
    parts.add_argument("--shift", action="store_true", help="a load that changes")
    parts.add_argument("--gate", action="store_true", help="what the step gate costs")
    parts.add_argument("--relieve", action="store_true", help="requests that move away for others")
    root.add_argument("--mib", type=int, help="of the arena of --memory: 1024, or 128 with --quick")
    root.add_argument("--memory-model", help="of --memory: llama-1b-kv, or count with --quick")
    root.add_argument("--repeats", type=int, help="of --memory: 3, or 1 with --quick")
    root.add_argument("--phase-s", type=float, help="of --shift: 60, or 16 with --quick")
    root.add_argument("--phases", type=int, help="of --shift: 3, or 2 with --quick")
    root.add_argument("--rounds", type=int, help="of --shift: 2, or 1 with --quick")
    root.add_argument("--shift-mib", type=int, default=16, help="of the arena of --shift")
    root.add_argument("--model", default="device40ms", help="of --shift (bench/models.py)")
    root.add_argument("--bursts", type=int, help="pairs, of --gate: 10, or 3 with --quick")
    root.add_argument("--gate-model", default="device10ms", help="of --gate")
    root.add_argument("--scenes", type=int, help="of --relieve: 6, or 2 with --quick")
    root.add_argument("--relieve-model", default="device20ms", help="of --relieve")
    options = root.parse_args(argv)
    quick = options.quick
    every = not (options.memory or options.shift or options.gate or options.relieve)
    # Else each server has threads for all cores, which wait for the other servers' turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = report.begin("units", {"quick": quick})
    if every or options.memory:
        arena = (options.mib or (128 if quick else 1024)) * MIB
        repeats = options.repeats or (1 if quick else 3)
        model = options.memory_model or ("count" if quick else "llama-1b-kv")
        result.settings |= {"arena_mib": arena / MIB, "repeats": repeats, "memory_model": model}
        with said("memory"):
            figures, samples = memory.memory(arena, repeats, model)
        result.summary |= figures
        result.samples += samples
        result.targets |= memory.TARGETS
    if every or options.shift:
        phase_s = options.phase_s or (16.0 if quick else 60.0)
        phases = options.phases or (2 if quick else 3)
        rounds = options.rounds or (1 if quick else 2)
        result.settings |= {
            "phases": phases, "phase_s": phase_s, "rounds": rounds, "model": options.model,
            "shift_arena_mib": options.shift_mib, "mix": shift.MIX, "sizes": shift.SIZES,
            "full": shift.FULL, "seed": shift.SEED,
        }  # fmt: skip
        with said("shift"):
            figures, samples = shift.shift(
                options.shift_mib * MIB, phases, phase_s, rounds, options.model
            )
        result.summary |= figures
        result.samples += samples
        result.targets |= shift.TARGETS
    if every or options.gate:
        bursts = options.bursts or (3 if quick else 10)
        result.settings |= {"bursts": bursts, "gate_model": options.gate_model}
        with said("gate"):
            figures, samples = gate.gate(bursts, options.gate_model)
        result.summary |= figures
        result.samples += samples
        result.targets |= gate.TARGETS
    if every or options.relieve:
        scenes = options.scenes or (2 if quick else 6)
        result.settings |= {"scenes": scenes, "relieve_model": options.relieve_model}
        with said("relieve"):
            figures, samples = relieve.relieve(scenes, options.relieve_model)
        result.summary |= figures
        result.samples += samples
        result.targets |= relieve.TARGETS
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
