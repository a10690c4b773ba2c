"""A mirror between the unmodified client of the hub and a hub that misbehaves."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import pytest
from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

from kvmig.core.errors import ConfigError
from kvmig.mirror import facts
from kvmig.sources.digested_file import DigestedFile
from kvmig.sources.fetch import SourceFetch
from kvmig.sources.files_folder import FilesFolder
from kvmig.sources.origins import origin_of
from kvmig.sources.source import parse_source
from kvmig.sources.speed_floor import SpeedFloor
from tests.support.mirrors import SECRET, MirrorThread
from tests.support.model_hub import TOKEN, HubFaults, ModelHub, git_digest, small_model

NAME, WEIGHTS = "org/small", "model.safetensors"
LARGE = 6_000_000
"""More than what is answered only once it is whole."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    quick = SimpleNamespace(**{**vars(time), "sleep": lambda _: None})
    monkeypatch.setattr("huggingface_hub.file_download.time", quick)  # the hub's own one stays
    monkeypatch.setattr("kvmig.mirror.blob_download.FIRST_PAUSE_S", 0.01)
    with ModelHub() as made:
        made.add(NAME, small_model(LARGE))
        yield made


@pytest.fixture
def mirror(hub: ModelHub, tmp_path: Path) -> Iterator[MirrorThread]:
    with MirrorThread(hub, tmp_path / "mirror") as made:
        yield made


class Client:
    """Downloads into a new cache each time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()

    def snapshot(self, mirror: MirrorThread, name: str = NAME, **more: Any) -> dict[str, bytes]:
        cache = self._folder / str(next(self._numbers))
        more = {"token": False, **more}
        root = Path(snapshot_download(name, endpoint=mirror.url, cache_dir=cache, **more))
        found = (one for one in root.rglob("*") if one.is_file())
        return {str(one.relative_to(root)): one.read_bytes() for one in found}

    def file(self, mirror: MirrorThread, name: str, **more: Any) -> bytes:
        cache = self._folder / str(next(self._numbers))
        more = {"token": False, **more}
        return Path(
            hf_hub_download(NAME, name, endpoint=mirror.url, cache_dir=cache, **more)
        ).read_bytes()


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path / "caches")


def weights_path(hub: ModelHub, revision: str = "") -> str:
    return f"/{NAME}/resolve/{revision or hub.models[NAME].newest}/{WEIGHTS}"


def eventually(true: Callable[[], bool], within_s: float = 10.0) -> None:
    ends = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)


# -- what is served


def test_two_clients_get_all_files_and_the_hub_sends_each_once(
    hub: ModelHub, mirror: MirrorThread, client: Client
) -> None:
    files = small_model(LARGE)
    assert client.snapshot(mirror) == files
    hub.asked.clear()
    assert client.snapshot(mirror) == files
    assert client.snapshot(mirror, revision=hub.models[NAME].newest) == files
    assert hub.asked == [], "a commit that is known is not asked for again"
    assert len(mirror.blobs) == len(files)
    assert mirror.figure('kvmig_hub_downloads_total{place="hub"}') == len(files)


def test_a_commit_is_served_after_a_restart_while_the_hub_is_gone(
    hub: ModelHub, tmp_path: Path, client: Client
) -> None:
    with MirrorThread(hub, tmp_path / "mirror") as first:
        client.snapshot(first, revision=hub.models[NAME].newest)
    hub.faults.statuses = [503] * 1000
    with MirrorThread(hub, tmp_path / "mirror") as second:
        found = client.snapshot(second, revision=hub.models[NAME].newest)
    assert found == small_model(LARGE)


def test_two_revisions_share_files_that_are_the_same(
    hub: ModelHub, mirror: MirrorThread, client: Client
) -> None:
    client.snapshot(mirror)
    before = hub.sent
    changed = {**small_model(LARGE), "config.json": b'{"model_type": "other"}'}
    hub.models[NAME].commit(changed)
    assert client.snapshot(mirror, revision=hub.models[NAME].newest) == changed
    assert hub.sent - before == len(changed["config.json"])


def test_a_branch_is_asked_again_after_a_while_and_is_what_it_was_while_the_hub_is_gone(
    hub: ModelHub, mirror: MirrorThread, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.snapshot(mirror)
    changed = {**small_model(LARGE), "config.json": b"{}"}
    hub.models[NAME].commit(changed)
    assert client.snapshot(mirror) == small_model(LARGE)
    monkeypatch.setattr(facts, "FRESH_S", 0.0)
    assert client.snapshot(mirror) == changed
    hub.faults.statuses = [500] * 1000
    assert client.snapshot(mirror) == changed
    answer = mirror.head(f"/{NAME}/resolve/main/config.json")
    assert answer.status_code == 500, "of this path nothing was known"
    listed = mirror.get(f"/api/models/{NAME}/revision/main")
    assert listed.headers["x-kvmig-mirror"] == "stale"
    assert mirror.figure("kvmig_hub_stale_total") > 0


def test_lists_and_answers_lead_no_client_past_the_mirror(
    hub: ModelHub, mirror: MirrorThread, client: Client
) -> None:
    hub.page = 2
    listed = mirror.get(f"/api/models/{NAME}/tree/main?recursive=true")
    assert "xetHash" not in listed.text
    assert listed.headers["link"].startswith(f"<{mirror.url}/api/models/")
    answer = mirror.head(weights_path(hub))
    data = small_model(LARGE)[WEIGHTS]
    assert answer.status_code == 200
    assert not any("xet" in one for one in answer.headers)
    assert "location" not in answer.headers
    assert answer.headers["x-repo-commit"] == hub.models[NAME].newest
    assert answer.headers["x-linked-etag"] == f'"{hashlib.sha256(data).hexdigest()}"'
    assert answer.headers["x-linked-size"] == answer.headers["content-length"] == str(len(data))
    assert client.snapshot(mirror) == small_model(LARGE)


def test_a_hub_that_keeps_large_files_at_its_own_address_is_mirrored_too(
    hub: ModelHub, mirror: MirrorThread
) -> None:
    hub.large_files = hub.url
    assert mirror.get(weights_path(hub)).content == small_model(LARGE)[WEIGHTS]
    assert len(mirror.blobs) == 1


def test_a_part_of_a_file_is_sent(hub: ModelHub, mirror: MirrorThread, client: Client) -> None:
    client.snapshot(mirror)
    data = small_model(LARGE)[WEIGHTS]
    part = mirror.get(weights_path(hub), range="bytes=1000-1999")
    assert (part.status_code, part.content) == (206, data[1000:2000])
    assert part.headers["content-range"] == f"bytes 1000-1999/{LARGE}"
    assert mirror.get(weights_path(hub), range="bytes=-5").content == data[-5:]
    other = mirror.get(weights_path(hub), **{"range": "bytes=0-9", "if-range": '"other"'})
    assert (other.status_code, len(other.content)) == (200, LARGE)
    assert mirror.get(weights_path(hub), range=f"bytes={LARGE}-").status_code == 416


def test_a_header_of_a_file_is_read_without_the_file(hub: ModelHub, mirror: MirrorThread) -> None:
    part = mirror.get(weights_path(hub), range="bytes=0-7")
    assert part.content == small_model(LARGE)[WEIGHTS][:8]
    assert part.headers["x-kvmig-mirror"] == "passed"
    assert hub.sent < 1_000_000
    assert mirror.blobs == {}


def test_what_is_not_there_is_the_hubs_own_refusal(hub: ModelHub, mirror: MirrorThread) -> None:
    none = mirror.head(f"/{NAME}/resolve/main/none.json")
    assert (none.status_code, none.headers["x-error-code"]) == (404, "EntryNotFound")
    model = mirror.get("/api/models/org/none/revision/main")
    assert (model.status_code, model.headers["x-error-code"]) == (404, "RepoNotFound")


def test_other_calls_are_passed_on(hub: ModelHub, mirror: MirrorThread) -> None:
    found = mirror.get(f"/api/models/{NAME}?blobs=true").json()
    assert found["sha"] == hub.models[NAME].newest
    assert mirror.get("/api/none").status_code == 404
    assert ("GET", "/api/none", "") in hub.asked


def test_a_path_that_the_hub_takes_for_another_is_not_asked_for(
    hub: ModelHub, mirror: MirrorThread
) -> None:
    host = mirror.plain_url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=10)  # which sends paths as they are
    connection.request("GET", "/org/a/resolve/main/../../../small/resolve/main/config.json")
    assert connection.getresponse().status == 400
    connection.close()
    assert hub.asked == []


# -- what goes wrong


def test_wrong_content_of_a_small_file_is_an_error_and_is_asked_for_once_more(
    hub: ModelHub, mirror: MirrorThread
) -> None:
    hub.faults.other_bytes = {"config.json": b'{"model_type": "bad"}'}
    answer = mirror.get(f"/{NAME}/resolve/main/config.json")
    assert answer.status_code == 502
    assert "its digest differs" in answer.headers["x-error-message"]
    assert len(hub.downloads("config.json")) == 2
    assert mirror.figure("kvmig_hub_rejected_total") == 2
    assert mirror.blobs == {}
    hub.faults.other_bytes = {}
    assert mirror.get(f"/{NAME}/resolve/main/config.json").status_code == 502, "for a while"
    assert len(hub.downloads("config.json")) == 2


def test_wrong_content_once_is_never_seen(hub: ModelHub, mirror: MirrorThread) -> None:
    hub.faults.once = {"config.json": [b'{"model_type": "bad"}']}
    answer = mirror.get(f"/{NAME}/resolve/main/config.json")
    assert (answer.status_code, answer.content) == (200, small_model()["config.json"])
    assert mirror.figure("kvmig_hub_rejected_total") == 1


def test_a_client_that_read_wrong_content_never_gets_the_whole_of_it_and_begins_again(
    hub: ModelHub, mirror: MirrorThread, client: Client
) -> None:
    hub.faults.once = {WEIGHTS: [b"x" * LARGE]}
    assert client.file(mirror, WEIGHTS) == small_model(LARGE)[WEIGHTS]
    assert len(hub.downloads(WEIGHTS)) == 2
    part = mirror.get(weights_path(hub), range="bytes=1000-")
    assert (part.status_code, len(part.content)) == (200, LARGE), "nobody goes on with a wrong part"


def test_wrong_content_that_stays_fails_and_nothing_is_kept(
    hub: ModelHub, mirror: MirrorThread, client: Client
) -> None:
    hub.faults.other_bytes = {WEIGHTS: b"x" * LARGE}
    with pytest.raises((HfHubHTTPError, httpx.HTTPError, OSError, LocalEntryNotFoundError)):
        client.file(mirror, WEIGHTS)
    assert mirror.blobs == {}
    eventually(lambda: mirror.figure("kvmig_hub_rejected_total") == 2)


def test_many_clients_read_behind_one_download(
    hub: ModelHub, mirror: MirrorThread, client: Client
) -> None:
    hub.faults.hold_after = 3_000_000
    came: list[int] = []

    def read(_: int) -> bytes:
        with httpx.stream("GET", mirror.url + weights_path(hub), timeout=30) as answer:
            content = b""
            for piece in answer.iter_bytes():
                content += piece
                came.append(len(content))
        return content

    with ThreadPoolExecutor(12) as threads:
        reading = [threads.submit(read, one) for one in range(12)]
        eventually(lambda: max(came, default=0) > 1_000_000)  # before it is whole
        hub.faults.hold_after = None
        hub.faults.held.set()
        found = {hashlib.sha256(one.result(30)).hexdigest() for one in reading}
    assert found == {hashlib.sha256(small_model(LARGE)[WEIGHTS]).hexdigest()}
    assert hub.downloads(WEIGHTS) == [""]


def test_a_download_that_breaks_off_goes_on_and_its_reader_notices_nothing(
    hub: ModelHub, mirror: MirrorThread
) -> None:
    hub.faults.cut_after = {WEIGHTS: [1_000_000, 500_000]}
    answer = mirror.get(weights_path(hub))
    assert answer.content == small_model(LARGE)[WEIGHTS]
    ranges = hub.downloads(WEIGHTS)
    assert len(ranges) == 3
    assert all(int(one.removeprefix("bytes=").rstrip("-")) > 0 for one in ranges[1:])


def test_what_came_before_a_restart_is_gone_on_with(
    hub: ModelHub, tmp_path: Path, client: Client
) -> None:
    hub.faults.hold_after = 3_000_000
    with MirrorThread(hub, tmp_path / "mirror") as first:
        reading = threading.Thread(target=suppressed, args=(first, weights_path(hub)))
        reading.start()
        part = tmp_path / "mirror" / "coming"
        eventually(lambda: any(one.stat().st_size > 2_000_000 for one in part.iterdir()))
    reading.join(20)
    hub.faults.hold_after = None
    hub.faults.held.set()
    with MirrorThread(hub, tmp_path / "mirror") as second:
        assert client.file(second, WEIGHTS) == small_model(LARGE)[WEIGHTS]
    assert int(hub.downloads(WEIGHTS)[-1].removeprefix("bytes=").rstrip("-")) > 2_000_000


def suppressed(mirror: MirrorThread, path: str) -> None:
    """A call whose mirror ends meanwhile."""
    try:
        mirror.get(path)
    except httpx.HTTPError:
        return


def test_a_download_ends_when_nobody_reads_and_what_came_stays(
    hub: ModelHub, mirror: MirrorThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.mirror.hub_mirror.IDLE_S", 0.05)
    monkeypatch.setattr("kvmig.mirror.hub_mirror.LOOK_S", 0.05)
    hub.faults.pause_s = 0.02
    with httpx.stream("GET", mirror.url + weights_path(hub), timeout=30) as answer:
        next(answer.iter_bytes())
    folder = Path(mirror.settings.folder, "coming")
    sizes: list[int] = []

    def stands() -> bool:
        sizes.append(sum(one.stat().st_size for one in folder.iterdir()))
        time.sleep(0.2)
        return len(sizes) > 2 and sizes[-1] == sizes[-2] > 0

    eventually(stands)
    assert sizes[-1] < LARGE
    hub.faults.pause_s = 0.0
    assert mirror.get(weights_path(hub)).content == small_model(LARGE)[WEIGHTS]
    assert int(hub.downloads(WEIGHTS)[-1].removeprefix("bytes=").rstrip("-")) > 0


def test_a_hub_that_drips_fails_within_the_window(
    hub: ModelHub, mirror: MirrorThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvmig.mirror.blob_download.SpeedFloor", lambda: SpeedFloor(0.1, 1_000_000_000)
    )
    hub.faults.pause_s = 0.05
    hub.add("org/other", {"a.safetensors": bytes(4_000_000)})
    answer = mirror.get("/org/other/resolve/main/a.safetensors")
    assert answer.status_code == 504
    assert "it is too slow: " in answer.headers["x-error-message"]


def test_nobody_at_the_hubs_address_is_an_error_that_names_it(tmp_path: Path) -> None:
    with MirrorThread("http://127.0.0.1:9", tmp_path / "m") as mirror:
        answer = mirror.get(f"/{NAME}/resolve/main/config.json")
    assert answer.status_code == 504
    assert "http://127.0.0.1:9 can't be used (ConnectError)" in answer.text


def test_redirects_that_lead_nowhere_or_inside_end(
    hub: ModelHub, mirror: MirrorThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.mirror.blob_download.TRIES", 1)
    hub.faults.leads_to = "http://169.254.169.254/latest"
    answer = mirror.get(weights_path(hub))
    assert answer.status_code == 504
    assert "which is refused" in answer.text


# -- the disk


def test_on_a_full_disk_files_are_passed_on_and_not_kept(
    hub: ModelHub, mirror: MirrorThread, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.mirror.blob_folder.free_bytes", lambda _: 1000)
    assert client.snapshot(mirror) == small_model(LARGE)
    assert mirror.blobs == {}
    assert mirror.figure("kvmig_hub_passed_total") == len(small_model())
    hub.faults.other_bytes = {"config.json": b'{"model_type": "bad"}'}
    answer = mirror.get(f"/{NAME}/resolve/main/config.json")
    assert answer.status_code == 502, "what is passed on is verified, too"


def test_a_disk_that_fills_up_in_the_middle_breaks_no_answer(
    hub: ModelHub, mirror: MirrorThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DigestedFile.write

    def until_full(self: DigestedFile, data: bytes) -> int:
        if self.size + len(data) > 2_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, data)

    monkeypatch.setattr(DigestedFile, "write", until_full)
    assert mirror.get(weights_path(hub)).content == small_model(LARGE)[WEIGHTS]
    assert mirror.blobs == {}
    assert not any(Path(mirror.settings.folder, "coming").iterdir())
    hub.faults.other_bytes = {WEIGHTS: small_model(LARGE)[WEIGHTS][:-1] + b"x"}
    with pytest.raises(httpx.RemoteProtocolError):
        mirror.get(weights_path(hub))


def test_files_go_by_their_last_use_and_pinned_ones_stay(
    hub: ModelHub, tmp_path: Path, client: Client
) -> None:
    def path(name: str) -> str:
        return f"/org/{name}/resolve/main/a.safetensors"

    for name in "abcd":
        hub.add(f"org/{name}", {"a.safetensors": name.encode() * 1_000_000})
    with MirrorThread(hub, tmp_path / "m", most_bytes=3_500_000, pins=("org/a",)) as mirror:
        for name in "abc":
            mirror.get(path(name))
        mirror.get(path("b"))
        mirror.get(path("d"))
        kept = {one[:1].decode() for one in mirror.blobs.values()}
        assert kept == {"a", "b", "d"}
        assert mirror.figure("kvmig_hub_evicted_total") == 1
    with MirrorThread(hub, tmp_path / "m", most_bytes=3_500_000, pins=("org/a",)) as mirror:
        mirror.get(path("c"))
        kept = {one[:1].decode() for one in mirror.blobs.values()}
        assert kept == {"a", "d", "c"}, "the order and the pins outlive a restart"


def test_a_file_that_somebody_removed_is_downloaded_again(
    hub: ModelHub, mirror: MirrorThread
) -> None:
    path = f"/{NAME}/resolve/main/config.json"
    mirror.get(path)
    Path(mirror.settings.folder, "whole", git_digest(small_model()["config.json"])).unlink()
    assert mirror.get(path).content == small_model()["config.json"]


def test_two_mirrors_on_one_folder_are_refused(
    hub: ModelHub, mirror: MirrorThread, tmp_path: Path
) -> None:
    with (
        pytest.raises(ConfigError, match="is in use by process"),
        MirrorThread(hub, tmp_path / "mirror"),
    ):
        pass


# -- who is let in


def test_a_gated_file_that_is_here_is_sent_only_to_those_whom_the_hub_lets_in(
    hub: ModelHub, mirror: MirrorThread, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models[NAME].gated = True
    assert client.snapshot(mirror, token=TOKEN) == small_model(LARGE)
    assert len(mirror.blobs) == len(small_model())
    path = f"/{NAME}/resolve/{hub.models[NAME].newest}/config.json"
    for caller in ({}, {"authorization": "Bearer hf_other"}):
        answer = mirror.get(path, **caller)
        assert (answer.status_code, answer.headers["x-error-code"]) == (401, "GatedRepo")
    with pytest.raises(GatedRepoError):
        client.file(mirror, "config.json", revision=hub.models[NAME].newest)
    right = {"authorization": f"Bearer {TOKEN}"}
    assert mirror.get(path, **right).status_code == 200
    monkeypatch.setattr(facts, "FRESH_S", 0.0)
    hub.faults.statuses = [401] * 10  # the hub has taken it back
    assert mirror.get(path, **right).status_code == 401
    hub.faults.statuses = [500] * 10
    assert mirror.get(path, **right).status_code == 500, "nor is what was known before used"


def test_a_token_goes_to_the_hub_only_and_stays_nowhere(
    hub: ModelHub, mirror: MirrorThread, client: Client
) -> None:
    hub.models[NAME].gated = True
    client.snapshot(mirror, token=TOKEN)
    assert hub.leaked == 0, "it went to another origin"
    kept = [one.read_bytes() for one in Path(mirror.settings.folder).rglob("*") if one.is_file()]
    assert not any(TOKEN.encode() in one for one in kept)


def test_a_mirror_with_a_secret_answers_only_to_those_who_have_its_word(
    hub: ModelHub, tmp_path: Path, client: Client
) -> None:
    with MirrorThread(hub, tmp_path / "m", secret=SECRET) as mirror:
        assert mirror.url != mirror.plain_url
        assert SECRET not in mirror.url
        assert client.snapshot(mirror) == small_model(LARGE)
        digest = git_digest(small_model()["config.json"])
        for path in (f"/{NAME}/resolve/main/config.json", "/metrics", f"/-/blob/{digest}",
                     f"/-/holder/{digest}", f"/wrong/{NAME}/resolve/main/config.json"):  # fmt: skip
            assert httpx.get(mirror.plain_url + path).status_code == 404
        assert httpx.get(f"{mirror.plain_url}/-/health").status_code == 200


def test_without_a_secret_no_call_is_another_mirrors(hub: ModelHub, mirror: MirrorThread) -> None:
    digest = git_digest(small_model()["config.json"])
    mirror.get(f"/{NAME}/resolve/main/config.json")
    answer = httpx.get(f"{mirror.plain_url}/-/blob/{digest}", headers={"x-kvmig-peer": ""})
    assert answer.status_code == 404


# -- all of it together


def test_the_fleets_own_fetcher_reads_through_a_mirror(
    hub: ModelHub, mirror: MirrorThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.sources.hub.get_token", lambda: None)
    source = parse_source(f"hf:{NAME}")
    sizes = []
    for name in ("one", "two"):
        fetch = SourceFetch(source, origin_of(source, mirror.url), FilesFolder(tmp_path / name))
        sizes.append(fetch.run(lambda _: None).size)
    assert sizes[0] == sizes[1] > LARGE
    assert hub.downloads(WEIGHTS) == [""]


def test_a_model_comes_before_anybody_asks_without_files_for_other_programs(
    hub: ModelHub, tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.mirror.prefetch.RETRY_S", 0.05)
    hub.faults.statuses = [503, 200, 503]
    with MirrorThread(hub, tmp_path / "m", prefetch=(NAME,)) as mirror:
        eventually(lambda: len(mirror.blobs) == 4)
        before = hub.sent
        patterns = ["*.json", "*.safetensors"]
        found = client.snapshot(mirror, allow_patterns=patterns, ignore_patterns=["original/*"])
        assert sorted(found) == ["config.json", WEIGHTS, "tokenizer.json"]
        assert hub.sent == before


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_whatever_goes_wrong_no_client_gets_a_wrong_file(
    seed: int, hub: ModelHub, tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmig.mirror.hub_mirror.WRONG_S", 0.0)
    chance, files = random.Random(seed), small_model(LARGE)
    with MirrorThread(hub, tmp_path / "m", most_bytes=15_000_000) as mirror:
        for _ in range(4):
            hub.add(NAME, files)
            hub.faults.statuses = [chance.choice([200, 200, 429, 500, 503]) for _ in range(20)]
            hub.faults.cut_after = {
                name: [chance.randrange(len(data) + 1) for _ in range(chance.randrange(4))]
                for name, data in files.items()
            }
            hub.faults.once = {
                name: [bytes(chance.randrange(256) for _ in range(50)) + data[50:]]
                for name, data in files.items()
                if chance.random() < 0.5
            }
            with ThreadPoolExecutor(4) as threads:
                results = [threads.submit(tried, client, mirror) for _ in range(4)]
            assert all(one.result() in (None, files) for one in results)
        hub.faults = HubFaults()
        assert client.snapshot(mirror) == files
        assert all(name in digests_of(data) for name, data in mirror.blobs.items())


def tried(client: Client, mirror: MirrorThread) -> dict[str, bytes] | None:
    """All files; None: not now."""
    try:
        return client.snapshot(mirror)
    except (httpx.HTTPError, httpx2.HTTPError, OSError):  # the hub's own errors too
        return None


def digests_of(data: bytes) -> set[str]:
    return {git_digest(data), hashlib.sha256(data).hexdigest()}
