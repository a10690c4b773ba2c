"""What kvmig shows to its users and writes for others, as text: the outputs of `scripts/golden.py`.

Each is the same from any working tree at the same commit. As far as possible it is made from the
objects themselves, without a server that runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from kvmig import __version__

ROOT = Path(__file__).resolve().parent.parent
Files = dict[str, str]
"""Text by the name of its file."""
WIDTH = "100"
ENVIRONMENT = {
    "COLUMNS": WIDTH,
    "TERMINAL_WIDTH": WIDTH,
    "TERM": "dumb",
    "NO_COLOR": "1",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Of all that is started or imported here; `make_environment` sets it."""
COLOURING = ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS")
MOST_S = 3600.0
"""For one command, on a machine that has other work, too."""
TEST_IDS = "tests.txt"
COUNTS = "test_counts.txt"
TEST = r"^ *(?:async )?def test_\w+\("

COMMANDS: Mapping[str, str] = {
    "place": "kvmig.placement",
    "replace": "kvmig.placement.executor",
    "unit": "kvmig.sharing",
    "drift": "kvmig_tools.drift",
    "check": "kvmig_tools.check",
    "demo": "kvmig_tools.demo",
    "draw-handshake": "kvmig_tools.draw_handshake",
    "profile": "kvmig_tools.profile",
    "simulate": "kvmig_tools.simulate",
}
"""Modules that people start, besides `kvmig`, `kvmig.serve` and those that load torch first."""
SIMULATED: Mapping[str, Any] = {
    "trace": "S-S",
    "rate": 60.0,
    "cv": 4.0,
    "requests": 200,
    "instances": 2,
}
"""So tight that requests queue, move and are preempted."""
SAMPLE = 50
"""Requests of a run in the sample of `bench.paper`."""


def make_environment() -> None:
    """Let this process and its children print alike everywhere; before anything else is made."""
    os.environ.update(ENVIRONMENT)
    for name in COLOURING:
        os.environ.pop(name, None)


def started(*command: str) -> subprocess.CompletedProcess[str]:
    """`python -m` of that, ended."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )


def plain(text: str) -> str:
    """Without what differs between machines, working trees and releases."""
    version = f'"version": "{__version__}"', '"version": "VERSION"'
    paths = (str(ROOT), "ROOT"), (sys.prefix, "PREFIX"), (str(Path.home()), "HOME")
    for path, name in (version, *paths):
        text = text.replace(path, name)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def pretty(value: object) -> str:
    """As JSON, whose objects are in the order of their names."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


# -- what people read


def helps() -> Files:
    """The help of each command that people start, without vLLM's own flags."""
    from kvmig.engines.registry import kind_of
    from kvmig.launcher.flags import parser

    found = {"serve": parser().format_help()}
    for engine in ("toy", "transformers"):
        with redirect_stdout(StringIO()) as shown:
            kind_of(engine).print_help()
        found[f"serve-{engine}"] = shown.getvalue()
    found |= {name: _help_of(module) for name, module in COMMANDS.items()}
    return {f"{name}.txt": plain(text) for name, text in found.items()}


def _help_of(module: str) -> str:
    """What `python -m module --help` prints, in this process."""
    before, sys.argv = sys.argv, [module, "--help"]
    try:
        with redirect_stdout(StringIO()) as shown, suppress(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
    return shown.getvalue()


def slow_helps() -> Files:
    """The help of `kvmig.serve` with vLLM's own flags, and of what loads torch."""
    return {
        "serve-vllm.txt": plain(started("kvmig.serve", "--help=all").stdout),
        "train-count.txt": plain(started("kvmig_tools.train_count", "--help").stdout),
    }


def vllm_flags() -> Files:
    """What kvmig makes of each of vLLM's flags, without vLLM: their names by version are in the
    locks of `kvmig_tools.drift`."""
    from kvmig.engines.vllm.flags import ALIASES, ALLOWED, MEANS_NOTHING, NO_FLAGS, REFUSED

    verdicts = {
        **dict.fromkeys(ALLOWED, "allowed"),
        **dict.fromkeys(ALIASES, "allowed under another name"),
        **dict.fromkeys(NO_FLAGS, "no flag"),
        **{name: f"refused: {why}" for name, why in REFUSED.items()},
    }
    for name, values in MEANS_NOTHING.items():
        verdicts[name] += f"; but {', '.join(map(str, values))}"
    return {"vllm-flags.txt": "".join(f"{one}: {say}\n" for one, say in sorted(verdicts.items()))}


def console_commands() -> Files:
    """The commands of `kvmig`, their arguments and options, with the text of their help."""
    import typer

    from kvmig.cli.app import app

    lines: list[str] = []

    def visit(command: Any, path: tuple[str, ...]) -> None:
        lines.append(" ".join(path) + (" (hidden)" if command.hidden else ""))
        lines.extend(f"    {line}" for line in (command.help or "").splitlines())
        for one in command.params:
            words = "/".join((*one.opts, *one.secondary_opts))
            default = "" if one.default is None or callable(one.default) else f" = {one.default}"
            kind = one.type_descriptor.annotation
            named = f"{words} {one.metavar or getattr(kind, '__name__', kind)}"
            needed = ", required" if one.required else ""
            lines.append(f"  {named}{default}{needed}: {getattr(one, 'help', '') or ''}")
        for name, inner in sorted(getattr(command, "commands", {}).items()):
            visit(inner, (*path, name))

    visit(typer.main.get_command(app), ("kvmig",))
    return {"console.txt": plain("\n".join(lines))}


def environment_variables() -> Files:
    """All names that begin with KVMIG_ in the sources."""
    texts = (path.read_text() for path in (ROOT / "kvmig").rglob("*.py"))
    found = {name for text in texts for name in re.findall(r"\bKVMIG_[A-Z0-9_]*[A-Z0-9]", text)}
    return {"environment.txt": "".join(f"{name}\n" for name in sorted(found))}


# -- what programs read


def descriptions() -> Files:
    """/openapi.json of a fleet's server and of a front end without vLLM, and clients' routes."""
    from kvmig.asgi.route_table import CLIENT_ROUTES
    from kvmig.fleet.api import make_app

    return {
        "fleet.json": plain(pretty(make_app(Mock(provider=None)).openapi())),
        "front-end.json": plain(pretty(asyncio.run(_token_description()))),
        "client-routes.txt": "".join(f"{tuple(one)}\n" for one in CLIENT_ROUTES),
    }


def vllm_description() -> Files:
    """/openapi.json of a front end with vLLM's routes."""
    return {"front-end-vllm.json": plain(pretty(asyncio.run(_vllm_description())))}


async def _token_description() -> object:
    from kvmig.frontend.openai.token_server import TokenServer

    args = Namespace(model="model", served_model_name=None, api_key=[], max_model_len=0)
    with socket.socket() as sock:
        server = TokenServer(args, sock, Mock)
        await server.load()
        return _described(await server.make_app(Mock()))


async def _vllm_description() -> object:
    from tests.support.vllm_application import application

    async with application() as (app, _):
        return _described(app)


def _described(app: Any) -> object:
    """With kvmig's own routes."""
    from kvmig.frontend.app import extend

    extend(app, _http_state(), Mock(), Mock(), Mock(), "model")
    return app.openapi()


def _http_state() -> Any:
    from prometheus_client import CollectorRegistry

    from kvmig.asgi.access import access
    from kvmig.core.config import HttpConfig
    from kvmig.core.priorities import NORMAL
    from kvmig.frontend.middleware import HttpState

    return HttpState(HttpConfig(), access([], "", "127.0.0.1"), (NORMAL,), CollectorRegistry())


def metrics() -> Files:
    """Each metric of kvmig's with its type, labels, bounds and help, by kind of process."""
    from kvmig.core.priorities import NORMAL
    from kvmig.fleet.metrics import (
        FleetMetrics,
        of_disks,
        of_faults,
        of_models,
        of_set_aside,
        of_usage,
    )
    from kvmig.frontend.loop_watch import LoopWatch
    from kvmig.frontend.metrics import (
        ClassCollector,
        FrontendMetrics,
        InstanceCollector,
        UnitCollector,
    )
    from kvmig.proxy.metrics import DoorMetrics

    state = _http_state()
    FrontendMetrics(state.registry, (NORMAL,))
    LoopWatch(state.registry, set)
    for collector in (
        InstanceCollector(tuple),
        UnitCollector(tuple),
        ClassCollector(tuple, (NORMAL,)),
    ):
        state.registry.register(collector)
    proxy = DoorMetrics(Mock(states=dict), lambda: 0.0)
    server = FleetMetrics(Mock(), Mock(), Mock())
    of_fleet = [
        *of_models([], lambda _: 0),
        *of_usage([]),
        of_set_aside({}),
        of_faults({}),
        of_disks({}),
        server._misses(),
    ]
    return {
        "front-end.txt": _listed(_families(state.registry)),
        "proxy.txt": _listed(_families(proxy.registry)),
        "fleet.txt": _listed((one, one) for one in of_fleet),
    }


def _families(registry: Any) -> Iterable[tuple[object, Any]]:
    """(what has the names of the labels, metric)."""
    from prometheus_client.metrics import MetricWrapperBase

    for collector in list(registry._collector_to_names):
        for metric in collector.collect():
            yield collector if isinstance(collector, MetricWrapperBase) else metric, metric


def _listed(metrics: Iterable[tuple[Any, Any]]) -> str:
    lines = []
    for labelled, metric in metrics:
        labels = ", ".join(labelled._labelnames)
        bounds = getattr(labelled, "_upper_bounds", None) or getattr(labelled, "_kwargs", {}).get(
            "buckets"
        )
        bounded = f" bounds {[float(one) for one in bounds]}" if bounds else ""
        lines.append(f"{metric.name} {metric.type} ({labels}){bounded}: {metric.documentation}\n")
    return "".join(sorted(lines))


def wire() -> Files:
    """A message of each type, by protocol, in hexadecimal."""
    from scripts.corpus import PROTOCOLS, TYPES, example, local_messages, name_of, recorded

    every = {"control": {name_of(kind): recorded(example(kind)) for kind in TYPES}}
    every |= {name: local_messages(protocol) for name, protocol in PROTOCOLS.items()}
    return {
        f"{name}.txt": "".join(f"{one} {data.hex()}\n" for one, data in sorted(messages.items()))
        for name, messages in every.items()
    }


def documents() -> Files:
    """Launch documents and files, every field filled in, and with what fields are by default."""
    import msgspec

    from kvmig.controlplane.scheduler_process import SchedulerLaunch, SchedulerReady
    from kvmig.core.config import ClusterConfig
    from kvmig.fleet.settings import ServerLaunch
    from kvmig.fleet.spec import FleetFile, ModelSpec
    from kvmig.launcher.front_ends import FrontLaunch
    from kvmig.launcher.launch import LlumletLaunch
    from kvmig.process.child import StartAnnouncement
    from kvmig.proxy.messages import ProxyLaunch
    from scripts.corpus import example

    filled: dict[str, type[msgspec.Struct]] = {
        "llumlet": LlumletLaunch,
        "scheduler": SchedulerLaunch,
        "scheduler-ready": SchedulerReady,
        "announcement": StartAnnouncement,
        "front-end": FrontLaunch,
        "proxy": ProxyLaunch,
        "fleet-server": ServerLaunch,
        "fleet": FleetFile,
    }
    found = {
        f"{name}.json": pretty(msgspec.to_builtins(example(kind))) for name, kind in filled.items()
    }
    found["config-defaults.json"] = pretty(msgspec.to_builtins(ClusterConfig()))
    found["spec-defaults.json"] = pretty(msgspec.to_builtins(ModelSpec(name="a", source="path:/a")))
    return found


def schema() -> Files:
    """The database's tables and migrations, and the table of a front end's spool."""
    from alembic.script import ScriptDirectory

    from kvmig.accounts.usage import UsageSpool
    from kvmig.fleet import migrations
    from kvmig.fleet.store import FleetStore
    from kvmig.fleet.tables import SCHEMA

    (folder,) = migrations.__path__
    steps = ScriptDirectory(folder).walk_revisions()
    revisions = [f"{one.revision} after {one.down_revision}: {one.doc}\n" for one in steps]
    with tempfile.TemporaryDirectory() as at:
        store = FleetStore(f"sqlite:///{at}/kvmig.sqlite", Path(at, "pepper"))
        store.open()
        store.close()
        UsageSpool(Path(at, "spool.sqlite")).write([])
        tables = {name: _tables(Path(at, f"{name}.sqlite")) for name in ("kvmig", "spool")}
    return {
        "database.txt": tables["kvmig"],
        "spool.txt": tables["spool"],
        "revisions.txt": f"schema {SCHEMA}\n" + "".join(revisions),
    }


PARTS = {
    "column": "SELECT * FROM pragma_table_info(?)",
    "foreign key": "SELECT * FROM pragma_foreign_key_list(?)",
    "index": "SELECT * FROM pragma_index_list(?)",
}
"""Of a table; the first value of a row is its place among them."""


def _tables(path: Path) -> str:
    """Of a SQLite file, whichever migrations have made it: columns by name, indices, triggers."""
    import sqlite3

    lines = []
    file = sqlite3.connect(path)
    try:
        for kind, name, sql in file.execute(
            "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"
        ).fetchall():
            if kind != "table":
                lines.append(f"{kind} {name}: {' '.join((sql or 'of a constraint').split())}")
                continue
            lines.append(f"table {name}")
            for part, query in PARTS.items():
                rows = file.execute(query, (name,)).fetchall()
                lines += sorted(f"  {part} {row[1:]}" for row in rows)
    finally:
        file.close()
    return "".join(f"{line}\n" for line in lines)


def signatures() -> Files:
    """What is public, whichever module it is in."""
    from scripts.public_api import signatures as every

    blocks: list[str] = []
    for line in every().splitlines():
        if re.match(r" {4}\S", line):
            blocks.append("")
        if line.startswith("    "):
            blocks[-1] += f"{line}\n"
    return {"signatures.txt": "".join(sorted(blocks))}


def tests() -> Files:
    """The names of all tests, each with its file."""
    done = started("pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests")
    ids = [line for line in done.stdout.splitlines() if "::" in line and ".py" in line]
    if done.returncode or not ids:
        raise RuntimeError(f"tests can't be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    pairs = (one.partition("::")[::2] for one in ids)
    return {TEST_IDS: plain("".join(sorted(f"{name}\t{file}\n" for file, name in pairs)))}


def count_tests() -> Files:
    """How many functions that are tests each file has."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    counts = {one: len(re.findall(TEST, one.read_text(), re.MULTILINE)) for one in files}
    return {COUNTS: "".join(f"{one.relative_to(ROOT)} {count}\n" for one, count in counts.items())}


# -- what is decided


def simulator() -> Files:
    """The figures of a few hundred simulated requests under each policy."""
    from kvmig_tools.sim.policies import NAMES
    from kvmig_tools.sim.run import Run, simulate

    found = {name: simulate(Run(policy=name, **SIMULATED)).result.figures for name in NAMES}
    return {"simulator.txt": _listed_figures(found)}


def policies_sample() -> Files:
    """Figures of `bench.policies` for one tight load, under all policies and changed parts."""
    from bench.policies import BASE, simulate, variants
    from kvmig_tools.sim.run import Run

    run = Run(policy=BASE, **SIMULATED)
    found = {name: simulate((name, run.trace, run)).figures for name in variants()}
    return {"policies.txt": _listed_figures(found)}


def _listed_figures(found: Mapping[str, Mapping[str, float]]) -> str:
    return "".join(
        f"{name} {figure} {value:.9g}\n"
        for name, figures in found.items()
        for figure, value in sorted(figures.items())
    )


def paper_sample() -> Files:
    """What `bench.paper` compares with the paper, by few requests at one load of each workload."""
    from bench.paper import aims, loads, priorities
    from bench.paper.scope import Scope
    from kvmig_tools.sim.run import simulate
    from kvmig_tools.sim.workloads import PAPER_SEED

    scope = Scope(seeds=(PAPER_SEED,), requests=SAMPLE, one_load=True)
    llumnix = [one for one in loads.runs(scope) if one.migration]  # what has published points
    wanted = [*llumnix, *priorities.runs(scope)]
    runs = dict.fromkeys(one for run in wanted for one in scope.seeded(run))
    summary = aims.summary(scope, {run: simulate(run).result for run in runs})
    return {"paper.txt": "".join(f"{name} {value:.9g}\n" for name, value in summary.items())}


def checker() -> Files:
    """The model checker's counts of states."""
    done = started("kvmig_tools.check")
    text = re.sub(r" +(cpu s|\d+\.\d)$", "", done.stdout, flags=re.MULTILINE)
    text = re.sub(r" in [\d.]+ s\.$", ".", text, flags=re.MULTILINE)
    return {"checker.txt": plain(f"exit status {done.returncode}\n{text}{done.stderr}")}


def policies() -> Files:
    """`bench.policies --quick`: figures of each policy on each workload."""
    with tempfile.TemporaryDirectory() as at:
        file = Path(at, "policies.json")
        workers = str(os.cpu_count() or 1)
        _succeed("bench.policies", "--quick", "--workers", workers, "--out", str(file))
        return {"policies.json": _figures(file)}


def paper() -> Files:
    """`bench.paper --quick`: the page, the raw figures, the summary."""
    with tempfile.TemporaryDirectory() as at:
        file, docs = Path(at, "paper.json"), Path(at, "docs")
        _succeed("bench.paper", "--quick", "--docs", str(docs), "--out", str(file))
        lines = sorted((docs / "paper.jsonl").read_text().splitlines())  # as they came
        return {
            "paper.json": _figures(file),
            "paper.md": plain((docs / "paper.md").read_text()),
            "paper.jsonl": "".join(f"{line}\n" for line in lines),
        }


def _succeed(*command: str) -> None:
    done = started(*command)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def _figures(file: Path) -> str:
    """Of a benchmark's file: all but the machine and the time."""
    found: dict[str, object] = json.loads(file.read_text())
    kept = {name: found[name] for name in ("settings", "summary", "targets", "samples")}
    return pretty(kept)


OUTPUTS: Mapping[str, Callable[[], Files]] = {
    "help": helps,
    "help-slow": slow_helps,
    "vllm-flags": vllm_flags,
    "console": console_commands,
    "environment": environment_variables,
    "openapi": descriptions,
    "openapi-vllm": vllm_description,
    "metrics": metrics,
    "wire": wire,
    "documents": documents,
    "schema": schema,
    "signatures": signatures,
    "tests": tests,
    "test-counts": count_tests,
    "simulator": simulator,
    "policies-sample": policies_sample,
    "paper-sample": paper_sample,
    "checker": checker,
    "policies": policies,
    "paper": paper,
}
"""By the name of its folder."""
SLOW = ("help-slow", "openapi-vllm", "tests", "checker", "policies", "paper")
