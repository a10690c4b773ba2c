"""Files from a hub, by the unmodified client of the hub: all that can go wrong on the way."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from huggingface_hub import constants

from kvmig.fleet.gguf_sizes import gguf_sizes
from kvmig.sources import file_list, hub
from kvmig.sources.digested_file import DigestedFile, open_digested
from kvmig.sources.downloads import read_rest
from kvmig.sources.fetcher import hide, plain, reported, secrets_of
from kvmig.sources.file_list import FileList, RemoteFile, SourceFailure, checked_list, chosen
from kvmig.sources.files_folder import COMING
from kvmig.sources.heads import HeadsFetch
from kvmig.sources.messages import (
    FetchFailed,
    FetchHeads,
    FetchLaunch,
    FetchListed,
    FetchProgress,
    FetchWhole,
)
from kvmig.sources.origins import check_installed, origin_of
from kvmig.sources.source import parse_source
from kvmig.sources.web import links_below
from tests.support.fetching import (
    KEPT,
    WEIGHTS,
    FolderFetching,
    follow_reports,
    start_fetcher,
)
from tests.support.gguf_files import LLAMA, gguf_file
from tests.support.model_hub import TOKEN, ModelHub, small_model

NAME = "org/small"
SOURCE = f"hf:{NAME}"
LARGE = 4_000_000
"""More than three pieces of the client's."""


@pytest.fixture
def model_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    # An engine's tests may have forbidden downloads in this process.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 16 << 10)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with ModelHub() as made:
        made.add(NAME, small_model())
        yield made


class HubFetching(FolderFetching):
    """Downloads from the hub."""

    def __init__(self, hub: ModelHub, root: Path) -> None:
        super().__init__(root, SOURCE, hub.url)
        self.hub = hub

    def failed(self, text: str = "") -> FetchFailed:
        found = super().failed(text)
        whole = self.folder.root / "whole"
        assert not whole.exists() or not any(whole.iterdir())
        return found

    def names(self, found: FetchWhole) -> list[str]:
        return sorted(self.files(found))


@pytest.fixture
def fetching(model_hub: ModelHub, tmp_path: Path) -> HubFetching:
    return HubFetching(model_hub, tmp_path / "files")


# -- what is fetched


def test_a_model_comes_whole_with_its_commit_and_without_files_for_other_programs(
    fetching: HubFetching,
) -> None:
    found = fetching.whole()
    folder = fetching.folder.whole(found.folder)
    files = small_model()
    assert fetching.names(found) == KEPT
    assert all((folder / one).read_bytes() == files[one] for one in KEPT)
    assert found.revision == fetching.hub.models[NAME].newest
    assert found.size == sum(len(files[one]) for one in KEPT)
    manifest = json.loads((folder / ".kvmig" / "manifest.json").read_text())
    assert {one["name"]: one["sha256"] for one in manifest["files"]} == {
        one: hashlib.sha256(files[one]).hexdigest() for one in KEPT
    }


def test_a_model_that_is_there_is_looked_up_and_not_downloaded_again(fetching: HubFetching) -> None:
    first, sent = fetching.whole(), fetching.hub.sent
    assert fetching.whole() == first
    assert fetching.hub.sent == sent


def test_a_new_commit_has_a_folder_of_its_own_and_the_old_one_stays(fetching: HubFetching) -> None:
    first = fetching.whole()
    fetching.hub.models[NAME].commit({**small_model(), "config.json": b"{}"})
    second = fetching.whole()
    assert second.folder != first.folder
    assert fetching.whole(f"{SOURCE}@{first.revision}").folder == first.folder


def test_a_mirror_whose_lists_have_no_sizes_is_asked_for_each_file(fetching: HubFetching) -> None:
    fetching.hub.faults.no_sizes = True
    assert fetching.names(fetching.whole()) == KEPT
    assert ("HEAD", f"/{NAME}/resolve/{fetching.hub.models[NAME].newest}/{WEIGHTS}", "") in (
        fetching.hub.asked
    )


def test_a_web_servers_folder_is_followed_by_its_links(fetching: HubFetching) -> None:
    fetching.hub.add("plain", {**small_model(), "pooling/config.json": b"{}"})
    found = fetching.whole(f"{fetching.hub.url}/web/plain/")
    assert fetching.names(found) == [*KEPT[:2], WEIGHTS, "pooling/config.json", "tokenizer.json"]


def test_one_file_of_a_web_server_is_a_model(fetching: HubFetching) -> None:
    fetching.hub.add("plain", {"tiny.gguf": b"GGUF" * 100})
    assert fetching.names(fetching.whole(f"{fetching.hub.url}/web/plain/tiny.gguf")) == [
        "tiny.gguf"
    ]


def test_a_link_that_is_no_url_is_left_out() -> None:
    text = '<a href="http://[">broken</a> <a href="config.json">config</a>'
    assert links_below("https://a.example/m/", text) == ["https://a.example/m/config.json"]


@pytest.mark.parametrize("error", [KeyError("sha"), TypeError("None"), AttributeError("lfs")])
def test_an_answer_that_no_library_understands_is_a_reason(error: Exception) -> None:
    def run() -> FetchWhole:
        raise error

    said = reported("hf:a/b", run)
    assert said == FetchFailed(
        f"hf:a/b: what it answers can't be understood ({type(error).__name__})"
    )


def test_an_answer_that_takes_too_much_memory_is_a_lasting_failure() -> None:
    def run() -> FetchWhole:
        raise MemoryError

    failed = reported("hf:a/b", run)
    assert isinstance(failed, FetchFailed)
    assert failed == FetchFailed(
        f"hf:a/b: what it answers takes more than {2 << 30} bytes of memory", True
    )


def test_a_fetcher_cannot_take_more_memory_than_is_meant_for_it() -> None:
    script = (
        "from kvmig.sources.fetcher import bound_memory\n"
        "bound_memory()\n"
        "try:\n    bytearray(3 << 30)\n"
        "except MemoryError:\n    print('refused')"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "refused"


@pytest.mark.parametrize("most", [3000, 3])
def test_a_model_of_modelscope_comes_by_its_packages_list_if_that_is_whole(
    fetching: HubFetching, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The package is not installed here: this one has of it what is used."""
    files = small_model()

    class Listed(NamedTuple):
        path: str
        size: int
        sha256: str
        type: str = "blob"

    class Api:
        def list_repo_files(self, *_: Any, revision: str, recursive: bool) -> list[Listed]:
            assert (revision, recursive) == ("master", True)
            folder = Listed("original", 0, "", "tree")
            every = [
                Listed(one, len(data), hashlib.sha256(data).hexdigest())
                for one, data in files.items()
            ]
            return [folder, *every]

    package, errors = ModuleType("modelscope_hub"), ModuleType("modelscope_hub.errors")
    config = SimpleNamespace(endpoint=f"{fetching.hub.url}/modelscope")
    package.__dict__.update(HubApi=Api, get_default_config=lambda: config)
    errors.__dict__.update(HubError=RuntimeError)
    monkeypatch.setitem(sys.modules, "modelscope_hub", package)
    constants = ModuleType("modelscope_hub.constants")
    constants.__dict__.update(REPO_FILES_TRUNCATION_LIMIT=most)
    monkeypatch.setitem(sys.modules, "modelscope_hub.errors", errors)
    monkeypatch.setitem(sys.modules, "modelscope_hub.constants", constants)
    monkeypatch.delitem(sys.modules, "kvmig.sources.modelscope_hub", raising=False)
    monkeypatch.setattr("kvmig.sources.origins.find_spec", lambda _: True)
    source = f"modelscope:{NAME}"
    if most == 3:  # ModelScope ends its lists there
        assert "has 3 files or more, fewer are fetched" in fetching.failed(source).why
    else:
        assert fetching.names(fetching.whole(source)) == KEPT


@pytest.mark.parametrize(
    ("text", "package"), [("s3://bucket/a/", "boto3"), ("modelscope:a/b", "modelscope_hub")]
)
def test_a_source_whose_package_is_missing_is_refused_by_name(
    text: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.sources.origins.find_spec", lambda _: None)
    with pytest.raises(Exception, match=f"needs the package {package}: install kvmig"):
        check_installed(parse_source(text))


# -- what goes wrong


def test_a_download_that_breaks_off_goes_on_at_its_byte(fetching: HubFetching) -> None:
    fetching.hub.faults.cut_after = {WEIGHTS: [100_000, 50_000]}
    fetching.whole()
    assert fetching.hub.downloads(WEIGHTS) == ["", "bytes=98304-", "bytes=147456-"]


def test_a_hub_that_is_gone_for_long_leaves_what_came_and_the_next_try_goes_on(
    fetching: HubFetching,
) -> None:
    fetching.hub.faults.cut_after = {WEIGHTS: [100_000] + [0] * 20}
    failed = fetching.failed()
    assert not failed.lasting
    placed = [one.name for one in fetching.folder.root.glob("part/*/*.json")]  # before it failed
    fetching.hub.faults.cut_after = {}
    fetching.hub.asked.clear()
    fetching.whole()
    (ranged,) = fetching.hub.downloads(WEIGHTS)
    assert int(ranged.removeprefix("bytes=").rstrip("-")) > 0
    assert fetching.listed[-1].done > 0
    assert not any(fetching.hub.downloads(one) for one in placed)


def test_wrong_bytes_are_dropped_with_a_reason_and_never_become_a_model(
    fetching: HubFetching,
) -> None:
    right = small_model()[WEIGHTS]
    fetching.hub.faults.other_bytes = {WEIGHTS: b"x" * len(right)}
    fetching.refused(f"{SOURCE}: {WEIGHTS} is not what its source lists")
    fetching.hub.faults.other_bytes = {}
    fetching.whole()
    assert fetching.hub.downloads(WEIGHTS)[-1] == ""


def test_what_was_begun_and_changed_on_the_disk_is_found_by_its_digest(
    fetching: HubFetching,
) -> None:
    fetching.hub.faults.cut_after = {WEIGHTS: [100_000] + [0] * 20}
    fetching.failed()
    (name,) = (one.name for one in (fetching.folder.root / "part").iterdir())
    begun = (fetching.folder.part(name) / COMING).iterdir()
    coming = max(begun, key=lambda one: one.stat().st_size)
    with coming.open("r+b") as file:
        file.write(b"changed")
    fetching.hub.faults.cut_after = {}
    assert "is not what its source lists" in fetching.failed().why
    fetching.whole()


def test_a_gated_model_says_what_to_do_and_comes_with_a_token(
    fetching: HubFetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching.hub.models[NAME].gated = True
    said = "hf:org/small is gated, and there is no token: accept its terms at"
    assert "HF_TOKEN" in fetching.refused(said)
    monkeypatch.setattr(hub, "get_token", lambda: TOKEN)
    fetching.whole()
    assert fetching.hub.leaked == 0, "the token went to another origin"


def test_a_token_stands_in_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: TOKEN)
    origin = origin_of(parse_source(SOURCE))
    assert hide(f"the header was Bearer {TOKEN}", secrets_of(origin)) == "the header was Bearer ***"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("hf:org/none", "has no model org/none, or it is private and needs a token"),
        (f"{SOURCE}@none", "has no revision 'none' of org/small"),
    ],
)
def test_a_model_or_revision_that_is_not_there_is_named(
    fetching: HubFetching, source: str, said: str
) -> None:
    fetching.refused(said, source)


def test_a_hub_that_is_too_busy_is_tried_again_later(fetching: HubFetching) -> None:
    fetching.hub.faults.statuses = [429]
    fetching.refused("answered 429 Too Many Requests", lasting=False)
    fetching.whole()


def test_a_busy_hub_in_the_middle_is_asked_again_at_once(fetching: HubFetching) -> None:
    fetching.hub.faults.statuses = [200, 200, 429]
    fetching.whole()


def test_redirects_that_lead_nowhere_end(fetching: HubFetching) -> None:
    fetching.hub.faults.loops = True
    assert "TooManyRedirects" in fetching.failed().why


def test_nobody_at_the_hubs_address_is_a_reason(fetching: HubFetching) -> None:
    fetching.hub_url = "http://127.0.0.1:9"
    fetching.refused("ConnectError", lasting=False)


def test_without_the_network_by_choice_the_reason_says_so(
    fetching: HubFetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in fetching.failed().why


def test_a_disk_that_fills_up_in_the_middle_keeps_what_came(
    fetching: HubFetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DigestedFile.write

    def until_full(self: DigestedFile, data: bytes) -> int:
        if self.size + len(data) > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(DigestedFile, "write", until_full)
        failed = fetching.failed()
    assert "is full (No space left on device): " in failed.why
    assert f"bytes more are needed for {WEIGHTS} alone" in failed.why
    fetching.whole()


def test_a_disk_that_takes_a_part_of_a_piece_gets_the_rest_and_each_byte_is_hashed_once(
    tmp_path: Path,
) -> None:
    class SmallWrites(FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:1000])

    data = small_model()[WEIGHTS]
    wanted = RemoteFile(WEIGHTS, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}")
    counted: list[int] = []
    (tmp_path / "a").touch()
    with DigestedFile(SmallWrites(tmp_path / "a", "r+b"), wanted, counted.append) as file:
        assert file.write(data) == len(data)
        assert file.is_right
    assert (tmp_path / "a").read_bytes() == data
    assert sum(counted) == len(data)


@pytest.mark.parametrize("no_tags", [False, True])
def test_a_file_that_changes_at_a_web_server_meanwhile_is_not_mixed(
    fetching: HubFetching, no_tags: bool
) -> None:
    plain = fetching.hub.add("plain", small_model())
    source = f"{fetching.hub.url}/web/plain/"
    fetching.hub.faults.no_tags = no_tags
    fetching.hub.faults.cut_after = {WEIGHTS: [100_000] + [0] * 20}
    fetching.failed(source)
    other = bytes(reversed(small_model()[WEIGHTS]))
    plain.commit({**small_model(), WEIGHTS: other})
    fetching.hub.faults.cut_after = {}
    found = fetching.whole(source)
    assert (fetching.folder.whole(found.folder) / WEIGHTS).read_bytes() == other


def test_a_file_of_more_than_50_gb_is_asked_for(model_hub: ModelHub, tmp_path: Path) -> None:
    model_hub.add("plain", small_model())
    large = RemoteFile(WEIGHTS, 60 << 30)
    url = f"{model_hub.url}/web/plain/{WEIGHTS}"
    with (
        open_digested(tmp_path / "a", large, lambda _: None) as into,
        pytest.raises(OSError, match="Consistency check failed"),  # it is not as large as that
    ):
        read_rest(url, large, into, {})
    assert model_hub.sent == len(small_model()[WEIGHTS])


def test_a_file_that_is_longer_than_listed_takes_no_more_room_than_listed(
    fetching: HubFetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = DigestedFile.write

    def recorded(self: DigestedFile, data: bytes) -> int:
        done = write(self, data)
        sizes.append(self.size)
        return done

    monkeypatch.setattr(DigestedFile, "write", recorded)
    right = small_model()[WEIGHTS]
    fetching.hub.faults.other_bytes = {WEIGHTS: right + bytes(3_000_000)}
    fetching.refused(f"{WEIGHTS} is not what its source lists: more than {len(right)} bytes")
    assert max(sizes) <= len(right)


def test_a_whole_folder_that_has_lost_a_file_is_fetched_again(fetching: HubFetching) -> None:
    first = fetching.whole()
    (fetching.folder.whole(first.folder) / "config.json").unlink()
    assert fetching.whole() == first
    assert fetching.names(first) == KEPT


def test_a_reason_is_one_line_that_a_terminal_can_show() -> None:
    assert plain("a\x1b[2Jb\nc" + "d" * 10_000) == "a [2Jb c" + "d" * 1992


@pytest.mark.parametrize("place", ["hub", "web"])
def test_a_redirect_to_what_has_no_tls_is_refused(fetching: HubFetching, place: str) -> None:
    fetching.hub.add("plain", small_model())
    fetching.hub.faults.leads_to = "http://169.254.169.254/latest/meta-data/?secret"
    source = SOURCE if place == "hub" else f"{fetching.hub.url}/web/plain/"
    said = "leads to http://169.254.169.254, which is refused: without TLS"
    assert "secret" not in fetching.refused(said, source)


@pytest.mark.parametrize("place", ["hub", "web"])
def test_a_redirect_by_tls_from_a_public_server_into_this_network_is_refused(
    fetching: HubFetching, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"127.0.0.1": ["127.0.0.1"], "inside.example": ["10.0.0.7"]}
    monkeypatch.setattr("kvmig.sources.http_client.addresses_of", lambda host: known[host])
    monkeypatch.setattr("kvmig.sources.hops.is_inside", lambda address: address == "10.0.0.7")
    fetching.hub.add("plain", small_model())
    fetching.hub.faults.leads_to = "https://inside.example/secrets?word"
    source = SOURCE if place == "hub" else f"{fetching.hub.url}/web/plain/"
    said = "leads to https://inside.example, which is refused: it is an address of"
    assert "word" not in fetching.refused(said, source)


def test_a_list_that_does_not_end_is_refused_by_its_bytes(
    fetching: HubFetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.sources.hub.MOST_LIST_BYTES", 500)
    fetching.refused("answers with more than 500 bytes, which is no list of a model's files")


def test_a_web_servers_folders_end(fetching: HubFetching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmig.sources.web.MOST_FOLDERS", 3)
    fetching.hub.add("plain", small_model() | {f"f{at}/a.json": b"" for at in range(3)})
    assert "has more than 3 folders" in fetching.failed(f"{fetching.hub.url}/web/plain/").why


# -- heads


def with_header(weights: int) -> dict[str, bytes]:
    """A model whose weights are a safetensors file."""
    tensor = {"dtype": "BF16", "shape": [weights // 2], "data_offsets": [0, weights]}
    header = json.dumps({"a": tensor}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(weights)
    return {**small_model(), WEIGHTS: whole}


def test_heads_have_headers_and_sizes_and_take_no_room(fetching: HubFetching) -> None:
    files = with_header(30_000_000)
    fetching.hub.add(NAME, files)
    heads = fetching.heads()
    found = heads.run()
    path = Path(found.folder, WEIGHTS)
    assert path.stat().st_size == len(files[WEIGHTS])
    assert path.stat().st_blocks * 512 < 100_000
    begin = 8 + int.from_bytes(files[WEIGHTS][:8], "little")
    assert path.read_bytes()[:begin] == files[WEIGHTS][:begin]
    assert Path(found.folder, "config.json").read_bytes() == files["config.json"]
    assert fetching.hub.sent < 100_000
    assert heads.run() == found


def test_of_two_who_make_the_same_heads_the_second_takes_those_of_the_first(
    fetching: HubFetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetching.hub.add(NAME, with_header(1000))
    source = parse_source(SOURCE)
    slow, fast = (origin_of(source, fetching.hub_url) for _ in range(2))
    fetch, first = slow.fetch, list[FetchHeads]()

    def fetch_late(file: RemoteFile, into: DigestedFile, listed: FileList) -> None:
        if not first:
            first.append(HeadsFetch(source, fast, fetching.folder).run())
        fetch(file, into, listed)

    monkeypatch.setattr(slow, "fetch", fetch_late)
    found = HeadsFetch(source, slow, fetching.folder).run()
    assert [found] == first
    assert not any((fetching.folder.root / "gone").iterdir())


def test_heads_of_a_gguf_file_are_its_header_and_a_hole(fetching: HubFetching) -> None:
    whole = gguf_file(LLAMA, 30_000_000)
    fetching.hub.add("plain", {"tiny.gguf": whole})
    found = fetching.heads(f"{fetching.hub.url}/web/plain/tiny.gguf").run()
    path = Path(found.folder, "tiny.gguf")
    assert path.stat().st_size == len(whole)
    assert path.stat().st_blocks * 512 < 3_000_000
    sizes = gguf_sizes(found.folder)
    assert sizes is not None
    assert sizes.weights == 30_000_000 // 256 * 256
    assert fetching.hub.sent < 3_000_000


def test_heads_of_what_is_no_safetensors_file_are_refused(fetching: HubFetching) -> None:
    heads = fetching.heads()
    with pytest.raises(SourceFailure, match=f"{WEIGHTS} is no safetensors file: its header is"):
        heads.run()
    assert not any((fetching.folder.root / "gone").iterdir())


# -- lists


def listed(*names: str) -> FileList:
    return FileList("abc", tuple(RemoteFile(one, 1) for one in names))


@pytest.mark.parametrize(
    "name", ["../x.bin", "/etc/x.bin", "a/../../x.bin", ".kvmig/x.bin", "a\nb", ".", "", "a" * 256]
)
def test_a_name_that_would_leave_the_folder_is_refused(name: str) -> None:
    with pytest.raises(SourceFailure, match="which is refused"):
        checked_list(SOURCE, listed("model.safetensors", name))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a.json", "a.json"), "lists 'a.json' twice"),
        (("a", "a/b.json"), "lists 'a' as a file and as a folder"),
    ],
)
def test_files_that_would_have_one_place_are_refused(names: tuple[str, ...], said: str) -> None:
    with pytest.raises(SourceFailure, match=said):
        checked_list(SOURCE, listed("model.safetensors", *names))


def test_a_size_below_zero_is_refused_since_it_would_make_room() -> None:
    found = FileList("abc", (RemoteFile("a.safetensors", 5), RemoteFile("b.json", -(1 << 40))))
    with pytest.raises(SourceFailure, match=r"lists b\.json with -1099511627776 bytes"):
        checked_list(SOURCE, found)


def test_a_repository_without_weights_is_refused() -> None:
    with pytest.raises(SourceFailure, match="has no file with weights"):
        checked_list(SOURCE, listed("README.md", "config.json"))


def test_of_several_gguf_files_one_must_be_chosen() -> None:
    with pytest.raises(SourceFailure, match="has 2 GGUF files, one of which must be chosen"):
        checked_list(SOURCE, listed("a-q4.gguf", "a-q8.gguf", "README.md"))


def test_weights_that_are_there_twice_come_once() -> None:
    names = [
        "model-00001-of-00002.safetensors", "consolidated.safetensors", "pytorch_model.bin",
        "tf_model.h5", "onnx/model.onnx", "sparse_linear.pt", "tokenizer.model",
    ]  # fmt: skip
    kept = [one.name for one in chosen(listed(*names).files)]
    assert kept == ["model-00001-of-00002.safetensors", "sparse_linear.pt", "tokenizer.model"]
    assert file_list.state_of(listed("a").files) != file_list.state_of(listed("b").files)


# -- the process


def started(hub: ModelHub, root: Path, **more: str) -> subprocess.Popen[bytes]:
    launch = {"source": SOURCE, "root": str(root), **more}
    return start_fetcher(launch, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0", HF_TOKEN=TOKEN)


def ended(child: subprocess.Popen[bytes], *, by_itself: bool = False) -> int:
    if by_itself:
        child.wait(20)
    for pipe in (child.stdin, child.stdout, child.stderr):
        assert pipe is not None
        pipe.close()
    return child.wait(20)


def test_a_fetcher_that_is_killed_in_the_middle_is_gone_on_with(
    model_hub: ModelHub, tmp_path: Path
) -> None:
    model_hub.add(NAME, small_model(LARGE))
    model_hub.faults.hold_after = 3_500_000
    first = started(model_hub, tmp_path)
    follow_reports(first, lambda one: isinstance(one, FetchProgress) and one.done > 2_000_000)
    first.send_signal(signal.SIGKILL)
    assert ended(first) == -signal.SIGKILL
    assert not any((tmp_path / "whole").iterdir())

    model_hub.faults.hold_after = None
    model_hub.faults.held.set()
    model_hub.asked.clear()
    second = started(model_hub, tmp_path)
    reports = follow_reports(second, lambda one: isinstance(one, FetchWhole | FetchFailed))
    assert ended(second, by_itself=True) == 0

    assert isinstance(reports[-1], FetchWhole), reports[-1]
    (listing,) = (one for one in reports if isinstance(one, FetchListed))
    assert listing.done > 2_000_000
    (ranged,) = model_hub.downloads(WEIGHTS)
    assert int(ranged.removeprefix("bytes=").rstrip("-")) > 2_000_000


@pytest.mark.long
def test_a_fetcher_ends_with_its_server(model_hub: ModelHub, tmp_path: Path) -> None:
    model_hub.faults.hold_after = 100_000
    child = started(model_hub, tmp_path)
    follow_reports(child, lambda one: isinstance(one, FetchListed))
    assert ended(child) != 0


@pytest.mark.long
def test_a_launch_shows_no_more_than_its_type() -> None:
    assert repr(FetchLaunch(source=SOURCE, root="/secret")) == "<FetchLaunch>"


@pytest.mark.long
def test_why_a_download_failed_has_no_password_of_the_hubs_address(
    model_hub: ModelHub, tmp_path: Path
) -> None:
    hub = model_hub.url.replace("http://", "http://me:pw@")
    child = started(model_hub, tmp_path, source="hf:org/none", endpoint=hub)
    failed = follow_reports(child, lambda one: isinstance(one, FetchFailed))[-1]
    ended(child)
    assert isinstance(failed, FetchFailed)
    assert "127.0.0.1" in failed.why
    assert ":pw@" not in failed.why, failed.why
