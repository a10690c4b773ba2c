"""A catalogue that an admin has put on a web server."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmig.core.errors import ConfigError
from kvmig.fleet import catalogue
from kvmig.fleet.catalogue import KEPT_S, MOST_BYTES, RETRY_S, CatalogueReader
from kvmig.fleet.tables import StoreError
from tests.support.catalogue_site import ONE, CatalogueSite
from tests.support.waiting import until_yes

OTHER = ONE.replace("small", "other")
INSIDE = "http://10.1.2.3/catalogue.toml"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CatalogueSite]:
    with CatalogueSite(tmp_path) as made:
        monkeypatch.setenv("SSL_CERT_FILE", made.trusted)
        for name in [one for one in os.environ if one.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        yield made


class SteppedReader(CatalogueReader):
    """Whose clock the test sets."""

    def __init__(self, where: str) -> None:
        self.now = 0.0
        super().__init__(where, lambda: self.now)

    async def names(self) -> list[str]:
        return [one.name for one in (await self.read()).models]

    async def names_later(self) -> list[str]:
        """Once what it has was too old, and another was asked for."""
        self.now += KEPT_S + 1
        await self.names()
        await self.settle()
        return await self.names()


@pytest.fixture
async def reader(site: CatalogueSite) -> AsyncIterator[SteppedReader]:
    made = SteppedReader(f"https://{site.place}")
    yield made
    await made.close()


async def test_a_catalogue_that_changed_is_taken_once_the_last_one_is_old(
    site: CatalogueSite, reader: SteppedReader
) -> None:
    assert await reader.names() == ["small"]
    site.body = OTHER.encode()
    reader.now += KEPT_S - 1
    assert await reader.names() == ["small"]
    assert len(site.asked) == 1
    assert await reader.names_later() == ["other"]


async def test_callers_share_one_fetch(site: CatalogueSite, reader: SteppedReader) -> None:
    site.slow = threading.Event()
    callers = [asyncio.create_task(reader.names()) for _ in range(5)]
    await until_yes(lambda: bool(site.asked))
    callers[0].cancel()  # its client has left
    site.slow.set()
    assert await asyncio.gather(*callers[1:]) == [["small"]] * 4
    assert len(site.asked) == 1


async def test_an_old_catalogue_is_answered_while_another_is_fetched_once(
    site: CatalogueSite, reader: SteppedReader
) -> None:
    assert await reader.names() == ["small"]
    site.body, site.slow = OTHER.encode(), threading.Event()
    reader.now += KEPT_S + 1
    async with asyncio.timeout(5):  # the fetch has ten seconds
        assert await asyncio.gather(*(reader.names() for _ in range(5))) == [["small"]] * 5
        await until_yes(lambda: len(site.asked) == 2)
        assert await reader.names() == ["small"]
    site.slow.set()
    await reader.settle()
    assert await reader.names() == ["other"]
    assert len(site.asked) == 2


async def test_a_failed_fetch_is_remembered_with_its_reason_until_it_is_tried_again(
    site: CatalogueSite, reader: SteppedReader
) -> None:
    site.status = 503
    refused = await asyncio.gather(*(reader.read() for _ in range(3)), return_exceptions=True)
    assert {str(one) for one in refused} == {
        f"the catalogue https://{site.place} can't be read now: its server answers 503; it is"
        f" tried again in {RETRY_S:g} s"
    }
    site.status = 200
    reader.now += RETRY_S - 7
    with pytest.raises(StoreError, match=r"answers 503; it is tried again in 7 s$"):
        await reader.read()
    assert len(site.asked) == 1
    reader.now += 7
    assert await reader.names() == ["small"]
    assert len(site.asked) == 2


async def test_an_old_catalogue_whose_fetch_failed_is_asked_for_again_soon_and_no_sooner(
    site: CatalogueSite, reader: SteppedReader
) -> None:
    assert await reader.names() == ["small"]
    site.status, site.body = 503, OTHER.encode()
    assert await reader.names_later() == ["small"]
    assert len(site.asked) == 2
    site.status = 200
    reader.now += RETRY_S
    await reader.names()
    await reader.settle()
    assert await reader.names() == ["other"]
    assert len(site.asked) == 3


async def test_a_fetch_ends_with_its_reader(site: CatalogueSite, reader: SteppedReader) -> None:
    site.slow = threading.Event()
    caller = asyncio.create_task(reader.names())
    await until_yes(lambda: bool(site.asked))
    async with asyncio.timeout(5):
        await reader.close()
        with pytest.raises(StoreError, match="the server ends"):
            await caller


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "broken": ({"body": b"date = ["}, ConfigError, "can't be used: "),
    "no text": ({"body": ONE.encode() + b"# \xff"}, ConfigError, "can't be used: 'utf-8' codec"),
    "too large": (
        {"body": b"#" * (MOST_BYTES + 1)}, ConfigError, f"it has more than {MOST_BYTES} bytes",
    ),
    "cut": ({"length": 1000}, StoreError, "can't be read now: "),
    "gone": ({"status": 404}, StoreError, "can't be read now: its server answers 404"),
    "a redirect to nowhere": ({"status": 302}, StoreError, "its server answers 302"),
    "not modified": ({"status": 304}, StoreError, "its server answers 304"),
    "redirected": (
        {"status": 302, "leads_to": INSIDE}, StoreError,
        f"its server answers 302 and leads to '{INSIDE}', must not redirect",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
async def test_an_answer_that_is_no_catalogue_is_refused_by_name_and_the_last_one_stays(
    site: CatalogueSite, reader: SteppedReader, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await reader.names() == ["small"]
    faults, kind, said = WRONG[wrong]
    vars(site).update(faults)
    assert await reader.names_later() == ["small"]
    assert f"the catalogue https://{site.place} " in caplog.text
    assert said in caplog.text
    with pytest.raises(kind) as refused:
        await SteppedReader(f"https://{site.place}").read()
    assert said in str(refused.value)
    assert "\n" not in str(refused.value).strip()


async def test_a_slow_answer_is_refused_with_its_time_and_the_last_one_stays(
    site: CatalogueSite,
    reader: SteppedReader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await reader.names() == ["small"]
    site.slow = threading.Event()
    monkeypatch.setattr(catalogue, "TIMEOUT_S", 0.3)
    async with asyncio.timeout(10):
        assert await reader.names_later() == ["small"]
    assert "can't be read now: it was not there within 0.3 s" in caplog.text
    site.slow.set()


async def test_a_server_that_nobody_vouches_for_is_refused(
    site: CatalogueSite, reader: SteppedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(StoreError, match=r"can't be read now: .*certificate"):
        await reader.read()
    assert site.asked == []


async def test_what_is_secret_in_a_catalogues_url_is_in_no_reason(site: CatalogueSite) -> None:
    site.status = 403
    with pytest.raises(StoreError) as refused:
        await SteppedReader(f"https://anna:word@{site.place}?token=hidden").read()
    assert "answers 403" in str(refused.value)
    assert not [one for one in ("word", "hidden") if one in str(refused.value)]
    assert site.asked == ["/catalogue.toml?token=hidden"]
