"""What a server knows of models' sizes, from its start on."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator

import msgspec
import pytest
from msgspec.structs import replace

from kvmig.fleet.device_sizes import RememberedSizes, remember, remembered, sizes_key
from kvmig.fleet.files_table import FilesRow, write_files
from kvmig.fleet.server import FleetServer
from kvmig.fleet.settings import FleetSettings, ServerLaunch, make_folders
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.store import FleetStore
from kvmig.sources.files_folder import MANIFEST, FilesFolder, FilesManifest
from tests.support.fleet_stores import ANNA

SPEC = ModelSpec(name="a", source="hf:org/a", engine="toy")


@pytest.fixture
def settings() -> Iterator[FleetSettings]:
    with tempfile.TemporaryDirectory(prefix="kvmig-", dir="/tmp") as folder:
        made = FleetSettings(data=f"{folder}/data")
        make_folders(made)
        yield made


async def test_what_a_downloaded_model_was_measured_to_take_outlives_the_server(
    settings: FleetSettings,
) -> None:
    files = FilesFolder(settings.files)
    files.make()
    folder = files.whole("f1")
    (folder / MANIFEST).parent.mkdir(parents=True)
    manifest = FilesManifest(source=SPEC.source, revision="r1", files=())
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    store = FleetStore(settings.database_url, settings.path("pepper"))
    store.open()
    store.add_model(SPEC, ANNA)
    row = FilesRow(source=SPEC.source, folder="f1", created=0.0, last_used=0.0)
    write_files(store.database, [row])
    started_as = sizes_key(replace(SPEC, source=f"path:{folder}"))
    remember(store.database, RememberedSizes(started_as, None, 7))
    store.close()

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        server = FleetServer(ServerLaunch(settings), theirs)
        try:
            await server.start()
        finally:
            await server.close()
    store.open()
    assert [one.measured for one in remembered(store.database)] == [7]
    store.close()
