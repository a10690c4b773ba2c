"""Where a fleet reads its catalogue of known models."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from kvmig.core.errors import ConfigError
from kvmig.fleet.catalogue import KEPT_S, CatalogueReader


async def test_a_catalogue_that_can_not_be_read_any_more_stays_as_it_was(tmp_path: Path) -> None:
    file, now = tmp_path / "catalogue.toml", [0.0]
    file.write_text((resources.files("kvmig.sources") / "catalogue.toml").read_text())
    reader = CatalogueReader(str(file), lambda: now[0])
    found = await reader.read()
    file.unlink()
    now[0] = 2 * KEPT_S
    assert await reader.read() == found
    await reader.settle()
    assert await reader.read() == found
    with pytest.raises(ConfigError, match="can't be read"):
        await CatalogueReader(str(file), lambda: now[0]).read()


async def test_a_catalogue_at_what_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no URL"):
        await CatalogueReader("https://hub.example:port/", lambda: 0.0).read()


async def test_an_entry_that_is_left_out_is_in_the_log_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, now = tmp_path / "catalogue.toml", [0.0]
    own = (resources.files("kvmig.sources") / "catalogue.toml").read_text()
    file.write_text(own.replace('kind = "embedding"', 'kind = "of tomorrow"', 1))
    reader = CatalogueReader(str(file), lambda: now[0])
    for _ in range(2):
        now[0] += 2 * KEPT_S
        assert len((await reader.read()).left_out) == 1
        await reader.settle()
    said = [one for one in caplog.records if "is left out" in one.getMessage()]
    assert len(said) == 1
