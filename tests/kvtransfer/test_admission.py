"""How many migrations, and how many of their bytes, an instance lets go on at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvmig.core.config import MigrationConfig
from kvmig.core.errors import ConfigError, MigrationRefused
from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.core.quantities import quantity
from kvmig.kvtransfer.migrations import admit, kv_bytes
from kvmig.kvtransfer.report import MigrationReport
from kvmig.launcher.flags import parse
from tests.support.fake_cluster import Cluster, cluster
from tests.support.fake_engine import BLOCK_BYTES
from tests.support.waiting import PATIENCE_S, until


def test_a_request_holds_whole_blocks() -> None:
    layout = KVLayout((BlockRegion(0, 1000, 1000),), 10, 16)
    assert [kv_bytes(tokens, layout) for tokens in (0, 1, 16, 33)] == [0, 1000, 1000, 3000]


def test_one_more_than_allowed_is_refused_and_told_why() -> None:
    config = MigrationConfig(max_migrations=2)
    admit(config, "in", [5], 1)
    with pytest.raises(MigrationRefused, match="busy: 2 migrations in, --max-migrations is 2"):
        admit(config, "in", [5, 5], 1)


def test_more_bytes_than_allowed_are_refused_but_go_alone() -> None:
    config = MigrationConfig(max_migration_bytes=100)
    admit(config, "out", [60], 40)
    admit(config, "out", [], 1000)
    with pytest.raises(MigrationRefused, match="101 bytes would migrate out"):
        admit(config, "out", [60], 41)


@asynccontextmanager
async def in_its_pause(them: Cluster) -> AsyncIterator[asyncio.Task[MigrationReport]]:
    """The migration of r, which is suspended and goes on behind the block; s is there, too."""
    release = asyncio.Event()

    async def before(method: str) -> None:
        if method == "suspend":
            await release.wait()

    them.a.engine.start("s")
    them.a.engine.before = before
    first = asyncio.create_task(them.move())
    await until(lambda: "suspend" in them.a.engine.calls)
    yield first
    release.set()
    await first


async def test_migrations_over_the_count_wait_for_their_turn() -> None:
    async with cluster(max_migrations=2) as them:
        names = [f"s{number}" for number in range(4)]
        for name in names:
            them.a.engine.start(name)
        async with in_its_pause(them):
            moves = [asyncio.create_task(them.move(name)) for name in names]
            await until(lambda: them.a.engine.calls.count("suspend") == 2)
            assert them.a.migrations.outgoing == 2
            assert them.a.migrations.moving() == {"r", *names}
            again = await them.move("s3")
            assert (again.state, again.reason) == ("aborted", "already_migrating")
        assert {report.state for report in await asyncio.gather(*moves)} == {"committed"}


async def test_a_turn_that_does_not_come_leaves_the_request_where_it_is() -> None:
    async with cluster(max_migrations=1) as them, in_its_pause(them):
        second = asyncio.create_task(them.move("s"))
        await until(lambda: "s" in them.a.migrations.moving())
        them.skip_lease()
        report = await second
        assert (report.reason, them.owners("s")) == ("busy", "a")
        assert "--max-migrations is 1" in report.detail


async def test_who_waits_for_a_turn_when_the_instance_stops_stays() -> None:
    async with cluster(max_migrations=1) as them:
        async with in_its_pause(them):
            second = asyncio.create_task(them.move("s"))
            await until(lambda: "s" in them.a.migrations.moving())
            closing = asyncio.create_task(them.a.migrations.close(PATIENCE_S))
            await asyncio.sleep(0)
        assert (await second).reason == "shutdown"
        await closing
        assert them.owners("s") == "a"


async def test_a_destination_that_takes_no_more_bytes_refuses() -> None:
    async with cluster(max_migration_bytes=20 * BLOCK_BYTES) as them:
        async with in_its_pause(them) as first:
            report = await them.move("s")
            assert (report.reason, them.owners("s")) == ("busy", "a")
            assert "--max-migration-bytes is 1280" in report.detail
        assert (await first).state == "committed"


async def test_a_capped_migration_moves_and_says_how_long_it_waited() -> None:
    async with cluster(max_bandwidth=50_000.0) as them:
        report = await them.move()
        assert report.state == "committed"
        assert sum(stage.parts.wait for stage in report.stages) > 0


@pytest.mark.parametrize(
    ("text", "value"), [("500", 5e8), ("0.5GB", 5e8), ("1MiB", 1 << 20), ("2 GB/s", 2e9), ("0", 0)]
)
def test_a_bandwidth_is_a_number_of_megabytes_or_has_a_unit(text: str, value: float) -> None:
    assert quantity("MB")(text) == value


@pytest.mark.parametrize("text", ["-1", "fast", "1XB", "nan", "inf", "", "1e999"])
def test_a_bandwidth_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-bandwidth: .* must be a number of MB"):
        parse([f"--max-bandwidth={text}"])


def test_the_flags_reach_the_configuration() -> None:
    flags = ["--max-bandwidth=100", "--max-pair-bandwidth=1GiB", "--max-migration-bytes=64MiB"]
    migration = parse([*flags, "--max-migrations=9"])[0].migration
    assert (migration.max_bandwidth, migration.max_pair_bandwidth) == (1e8, float(1 << 30))
    assert (migration.max_migrations, migration.max_migration_bytes) == (9, 64 << 20)


def test_no_migrations_at_all_is_another_flags_word() -> None:
    with pytest.raises(ConfigError, match="--max-migrations is 0, must be 1 or more"):
        parse(["--max-migrations=0"])
