"""Files from a bucket, by AWS's library against moto's server: all that can go wrong on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.sources.fetch import SourceFetch
from kvmig.sources.fetcher import reported
from kvmig.sources.file_list import FileList, SourceFailure
from kvmig.sources.messages import (
    FetchFailed,
    FetchListed,
    FetchProgress,
    FetchReport,
    FetchWhole,
)
from kvmig.sources.origins import FilesOrigin, origin_of
from kvmig.sources.source import parse_source
from tests.support.fetching import (
    KEPT,
    WEIGHTS,
    FolderFetching,
    follow_reports,
    start_fetcher,
)
from tests.support.gguf_files import LLAMA, gguf_file
from tests.support.model_hub import small_model

pytest.importorskip("boto3", reason="the extra s3 isn't installed")
pytest.importorskip("moto", reason="there is no S3 server")

from kvmig.sources import bucket
from tests.support.bucket_server import BUCKET, SECRET, TOKEN, BucketServer

SOURCE = f"s3://{BUCKET}/small/"


@pytest.fixture(scope="module")
def server() -> Iterator[BucketServer]:
    with BucketServer() as made:
        yield made


@pytest.fixture
def store(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bucket, "PAUSE_S", 0.0)
    monkeypatch.setattr(bucket, "RETRIES", {"total_max_attempts": 1})
    server.put("small", small_model())
    server.forget()
    yield server
    server.forget()


@pytest.fixture
def fetching(store: BucketServer, tmp_path: Path) -> FolderFetching:
    return FolderFetching(tmp_path / "files", SOURCE)


def test_a_folder_comes_whole_and_none_of_a_folder_with_a_longer_name(
    fetching: FolderFetching, store: BucketServer
) -> None:
    store.put("small-other", {"other.safetensors": b"other"})
    files = fetching.files(fetching.whole())
    assert sorted(files) == KEPT
    assert all(files[one] == small_model()[one] for one in KEPT)


def test_what_is_there_is_looked_up_and_not_downloaded_again(
    fetching: FolderFetching, store: BucketServer
) -> None:
    fetching.whole()
    sent = store.sent
    fetching.whole()
    assert store.sent == sent


def test_empty_objects_that_mark_folders_are_no_files(
    fetching: FolderFetching, store: BucketServer
) -> None:
    store.put("marked", {"": b"", "pooling/": b"", "pooling/config.json": b"{}", **small_model()})
    found = fetching.files(fetching.whole(f"s3://{BUCKET}/marked/"))
    assert sorted(found) == sorted([*KEPT, "pooling/config.json"])


def test_a_file_that_was_stored_in_parts_comes_whole(
    fetching: FolderFetching, store: BucketServer
) -> None:
    data = os.urandom(11 << 20)
    assert store.put_in_parts(f"parts/{WEIGHTS}", data).strip('"').endswith("-3")
    assert fetching.files(fetching.whole(f"s3://{BUCKET}/parts/")) == {WEIGHTS: data}


def test_a_download_that_breaks_off_goes_on_near_its_byte(
    fetching: FolderFetching, store: BucketServer
) -> None:
    data = os.urandom(4_000_000)
    store.put("cut", {WEIGHTS: data})
    store.faults.cut_after = [3_000_000, 500_000]
    assert fetching.files(fetching.whole(f"s3://{BUCKET}/cut/")) == {WEIGHTS: data}
    begins = [int(one[6:].partition("-")[0]) for one in store.downloads(f"cut/{WEIGHTS}")]
    assert begins[0] == 0
    assert begins[1] > 2_900_000
    assert begins[2] > begins[1] + 400_000


def test_a_server_that_is_gone_for_long_leaves_what_came_and_the_next_try_goes_on(
    fetching: FolderFetching, store: BucketServer
) -> None:
    store.faults.cut_after = [100_000] * 4 + [0] * 1000
    failed = fetching.failed()
    assert not failed.lasting
    store.forget()
    fetching.whole()
    assert fetching.listed[-1].done > 0


def test_an_object_that_changes_meanwhile_is_not_mixed(
    fetching: FolderFetching, store: BucketServer
) -> None:
    source = parse_source(SOURCE)
    origin = origin_of(source)
    listed = origin.list_files()
    other = {**small_model(), WEIGHTS: bytes(reversed(small_model()[WEIGHTS]))}
    store.put("small", other)
    fetch = SourceFetch(source, StaleOrigin(origin, listed), fetching.folder)
    failed = reported(SOURCE, lambda: fetch.run(fetching.listed.append))
    assert failed == FetchFailed(f"{SOURCE}: {WEIGHTS} has changed while it was downloaded")
    assert fetching.files(fetching.whole())[WEIGHTS] == other[WEIGHTS]


class StaleOrigin:
    """An origin with an earlier list."""

    def __init__(self, origin: FilesOrigin, listed: FileList) -> None:
        self.secret = ""
        self.fetch, self.read = origin.fetch, origin.read
        self.list_files = lambda: listed


@pytest.mark.parametrize(
    ("status", "said", "lasting"),
    [
        ("403 Forbidden", "the keys of `kvmig up` may not read it", True),
        ("404 Not Found", "its server answered 404", True),
        ("503 Slow Down", "its server answered 503", False),
    ],
)
def test_a_refusal_is_a_reason_without_the_keys(
    fetching: FolderFetching, store: BucketServer, status: str, said: str, lasting: bool
) -> None:
    store.faults.refused = status
    why = fetching.refused(said, lasting=lasting)
    assert not any(one in why for one in (SECRET, TOKEN))


def test_a_bucket_or_a_folder_that_is_not_there_is_named(fetching: FolderFetching) -> None:
    failed = fetching.failed("s3://no-such-bucket/a/")
    assert failed == FetchFailed("s3://no-such-bucket/a/: there is no bucket no-such-bucket", True)
    failed = fetching.failed(f"s3://{BUCKET}/none/")
    assert failed == FetchFailed(f"s3://{BUCKET}/none/ has no files", True)


def test_without_keys_the_reason_names_their_variables(
    fetching: FolderFetching, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    fetching.refused("can't be read without keys: give `kvmig up` AWS_ACCESS_KEY_ID")


def test_nobody_at_the_endpoint_is_a_reason_that_passes(
    fetching: FolderFetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:a-password@127.0.0.1:9")
    said = "its server can't be reached, or breaks off (EndpointConnectionError)"
    assert fetching.failed() == FetchFailed(f"{SOURCE}: {said}")


def test_a_list_ends_where_a_model_is_too_large(
    fetching: FolderFetching, store: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "MOST_FILES", 3)
    assert "has 4 files or more, fewer are fetched" in fetching.failed().why


def test_heads_are_read_by_ranges(fetching: FolderFetching, store: BucketServer) -> None:
    whole = gguf_file(LLAMA, 6_000_000)
    store.put("gguf", {"tiny.gguf": whole})
    store.forget()
    found = fetching.heads(f"s3://{BUCKET}/gguf/").run()
    assert Path(found.folder, "tiny.gguf").stat().st_size == len(whole)
    assert all(one.startswith("bytes=") for one in store.downloads("tiny.gguf"))
    assert store.sent < 3_000_000


def test_heads_of_an_object_that_changes_meanwhile_are_refused(
    fetching: FolderFetching, store: BucketServer
) -> None:
    source = parse_source(SOURCE)
    origin = origin_of(source)
    listed = origin.list_files()
    store.put("small", {**small_model(), WEIGHTS: bytes(reversed(small_model()[WEIGHTS]))})
    (file,) = (one for one in listed.files if one.name == WEIGHTS)
    with pytest.raises(SourceFailure, match="has changed while it was downloaded"):
        origin.read(file, 0, 8, listed)


def is_half_way(report: FetchReport) -> bool:
    return isinstance(report, FetchProgress) and report.done > 500_000


@pytest.mark.long
def test_a_fetcher_that_is_killed_amid_a_slow_download_is_gone_on_with_and_says_no_key(
    store: BucketServer, tmp_path: Path
) -> None:
    store.put("slow", {WEIGHTS: os.urandom(1_000_000)})
    store.faults.hold_after = 700_000
    launch = {"source": f"s3://{BUCKET}/slow/", "root": str(tmp_path)}
    first = start_fetcher(launch)
    reports = follow_reports(first, is_half_way)
    first.kill()
    said = [*first.communicate(timeout=20)]
    store.forget()
    second = start_fetcher(launch)
    reports += follow_reports(second, lambda one: isinstance(one, FetchWhole | FetchFailed))
    said += second.communicate(timeout=20)
    assert isinstance(reports[-1], FetchWhole), reports[-1]
    assert any(isinstance(one, FetchListed) and one.done > 500_000 for one in reports)
    (ranged,) = store.downloads(f"slow/{WEIGHTS}")
    assert int(ranged[6:].partition("-")[0]) > 500_000
    written = [one.read_bytes() for one in tmp_path.rglob("*.json")]
    every = b"".join([*said, *written, repr(reports).encode()])
    assert not any(one.encode() in every for one in (SECRET, TOKEN))
