"""Fixtures that tests share; real servers and engines are started once for the whole run."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

from kvmig.fleet.store import FleetStore
from kvmig.process.child import begin_loading, end_loading
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import SMALL, Served
from tests.support import authorities, fake_gpu, postgres
from tests.support.fleet_stores import Place, make_tables
from tests.support.fleets import ToyFleet
from tests.support.leaks import Footprint, assert_server_is_empty
from tests.support.retries import SESSION
from tests.support.toys import Toys
from tests.support.vllm_pair import Engines, Pair
from tests.support.vllm_side import Configuration

# On a busy machine an example takes its time, too.
settings.register_profile("patient", deadline=None)
# The same examples each time, and fewer.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=15)
settings.load_profile(os.environ.get("KVMIG_HYPOTHESIS", "patient"))

Running = TypeVar("Running", bound=Served)

SHARED = ("two_instances", "two_toys")
"""Servers that many files' tests share. Idle ones take a tenth of a core each."""
KEPT = pytest.StashKey[dict[str, ExitStack]]()
"""Those that run, by name."""
LAST = pytest.StashKey[dict[str, pytest.Item]]()
"""The last test that uses one, by its name."""

NEVER_BY_ITSELF = "--policy=freeness"
"""The scheduler moves nothing, so that a test decides what moves."""
PATIENT = ("--reply-timeout-ms=20000", "--lease-ms=60000")
"""On a busy machine a migration takes its time, and a test is about how it ends."""
TWO = (*PATIENT, "--instances=2", NEVER_BY_ITSELF, "--shutdown-timeout=5")

# Nodes of Ray ask each other for a token, as Ray advises; one that a user of this machine keeps
# would change what a test sees, and Ray would keep the one that it makes up there.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
# Else any call of Ray in a test's own process joins whichever cluster another lane has now, or
# waits without end for one that is gone.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

authorities.trust_one()
begin_loading()  # a lane that imports vLLM would walk all of it again and again


def pytest_collection_finish() -> None:
    end_loading()


@pytest.hookimpl(trylast=True)  # what was left out isn't looked at
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Files whose tests share a server run first, so that it ends before the others begin."""
    ranks: dict[Path, int] = {}
    for item in items:
        used = [at for at, name in enumerate(SHARED) if name in fixtures_of(item)]
        ranks[item.path] = min([*used, ranks.get(item.path, len(SHARED))])
    items.sort(key=lambda item: ranks[item.path])
    session.stash[LAST] = {
        name: item for item in items for name in SHARED if name in fixtures_of(item)
    }


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    for name, last in item.session.stash[LAST].items():
        if last is item and name in item.session.stash.get(KEPT, {}):
            item.session.stash[KEPT].pop(name).close()


def fixtures_of(item: pytest.Item) -> list[str]:
    """All that it uses, by whatever way."""
    return getattr(item, "fixturenames", [])


def shared(request: pytest.FixtureRequest, server: Running) -> Running:
    """Start the server of a fixture in `SHARED`; after its last test nothing is left of it."""
    stack = request.session.stash.setdefault(KEPT, {})[str(request.fixturename)] = ExitStack()
    request.addfinalizer(stack.close)
    stack.enter_context(leaving_nothing(server))
    return server


@contextmanager
def leaving_nothing(server: Served) -> Iterator[None]:
    """A server that is stopped after the block leaves no process and no memory."""
    with server:
        yield
        footprint = Footprint.of(server)
    footprint.assert_gone()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    sliced = session.config.getoption("--long-slice", None) is not None
    # A slice has too few calls to be judged by, and runs beside other lanes.
    if SESSION.too_many and not sliced and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SESSION.over:
        verdict = "FAILED, too many: " if SESSION.too_many else ""
        terminalreporter.write_line(f"{verdict}{SESSION}")


@pytest.fixture(autouse=True)
def logging_as_it_begins() -> None:
    """A library may change the root logger where it is imported: with vLLM's application comes one
    that lets errors through only, for the rest of the process."""
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in root.handlers:
        handler.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def environment_as_it_is() -> Iterator[None]:
    """An engine of vLLM that starts in a test's process makes vLLM keep the environment as it was
    then: later tests couldn't set any of vLLM's variables."""
    yield
    if (envs := sys.modules.get("vllm.envs")) is not None:
        envs.disable_envs_cache()


@pytest.fixture
def gpus() -> Iterator[None]:
    """Two GPUs of the tests' own (support/fake_gpu.py); afterwards nothing of them is held."""
    with fake_gpu.installed():
        yield


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where servers of vLLM are forked, which then import nothing."""
    with Nursery("vllm") as made:
        yield made


@pytest.fixture(scope="session")
def toy_nursery() -> Iterator[Nursery]:
    """The same for servers whose engines compute nothing."""
    with Nursery("toy") as made:
        yield made


@pytest.fixture(scope="session")
def two_instances(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """kvmig.serve with two instances of the bundled model."""
    log = tmp_path_factory.mktemp("served") / "log"
    served = Served([*SMALL, *TWO], nursery=nursery, log=log)
    return shared(request, served)


@pytest.fixture
def served(two_instances: Served) -> Iterator[Served]:
    """The shared server; afterwards no block, request or staging buffer is left in it."""
    yield two_instances
    assert_server_is_empty(two_instances)


@pytest.fixture(scope="session")
def two_toys(
    request: pytest.FixtureRequest, toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Toys:
    """The same with engines that compute nothing."""
    return shared(request, Toys(TWO, tmp_path_factory.mktemp("toys"), nursery=toy_nursery))


@pytest.fixture
def toys(two_toys: Toys) -> Iterator[Toys]:
    """The shared server of toys; afterwards nothing is left in it, as in `served`."""
    yield two_toys
    assert_server_is_empty(two_toys)


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """vLLM engines in this process, by configuration."""
    engines = Engines()
    yield engines
    engines.close()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="sync", marks=pytest.mark.long),  # test_zoo's always are
        pytest.param(True, id="async"),
    ],
)
def configurations(request: pytest.FixtureRequest) -> tuple[Configuration, Configuration]:
    """Of the engines in `pair`; a module that wants others has its own fixture of this name."""
    wanted = Configuration(async_scheduling=request.param)
    return wanted, wanted


@pytest.fixture
async def pair(
    engines: Engines, configurations: tuple[Configuration, Configuration]
) -> AsyncIterator[Pair]:
    """Two engines, which a test leaves empty."""
    async with engines.lent(*configurations) as pair:
        yield pair


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    """Where a server of a test's own writes."""
    return tmp_path / "log"


@pytest.fixture(scope="session")
def postgres_cluster() -> Iterator[postgres.Cluster]:
    """A PostgreSQL of the tests' own."""
    programs = postgres.programs()
    if programs is None:
        pytest.skip("no PostgreSQL here: neither initdb nor /usr/lib/postgresql")
    with postgres.cluster(programs) as made:
        yield made


@pytest.fixture(scope="session")
def sqlite_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the newest schema's tables, to be copied: to make them takes longer."""
    file = tmp_path_factory.mktemp("tables") / "fleet.sqlite"
    make_tables(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def postgres_tables(postgres_cluster: postgres.Cluster) -> postgres.FilledDatabase:
    """A database with the newest schema's tables."""
    url = postgres_cluster.new()
    make_tables(url)
    return postgres_cluster.keep(url)


@pytest.fixture
def empty_place(tmp_path: Path) -> Place:
    """Where a store in SQLite may be opened for the first time."""
    return Place(f"sqlite:///{tmp_path / 'fleet.sqlite'}", tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a store may be opened for the first time: each kind of database."""
    if request.param == "postgres":
        return Place(request.getfixturevalue("postgres_cluster").new(), tmp_path)
    empty: Place = request.getfixturevalue("empty_place")
    return empty


@pytest.fixture
def sqlite_place(empty_place: Place, sqlite_tables: Path) -> Place:
    """Where a store in SQLite may be opened that has its tables."""
    file = empty_place.folder / "fleet.sqlite"
    shutil.copyfile(sqlite_tables, file)
    file.chmod(0o600)
    return empty_place


@pytest.fixture
def postgres_place(postgres_tables: postgres.FilledDatabase, tmp_path: Path) -> Place:
    """Where a store in PostgreSQL may be opened that has its tables, and nothing of other tests."""
    postgres_tables.restore()
    return Place(postgres_tables.url, tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest) -> Place:
    """Where a store may be opened: each kind of database."""
    found: Place = request.getfixturevalue(f"{request.param}_place")
    return found


@pytest.fixture
def store(place: Place) -> Iterator[FleetStore]:
    """Of a fleet, in each kind of database; nobody is in it."""
    made = place.store()
    made.open()
    yield made
    made.close()


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    """`kvmig up`, without a model."""
    with ToyFleet(tmp_path_factory.mktemp("fleet"), "--allow-commands") as made:
        yield made


@pytest.fixture
def fleet(shared_fleet: ToyFleet) -> Iterator[ToyFleet]:
    """The shared one; afterwards there is no model."""
    yield shared_fleet
    shared_fleet.hold(None)
    for one in shared_fleet.get("models")["data"]:
        shared_fleet.ask("DELETE", f"models/{one['name']}")
