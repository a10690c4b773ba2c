"""The server of transformers as another engine's: streams, a kill amid them, a drain, counts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.models import BUNDLED
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.command_site import CommandSite, FollowedStream
from tests.support.fleets import ask, counted, ended
from tests.support.waiting import until

pytest.importorskip("accelerate", reason="transformers' server needs it to load a model")
pytestmark = [pytest.mark.server, pytest.mark.long]

SERVER = (
    *(sys.executable, "-m", "transformers.cli.transformers", "serve", "{model}"),
    *("--host", "127.0.0.1", "--port", "{port}", "--device", "{device}", "--dtype", "float32"),
)
SERVED = str(BUNDLED.absolute())
"""The name of the model: the server refuses any other."""
STREAMS, TOKENS = 8, 30
PATH = "/v1/completions"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CommandSite]:
    with CommandSite(
        tmp_path,
        command=SERVER,
        source=SERVED,
        parallel=4,
        most=2,
        start_timeout_s=300.0,
    ) as made:
        yield made


async def test_streams_are_whole_and_counted_and_a_kill_costs_what_came(site: CommandSite) -> None:
    async with site.client() as http:
        http.timeout = 300
        streams = [FollowedStream() for _ in range(STREAMS)]
        await asyncio.gather(
            *(
                one.follow(http, PATH, ask(SERVED, TOKENS, number))
                for number, one in enumerate(streams)
            )
        )
        assert [one.text for one in streams] == [counted(TOKENS, n) for n in range(STREAMS)]
        rows = await site.ended_records(STREAMS)
        assert {(one.output, one.status) for one in rows} == {(TOKENS, "finished")}
        (row,) = site.rows()
        cut = FollowedStream()
        task = asyncio.create_task(cut.follow(http, PATH, ask(SERVED, 3000)))
        await until(lambda: len(cut.text) >= 50, within_s=SERVER_PATIENCE_S)
        os.kill(row["pid"], signal.SIGKILL)
        await task
        assert cut.error == "the server ended while it answered"
        assert counted(3000).startswith(cut.text)
        rows = await site.ended_records(STREAMS + 1)
        (lost,) = (one for one in rows if one.status == "cut")
        assert lost.output >= len(cut.text) // 4
        await until(lambda: site.rows()[0]["state"] == "serving", within_s=300)
        again = await http.post(PATH, json=ask(SERVED, 5))
        assert again.json()["choices"][0]["text"] == counted(5)


async def test_a_drained_one_finishes_its_stream_first(site: CommandSite) -> None:
    assert site.ask("POST", "/kvmig/v1/instances", {"count": 1}).status_code == 201
    await until(lambda: all(one["state"] == "serving" for one in site.rows()), within_s=300)
    async with site.client() as http:
        http.timeout = 300
        stream = FollowedStream()
        task = asyncio.create_task(stream.follow(http, PATH, ask(SERVED, 400)))
        await until(lambda: len(stream.text) >= 10, within_s=SERVER_PATIENCE_S)
        busy = next(one for one in site.rows() if one["running"])
        assert site.ask("DELETE", f"/kvmig/v1/instances/{busy['id']}").status_code == 202
        await task
        assert stream.text == counted(400)
        await until(lambda: len(site.rows()) == 1, within_s=SERVER_PATIENCE_S)
        assert ended(busy["pid"])
