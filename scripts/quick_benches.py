"""Runs the quick mode of every benchmark, one after the other, and says which miss a target.

    python -m scripts.quick_benches --out quick.json                    # on a quiet machine
    python -m scripts.quick_benches --only bench.drain units            # by name, or its last part
    python -m scripts.quick_benches --skip "bench.replace --agents"     # or by the whole command
    python -m scripts.quick_benches --list

Each program of `bench/` runs as `--quick --check` in a process of its own. One that takes four
times as long as it takes on two quiet cores (and five minutes at least) is ended with all that it
has started. Each run is a line, and a row of the file from then on. Exit status: 0: all passed;
1: some missed a target or failed; 2: bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil

from bench import report
from kvmig.core.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
RUNS: Mapping[str, float] = {
    "bench.imports": 5,
    "bench.beat": 2,
    "bench.prefix_cost": 3,
    "bench.scheduler": 60,
    "bench.worker_placement": 30,
    "bench.simulator_speed": 45,
    "bench.transport": 5,
    "bench.gather": 60,
    "bench.idle_sessions": 30,
    "bench.prefixes": 120,
    "bench.prompts": 120,
    "bench.policies": 120,
    "bench.edges": 60,
    "bench.mux": 150,
    "bench.paper": 120,
    "bench.adbs": 90,
    "bench.pools": 60,
    "bench.loop_holds": 90,
    "bench.load": 60,
    "bench.proxy": 90,
    "bench.proxy.handed": 60,
    "bench.proxy.relays": 60,
    "bench.page_watch": 65,
    "bench.front_end_cost": 70,
    "bench.tracing": 90,
    "bench.start": 90,
    "bench.cold": 90,
    "bench.cold --parked": 110,
    "bench.drain": 60,
    "bench.pause": 75,
    "bench.downtime": 110,
    "bench.overhead": 110,
    "bench.faults": 110,
    "bench.real": 90,
    "bench.serving": 60,
    "bench.simulator": 110,
    "bench.prefixes_real": 75,
    "bench.prompts_real": 80,
    "bench.rollout_gap": 60,
    "bench.takeover": 60,
    "bench.rollout_round": 80,
    "bench.scale_down": 120,
    "bench.replace": 120,
    "bench.replace --agents": 210,
    "bench.units --memory": 60,
    "bench.units --shift": 120,
    "bench.units --gate": 120,
    "bench.units --relieve": 120,
    "bench.model_memory": 150,
    "bench.hostile_calls": 150,
    "bench.plugin_pairs": 90,
    "bench.plugin_soak": 75,
    "bench.soak": 90,
    "bench.chaos": 90,
    "bench.chaos --units": 90,
    "bench.ledger": 120,
    "bench.room": 110,
    "bench.fleet_soak": 90,
    "bench.fleet_attack": 110,
    "bench.fleet_chaos": 120,
    "bench.fleet_chaos --nodes=3": 120,
}
"""Seconds that each takes on two quiet cores; those that need the least come first."""
EXCLUDED: Mapping[str, str] = {
    "bench.gpu": "it needs a GPU: `bench/gpu.sh --quick` runs its parts",
}
"""Packages and programs that don't run here, with the reason."""
FACTOR, LEAST_S = 4.0, 300.0
END_S = 20.0
"""For a program to end what it has started, after SIGINT."""
TAIL_LINES = 15
MAIN = re.compile(r'^if __name__ == "__main__":$', re.MULTILINE)
QUICK = re.compile(r"\breport\.parser\(|\bquick\b")
MISSED, LEFT_OUT = "missed: ", "left out: "
"""How `bench.report` begins its lines."""
State = Literal["ok", "missed", "failed"]


@dataclass(frozen=True)
class QuickRun:
    """How one program went. lines: targets that it missed, or the end of what it printed."""

    name: str
    seconds: float
    state: State
    lines: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Targets that need the whole run."""

    def line(self) -> str:
        """For people; the lines below it say why it isn't ok."""
        words = f"{self.name:32} {self.seconds:5.0f} s  {self.state}"
        if self.left_out:
            words += f" ({len(self.left_out)} left out)"
        return "\n".join([words, *(f"    {one}" for one in self.lines)])


def find_programs(bench: Path = ROOT / "bench") -> list[str]:
    """Modules below the folder that are programs with a quick mode."""
    found = []
    for path in sorted(bench.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if MAIN.search(text) and QUICK.search(text):
            parts = path.relative_to(bench.parent).with_suffix("").parts
            found.append(".".join(parts).removesuffix(".__main__"))
    return found


def is_excluded(program: str) -> bool:
    """Whether it, or its package, is."""
    return any(program == one or program.startswith(f"{one}.") for one in EXCLUDED)


def choose(names: Iterable[str], only: Sequence[str], skip: Sequence[str]) -> list[str]:
    """Those of the names that the flags pick. Raises ConfigError."""
    every = list(names)
    wanted = [one for word in only for one in _named(every, "--only", word)] if only else every
    spared = {one for word in skip for one in _named(every, "--skip", word)}
    return [one for one in every if one in wanted and one not in spared]


def _named(names: Sequence[str], flag: str, word: str) -> list[str]:
    found = [one for one in names if word in (one, *_short(one))]
    if not found:
        raise ConfigError(f"{flag} is {word}, must be one of {', '.join(names)}")
    return found


def _short(name: str) -> tuple[str, str]:
    """The program of a command, and without `bench.`."""
    program = name.split()[0]
    return program, program.removeprefix("bench.")


def command_of(name: str) -> list[str]:
    """Of a program's process."""
    return [sys.executable, "-m", *name.split(), "--quick", "--check"]


def most_s(seconds: float, factor: float) -> float:
    """How long a program may take that needs so long on two quiet cores."""
    return max(LEAST_S, factor * seconds)


def run_program(name: str, command: Sequence[str], limit_s: float) -> QuickRun:
    """Run one to its end, or end all of its processes when its time is over."""
    began = time.monotonic()
    # A shell's job in the background ignores SIGINT, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            if process.poll() is None:
                end_whole(process)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    seconds = round(time.monotonic() - began, 1)
    return judge(name, seconds, lines, process.returncode, late)


def judge(name: str, seconds: float, lines: Sequence[str], status: int, late: bool) -> QuickRun:
    """How a program went, by what it printed and its exit status. late: its time was over."""
    missed = [one for one in lines if one.startswith(MISSED)]
    left_out = [
        one.removeprefix(LEFT_OUT).partition(",")[0] for one in lines if one.startswith(LEFT_OUT)
    ]
    if status == 0 and not late:
        return QuickRun(name, seconds, "ok", [], left_out)
    if status == 1 and missed and not late:
        return QuickRun(name, seconds, "missed", missed, left_out)
    why = f"it had not ended after {seconds:g} s" if late else f"exit status {status}"
    return QuickRun(name, seconds, "failed", [*lines[-TAIL_LINES:], why], left_out)


def end_whole(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it has started, also in groups of their own: as Ctrl-C does, and
    by SIGKILL where that takes too long."""
    every = _family(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    every |= _family(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in every:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    until = time.monotonic() + END_S
    while any(map(_runs, every)) and time.monotonic() < until:
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _family(pid: int) -> set[psutil.Process]:
    """All processes that descend from one, now."""
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def keep(out: Path | None, runs: Sequence[QuickRun]) -> None:
    """Write what there is so far, where a file was asked for."""
    if out is None:
        return
    document = {
        "machine": report.machine(),
        "versions": report.versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": [asdict(one) for one in runs],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(out)


def summary_of(runs: Sequence[QuickRun]) -> str:
    """The last lines."""
    states: dict[State, list[str]] = {"ok": [], "missed": [], "failed": []}
    for one in runs:
        states[one.state].append(one.name)
    minutes = sum(one.seconds for one in runs) / 60
    lines = [f"{len(runs)} runs in {minutes:.0f} minutes: {len(states['ok'])} ok"]
    lines += [f"{state}: {', '.join(states[state])}" for state in ("missed", "failed")
              if states[state]]  # fmt: skip
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.quick_benches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="run only these")
    parser.add_argument("--skip", nargs="+", default=(), metavar="NAME", help="leave these out")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the rows there")
    parser.add_argument(
        "--factor", type=float, default=FACTOR, help="times as long (%(default)g)", metavar="N"
    )
    parser.add_argument("--list", action="store_true", help="print what would run, and how long")
    options = parser.parse_args(arguments)
    try:
        names = choose(RUNS, options.only, options.skip)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{name:32} {RUNS[name]:5.0f} s" for name in names))
        print(f"{sum(RUNS[name] for name in names) / 60:.0f} minutes on two quiet cores")
        return 0
    print(f"the machine's load is {os.getloadavg()[0]:.2f}", flush=True)
    runs: list[QuickRun] = []
    for name in names:
        runs.append(run_program(name, command_of(name), most_s(RUNS[name], options.factor)))
        keep(options.out, runs)
        print(runs[-1].line(), flush=True)
    print(summary_of(runs))
    return 0 if all(one.state == "ok" for one in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
