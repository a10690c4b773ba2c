"""The folder of models' files on a node: filled from other nodes, whole or not there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvmig.core.clock import TimeSource, monotonic
from kvmig.launcher import user_folder
from kvmig.launcher.agent_origin import FolderHolder
from kvmig.launcher.node_files import (
    FILES_VARIABLE,
    OWNER,
    FilesWish,
    FolderReport,
    NodeFilesReport,
    WantedFolder,
    copy_link,
    folder_on_node,
)
from kvmig.launcher.node_folders import LOOK_S, NodeFolders
from kvmig.process.folder_lock import FolderLock
from kvmig.sources import disk_room
from kvmig.sources.file_list import SourceFailure
from kvmig.sources.files_folder import (
    SERVER_LOCK,
    FilesFolder,
    FilesManifest,
    WholeFile,
    folder_name,
)
from kvmig.sources.source import parse_source
from tests.support.waiting import wait_until

WORD = "the word"
CONFIG = b"{}"


class FilesSite:
    """The server's folder, whose node is the holder; `node` makes others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = FilesFolder(folder / "server")
        self.server.make()
        (self.server.root / OWNER).write_text(WORD)
        self.holder = NodeFolders({})
        self.holder.take_wish(self.wish(), {})
        self.nodes: list[NodeFolders] = []

    def add(self, name: str, weights: bytes) -> WantedFolder:
        """Let the server have a model."""
        files = {"config.json": CONFIG, "sub/model.safetensors": weights}
        part = self.server.part(name)
        for one, data in files.items():
            (part / one).parent.mkdir(parents=True, exist_ok=True)
            (part / one).write_bytes(data)
        listed = [WholeFile(one, len(it), sha256(it).hexdigest()) for one, it in files.items()]
        manifest = FilesManifest(f"hf:Org/{name}", "c0ffee", tuple(listed))
        self.server.publish(name, manifest)
        own = folder_name(parse_source(manifest.source), manifest.revision)
        self.server.whole(name).rename(self.server.whole(own))
        return WantedFolder(folder=str(self.server.whole(own)), digest=manifest.digest)

    def wish(self, *folders: WantedFolder, most: int = 0, paths: tuple[str, ...] = ()) -> FilesWish:
        return FilesWish(
            root=str(self.server.root), word=WORD, most_bytes=most, folders=folders, paths=paths
        )

    def node(self, name: str = "node", clock: TimeSource = monotonic) -> NodeFolders:
        made = NodeFolders({FILES_VARIABLE: str(self.folder / name)}, clock)
        self.nodes.append(made)
        return made


class OtherHolder:
    """A holder that reads from another one, and can be told to misbehave."""

    def __init__(self, holder: NodeFolders) -> None:
        self.holder = holder
        self.breaks_after: int | None = None
        self.other_bytes = False
        self.begins: list[int] = []

    def list_files(self, folder: str) -> FilesManifest:
        return self.holder.list_files(folder)

    def digest_file(self, folder: str, name: str) -> str:
        return self.holder.digest_file(folder, name)

    def read_file(self, folder: str, name: str, begin: int, count: int) -> bytes:
        found = self.holder.read_file(folder, name, begin, count)
        if name.endswith("safetensors"):
            self.begins.append(begin)
            if self.breaks_after is not None:
                found = found[: max(0, self.breaks_after - begin)]
        return bytes(len(found)) if self.other_bytes else found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FilesSite]:
    made = FilesSite(tmp_path)
    yield made
    for one in made.nodes:
        one.close()


def after(node: NodeFolders, wish: FilesWish, *holders: object, state: str) -> FolderReport:
    """The first wanted folder once it has this state."""
    folder = wish.folders[0].folder
    found: list[FolderReport] = []

    def reached() -> bool:
        report = node.take_wish(wish, {folder: holders}).folder(folder)  # type: ignore[dict-item]
        found[:] = [] if report is None else [report]
        return report is not None and report.state == state

    wait_until(reached)
    return found[0]


def test_a_node_fetches_what_it_lacks_from_another_one(site: FilesSite, tmp_path: Path) -> None:
    wanted = site.add("a", b"weights")
    report = after(site.node(), site.wish(wanted), site.holder, state="whole")
    own = Path(folder_on_node(wanted.folder, str(site.server.root), str(tmp_path / "node")))
    assert own.parent == tmp_path / "node" / "whole"
    assert (own / "sub" / "model.safetensors").read_bytes() == b"weights"
    assert (report.source, report.size, report.why) == ("hf:Org/a", len(CONFIG) + 7, "")
    assert report.took_s is not None


def test_a_node_that_has_a_folder_gives_it_to_others(site: FilesSite) -> None:
    wanted = site.add("a", b"weights")
    first, second = site.node("first"), site.node("second")
    after(first, site.wish(wanted), site.holder, state="whole")
    site.server.remove(Path(wanted.folder).name)
    after(second, site.wish(wanted), first, state="whole")


def test_a_download_that_breaks_off_is_not_whole_and_goes_on_at_the_byte(
    site: FilesSite, tmp_path: Path
) -> None:
    wanted = site.add("a", b"0123456789")
    cut = OtherHolder(site.holder)
    cut.breaks_after = 4
    node = site.node()
    failed = after(node, site.wish(wanted), cut, state="failed")
    assert "sub/model.safetensors ends after 4 of 10 bytes" in failed.why
    assert not list((tmp_path / "node" / "whole").iterdir())
    cut.breaks_after, cut.begins = None, []
    node.close()  # the next agent goes on
    after(site.node(), site.wish(wanted), cut, state="whole")
    assert cut.begins == [4]


def test_bytes_that_are_not_the_servers_are_dropped(site: FilesSite, tmp_path: Path) -> None:
    wanted = site.add("a", b"weights")
    wrong = OtherHolder(site.holder)
    wrong.other_bytes = True
    failed = after(site.node(), site.wish(wanted), wrong, state="failed")
    assert "is not what its source lists" in failed.why
    assert not list((tmp_path / "node" / "whole").iterdir())


def test_a_folder_with_another_content_than_the_servers_is_refused(site: FilesSite) -> None:
    wanted = site.add("a", b"weights")
    other = WantedFolder(folder=wanted.folder, digest="of others")
    failed = after(site.node(), site.wish(other), site.holder, state="failed")
    assert "has other files than the fleet's server has" in failed.why


def test_a_full_disk_is_named_with_its_bytes_before_anything_comes(
    site: FilesSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = site.add("a", b"weights")
    monkeypatch.setattr("kvmig.launcher.node_folders.free_bytes", lambda root: disk_room.SPARE + 5)
    failed = after(site.node(), site.wish(wanted), site.holder, state="failed")
    assert "the disk is too full: 9 bytes are needed, 5 are free" in failed.why


def test_what_is_wanted_no_more_goes_for_the_limit_and_what_is_wanted_stays(
    site: FilesSite,
) -> None:
    first, second, third = (site.add(one, 10 * one.encode()) for one in "abc")
    node = site.node()
    after(node, site.wish(first, most=30), site.holder, state="whole")
    after(node, site.wish(second, first, most=30), site.holder, state="whole")
    after(node, site.wish(third, second, most=30), site.holder, state="whole")
    report = node.take_wish(site.wish(third, second, most=30), {})
    assert {one.source for one in report.folders} == {"hf:Org/b", "hf:Org/c"}
    failed = after(node, site.wish(first, second, third, most=30), site.holder, state="failed")
    assert "12 bytes are needed, 6 more than --model-files allows (30)" in failed.why


def test_a_failure_is_shown_until_its_pause_is_over_though_nobody_wants_the_folder(
    site: FilesSite,
) -> None:
    wanted, now = site.add("a", b"weights"), [100.0]
    wrong = OtherHolder(site.holder)
    wrong.other_bytes = True
    node = site.node(clock=lambda: now[0])
    after(node, site.wish(wanted), wrong, state="failed")
    assert node.take_wish(site.wish(), {}).folders
    now[0] += 1000
    assert not node.take_wish(site.wish(), {}).folders


def test_a_node_with_the_servers_disk_fetches_nothing(site: FilesSite) -> None:
    wanted = site.add("a", b"weights")
    report = NodeFolders({}).take_wish(site.wish(wanted), {wanted.folder: [site.holder]})
    assert (report.shared, report.origin) == (True, True)
    assert [one.state for one in report.folders] == ["whole"]


def test_a_folder_of_another_process_is_refused_with_its_id(site: FilesSite) -> None:
    first, second = site.node(), site.node()
    assert first.take_wish(site.wish(), {}).why == ""
    found = second.take_wish(site.wish(), {})
    words = f"is in use by process {os.getpid()}; it can be one fleet's only"
    assert found.why.endswith(words)
    assert found.root == ""


def test_a_folder_of_another_fleets_server_is_that_servers_alone(
    site: FilesSite, tmp_path: Path
) -> None:
    """Its models, and what it downloads just now, would go to make room."""
    wanted = site.add("a", b"weights")
    other = FilesFolder(tmp_path / "node")
    other.make()
    lock = FolderLock(other.root / SERVER_LOCK, "the folder")
    lock.acquire()
    wish, holders = site.wish(wanted, most=1), {wanted.folder: [site.holder]}
    found = site.node().take_wish(wish, holders)
    assert found.why == (
        f"{other.root} can't be used for models' files: the server of another fleet (process"
        f" {os.getpid()}) has it; it can be one fleet's only"
    )
    assert not found.root
    lock.release()


def test_a_node_leaves_its_folder_to_a_server_that_comes_later(
    site: FilesSite, tmp_path: Path
) -> None:
    wanted = site.add("a", b"weights")
    node, wish = site.node(), site.wish(wanted)
    after(node, wish, site.holder, state="whole")
    lock = FolderLock(tmp_path / "node" / SERVER_LOCK, "the folder")
    lock.acquire()
    found = node.take_wish(wish, {})
    assert "the server of another fleet" in found.why
    assert (found.root, [one.state for one in found.folders if one.state == "whole"]) == ("", [])
    lock.release()
    assert [one.state for one in node.take_wish(wish, {}).folders] == ["whole"]


def test_a_node_says_which_of_the_users_folders_it_has(site: FilesSite, tmp_path: Path) -> None:
    there, gone = str(tmp_path), str(tmp_path / "gone")
    found: NodeFilesReport = site.node().take_wish(site.wish(paths=(there, gone)), {})
    assert list(found.paths) == [there]


def users_folder(site: FilesSite) -> Path:
    folder = site.folder / "own"
    folder.mkdir()
    (folder / "config.json").write_bytes(CONFIG)
    (folder / "model.safetensors").symlink_to(site.folder / "blob")
    (site.folder / "blob").write_bytes(b"weights")
    return folder


class ElsewhereHolder(OtherHolder):
    """A holder of a folder of the user's that is at another path on the asking node."""

    def __init__(self, holder: NodeFolders, here: Path) -> None:
        super().__init__(holder)
        self.here = str(here)
        self.other_digest = False

    def list_files(self, folder: str) -> FilesManifest:
        found = self.holder.list_files(self.here)
        return replace(found, source=f"path:{folder}")

    def read_file(self, folder: str, name: str, begin: int, count: int) -> bytes:
        return super().read_file(self.here, name, begin, count)

    def digest_file(self, folder: str, name: str) -> str:
        return "another" if self.other_digest else self.holder.digest_file(self.here, name)


def test_a_folder_of_the_users_is_copied_to_a_node_that_lacks_it(
    site: FilesSite, tmp_path: Path
) -> None:
    own, now = users_folder(site), [0.0]
    server = NodeFolders({}, lambda: now[0])
    holder = ElsewhereHolder(server, own)
    revision = server.take_wish(site.wish(paths=(str(own),)), {}).paths[str(own)]
    there = "/models/nowhere"
    wanted = WantedFolder(folder=there, revision=revision)
    node = site.node()
    wish = site.wish(wanted, paths=(there,))

    def copied() -> FolderReport | None:
        return node.take_wish(wish, {there: [holder]}).folder(there, revision)

    holder.other_digest = True
    wait_until(lambda: (copied() or FolderReport(folder="", state="wanted")).state == "failed")
    found = copied()
    assert found is not None
    assert "has changed while it was fetched; it was dropped" in found.why
    holder.other_digest = False
    node.close()
    node = site.node()
    wait_until(lambda: (copied() or FolderReport(folder="", state="wanted")).state == "whole")
    link = copy_link(str(tmp_path / "node"), there)
    assert (link / "model.safetensors").read_bytes() == b"weights"
    (own / "config.json").write_bytes(b"{ }")
    now[0] += LOOK_S
    changed = server.take_wish(site.wish(paths=(str(own),)), {}).paths[str(own)]
    assert changed != revision


WEIGHTLESS = {"config.json": CONFIG}
"""As for --load-format=dummy."""
TO_CHOOSE_FROM = {"a-q4.gguf": b"four", "a-q8.gguf": b"eight"}


@pytest.mark.parametrize(
    "files", [{**WEIGHTLESS, "model.safetensors": b"weights"}, WEIGHTLESS, TO_CHOOSE_FROM]
)
def test_a_folder_of_the_users_is_copied_as_it_is_and_given_on(
    site: FilesSite, tmp_path: Path, files: dict[str, bytes]
) -> None:
    own, there = site.folder / "own", "/models/nowhere"
    own.mkdir()
    for name, data in files.items():
        (own / name).write_bytes(data)
    server = NodeFolders({})
    revision = server.take_wish(site.wish(paths=(str(own),)), {}).paths[str(own)]
    wish = site.wish(WantedFolder(folder=there, revision=revision), paths=(there,))
    first, second = site.node("first"), site.node("second")

    def report_at(node: NodeFolders, holder: FolderHolder) -> FolderReport:
        found = node.take_wish(wish, {there: [holder]}).folder(there, revision)
        return found or FolderReport(folder="", state="wanted")

    for node, holder in ((first, ElsewhereHolder(server, own)), (second, first)):
        wait_until(lambda: report_at(node, holder).state in ("whole", "failed"))  # noqa: B023
        assert report_at(node, holder).why == ""
    link = copy_link(str(tmp_path / "second"), there)
    assert {one.name: one.read_bytes() for one in link.iterdir() if one.is_file()} == files


def test_a_node_that_has_the_servers_disk_at_another_path_leaves_it_as_it_is(
    site: FilesSite, tmp_path: Path
) -> None:
    wanted = site.add("a", b"weights")
    heads = site.server.heads("of the server")
    heads.mkdir()
    node = NodeFolders({FILES_VARIABLE: str(site.server.root)})
    site.nodes.append(node)
    wish = replace(site.wish(wanted), root="/where/the/server/has/it")
    found = node.take_wish(wish, {})
    assert (found.shared, found.origin) == (True, True)
    assert heads.is_dir()
    assert not (site.server.root / "node.lock").exists()


@pytest.mark.parametrize(("folder", "name"), [("{whole}", "../../fleet.id"), ("..", "fleet.id")])
def test_nothing_outside_of_models_folders_is_read(site: FilesSite, folder: str, name: str) -> None:
    wanted = site.add("a", b"weights")
    with pytest.raises(SourceFailure, match=r"has no file|is refused"):
        site.holder.read_file(folder.format(whole=wanted.folder), name, 0, 100)


def test_a_folder_that_can_not_be_read_keeps_no_other_from_being_known(
    site: FilesSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(folder)

    wanted = site.add("a", b"weights")
    monkeypatch.setattr("kvmig.launcher.node_folders.list_folder", refuse)
    found = NodeFolders({}).take_wish(site.wish(wanted, paths=("/models/a",)), {})
    assert found.paths == {}
    assert [one.state for one in found.folders] == ["whole"]


def test_only_downloaded_folders_are_elsewhere_on_nodes() -> None:
    assert folder_on_node("/data/files/whole/a", "/data/files", "/own") == "/own/whole/a"
    assert folder_on_node("/data/files/whole/a", "/data/files", "") == "/data/files/whole/a"
    assert folder_on_node("/models/a", "/data/files", "/own") == "/models/a"
    assert folder_on_node("/models/a", "", "/own") == "/models/a"


def test_a_folder_that_takes_long_to_list_delays_no_other_one(
    site: FilesSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, slow = tmp_path / "there", tmp_path / "slow"
    for one in (there, slow):
        one.mkdir()
        (one / "config.json").write_bytes(CONFIG)
    listed, disk = user_folder.list_folder, threading.Event()

    def list_slowly(folder: Path) -> FilesManifest | None:
        assert folder != slow or disk.wait(60)
        return listed(folder)

    monkeypatch.setattr(user_folder, "list_folder", list_slowly)
    node = site.node()
    wish = site.wish(WantedFolder(folder=str(slow), revision="r"), paths=(str(slow), str(there)))
    began = time.monotonic()
    found = node.take_wish(wish, {str(slow): [site.holder]})
    assert time.monotonic() - began < 10, "it answers meanwhile"
    assert found.paths.keys() == {str(there)} == set(found.looked)
    assert found.folder(str(slow)) is None, "nor is it fetched"
    disk.set()
    wait_until(lambda: node.take_wish(wish, {}).paths.keys() == {str(slow), str(there)})
