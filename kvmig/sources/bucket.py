"""Files of an S3 bucket, by AWS's own library, which takes keys and the endpoint as AWS's tools do:
from the environment, or from files in the home folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004  of this library
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
)
from urllib3.exceptions import HTTPError

from kvmig.sources.digested_file import DigestedFile
from kvmig.sources.downloads import LASTING_STATUSES
from kvmig.sources.file_list import (
    MOST_FILES,
    FileList,
    RemoteFile,
    SourceFailure,
    check_listed,
    state_of,
)
from kvmig.sources.source import ModelSource

PIECE_BYTES = 64 << 10
TIMEOUT_S = 30.0
"""Timeout of a connection, and of each pause in an answer."""
RETRIES = {"total_max_attempts": 3, "mode": "standard"}
"""The library's own, for an answer that does not begin, or is an error that passes."""
MOST_TRIES = 3
"""Tries in a row that bring no byte."""
PAUSE_S = 1.0
"""Pause before a file is gone on with."""
BROKEN = (ConnectionError, HTTPClientError, IncompleteReadError, HTTPError)
"""What a connection that breaks raises."""


class BucketOrigin:
    """A folder of a bucket."""

    secret = ""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._bucket, _, self._folder = source.place.partition("/")

    @cached_property
    def _client(self) -> Any:
        waits = Config(connect_timeout=TIMEOUT_S, read_timeout=TIMEOUT_S, retries=RETRIES)
        return boto3.Session().client("s3", config=waits)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turn errors of the library into reasons."""
        try:
            yield
        except ClientError as error:
            raise self._refusal(error) from error
        except NoCredentialsError as error:
            raise SourceFailure(
                f"{self._source} can't be read without keys: give `kvmig up` AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
                lasting=True,
            ) from error
        except BROKEN as error:  # their words have the endpoint, in which a password may be
            raise SourceFailure(
                f"{self._source}: its server can't be reached, or breaks off"
                f" ({type(error).__name__})"
            ) from error
        except BotoCoreError as error:
            raise SourceFailure(f"{self._source}: {error}", lasting=True) from error

    def _refusal(self, error: ClientError) -> SourceFailure:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = error.response.get("Error", {}).get("Code", "")
        if code == "NoSuchBucket":
            said = f"{self._source}: there is no bucket {self._bucket}"
        elif status == 403:
            said = f"{self._source}: the keys of `kvmig up` may not read it ({code})"
        else:
            said = f"{self._source}: its server answered {status} {code}"
        return SourceFailure(said, lasting=status in LASTING_STATUSES)

    def list_files(self) -> FileList:
        """See `FilesOrigin`."""
        with self._reported():
            files = tuple(self._listed())
        if not files:
            raise SourceFailure(f"{self._source} has no files", lasting=True)
        return FileList(state_of(files), files)

    def _listed(self) -> Iterator[RemoteFile]:
        pages = self._client.get_paginator("list_objects_v2")
        count = 0
        for page in pages.paginate(Bucket=self._bucket, Prefix=self._folder):
            found = page.get("Contents", ())
            count += len(found)
            check_listed(str(self._source), count, MOST_FILES + 1)  # a bucket may have millions
            for one in found:
                name = one["Key"].removeprefix(self._folder)
                if one["Size"] or not one["Key"].endswith("/"):  # else it only marks a folder
                    yield RemoteFile(name, one["Size"], tag=one["ETag"])

    def fetch(self, file: RemoteFile, into: DigestedFile, listed: FileList) -> None:
        """See `FilesOrigin`."""
        tries = 0
        while into.size < file.size:
            begun = into.size
            try:
                self._go_on(file, into)
            except SourceFailure as error:
                if error.lasting or not isinstance(error.__cause__, BROKEN):
                    raise
                tries = 1 if into.size > begun else tries + 1
                if tries == MOST_TRIES:
                    raise
                time.sleep(PAUSE_S)

    def _go_on(self, file: RemoteFile, into: DigestedFile) -> None:
        try:
            with self._reported(), self._opened(file, into.size, file.size) as body:
                for piece in body.iter_chunks(PIECE_BYTES):
                    into.write(piece)
        except ContentChanged:
            into.truncate()
            raise

    def read(self, file: RemoteFile, begin: int, count: int, listed: FileList) -> bytes:
        """See `FilesOrigin`."""
        with self._reported(), self._opened(file, begin, begin + count) as body:
            return bytes(body.read())

    @contextmanager
    def _opened(self, file: RemoteFile, begin: int, end: int) -> Iterator[Any]:
        """The bytes from `begin` up to, without, `end`. Raises ContentChanged, SourceFailure."""
        try:
            found = self._client.get_object(
                Bucket=self._bucket,
                Key=self._folder + file.name,
                Range=f"bytes={begin}-{end - 1}",
                IfMatch=file.tag,
            )
        except ClientError as error:
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (404, 412, 416):
                raise ContentChanged(self._source, file) from error
            raise
        with closing(found["Body"]) as body:
            if found.get("ETag") != file.tag:  # not all servers look at IfMatch
                raise ContentChanged(self._source, file)
            if not str(found.get("ContentRange")).startswith(f"bytes {begin}-{end - 1}/"):
                said = f"{self._source}: its server sends no parts of files"
                raise SourceFailure(said, lasting=True)
            yield body


class ContentChanged(SourceFailure):
    """A file is no longer what was listed: the next try lists it again."""

    def __init__(self, source: ModelSource, file: RemoteFile) -> None:
        super().__init__(f"{source}: {file.name} has changed while it was downloaded")
