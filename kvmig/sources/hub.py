"""Files of the Hugging Face Hub, or of the server at HF_ENDPOINT that speaks its protocol.

`huggingface_hub` lists and downloads. Its `hf_hub_download` drops what it has when it fails, so its
`http_get` is used, which goes on at any byte of a file that is hashed while it is written.
"""

from __future__ import annotations

import re
from typing import Any

from huggingface_hub import HfApi, get_hf_file_metadata, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._headers import build_hf_headers

from kvmig.sources.digested_file import DigestedFile
from kvmig.sources.downloads import LASTING_STATUSES, PLAIN_HEADERS, read_range, read_rest
from kvmig.sources.file_list import (
    FileList,
    RemoteFile,
    SourceFailure,
    check_count,
    check_name,
)
from kvmig.sources.hops import begun_at
from kvmig.sources.http_client import at_most
from kvmig.sources.source import ModelSource

LIST_S = 60.0
"""Timeout of the list of a repository's files."""
MOST_LIST_BYTES = 64 << 20
"""Longest list of a repository's files: one of 10,000 files takes some 5 MB."""
COMMIT = re.compile(r"[0-9a-f]{7,64}")


class HubOrigin:
    """A repository of the hub."""

    def __init__(self, source: ModelSource, endpoint: str = "") -> None:
        self._source = source
        self._endpoint = endpoint or None
        self._token = get_token()
        self._api = HfApi(
            endpoint=self._endpoint, token=self._token or False, headers=PLAIN_HEADERS
        )

    @property
    def secret(self) -> str:
        """The token, which no report may have; empty: none."""
        return self._token or ""

    def list_files(self) -> FileList:
        """See `FilesOrigin`."""
        source = self._source
        try:
            with begun_at(self._api.endpoint), at_most(MOST_LIST_BYTES):
                info = self._api.model_info(
                    source.place,
                    revision=source.revision or "main",
                    files_metadata=True,
                    timeout=LIST_S,
                )
        except (HfHubHTTPError, OfflineModeIsEnabled) as error:
            raise self._failure(error) from error
        if info.sha is None or COMMIT.fullmatch(info.sha) is None:
            raise SourceFailure(f"{source}: {self._api.endpoint} says no commit")
        found = info.siblings or ()
        check_count(str(source), len(found))  # each may need a call of its own
        files = [self._listed(info.sha, one) for one in found]
        return FileList(info.sha, tuple(files))

    def _listed(self, commit: str, found: Any) -> RemoteFile:
        if found.lfs is not None:
            return RemoteFile(found.rfilename, found.lfs.size, f"sha256:{found.lfs.sha256}")
        if found.size is not None and found.blob_id:
            return RemoteFile(found.rfilename, found.size, f"git:{found.blob_id}")
        check_name(str(self._source), found.rfilename)
        return self._asked(commit, found.rfilename)

    def _asked(self, commit: str, name: str) -> RemoteFile:
        """A file whose size the list doesn't have: some mirrors have no such lists."""
        try:
            found = get_hf_file_metadata(
                self._url(commit, name), token=self._token or False, endpoint=self._endpoint
            )
        except (HfHubHTTPError, OfflineModeIsEnabled) as error:
            raise self._failure(error) from error
        if found.size is None or not found.etag:
            raise SourceFailure(f"{self._source}: {self._api.endpoint} says no size of {name}")
        kind = {64: "sha256:", 40: "git:"}.get(len(found.etag))
        digest = f"{kind}{found.etag}" if kind else ""
        return RemoteFile(name, found.size, digest, "" if digest else found.etag)

    def _url(self, commit: str, name: str) -> str:
        return hf_hub_url(self._source.place, name, revision=commit, endpoint=self._endpoint)

    def fetch(self, file: RemoteFile, into: DigestedFile, listed: FileList) -> None:
        """See `FilesOrigin`."""
        headers = build_hf_headers(token=self._token or False, headers=PLAIN_HEADERS)
        url = self._url(listed.revision, file.name)
        try:
            read_rest(url, file, into, headers)
        except (HfHubHTTPError, OfflineModeIsEnabled) as error:
            raise self._failure(error) from error

    def read(self, file: RemoteFile, begin: int, count: int, listed: FileList) -> bytes:
        """See `FilesOrigin`."""
        headers = build_hf_headers(token=self._token or False, headers=PLAIN_HEADERS)
        try:
            return read_range(self._url(listed.revision, file.name), begin, count, headers)
        except (HfHubHTTPError, OfflineModeIsEnabled) as error:
            raise self._failure(error) from error

    def _failure(self, error: HfHubHTTPError | OfflineModeIsEnabled) -> SourceFailure:
        source, hub = self._source, self._api.endpoint
        match error:
            case OfflineModeIsEnabled():
                said = f"{source} can't be fetched: HF_HUB_OFFLINE is set for this fleet"
                return SourceFailure(said, lasting=True)
            case GatedRepoError():
                page = f"{hub}/{source.place}"
                has = "the fleet's token may not read it" if self._token else "there is no token"
                said = (
                    f"{source} is gated, and {has}: accept its terms at {page}, then give"
                    " `kvmig up` a token in HF_TOKEN or in the file that HF_TOKEN_PATH names"
                )
            case RepositoryNotFoundError():
                said = f"{hub} has no model {source.place}, or it is private and needs a token"
            case RevisionNotFoundError():
                said = f"{hub} has no revision {source.revision!r} of {source.place}"
            case HfHubHTTPError():
                status = error.response.status_code
                said = f"{source}: {hub} answered {status} {error.response.reason_phrase}"
                return SourceFailure(said, lasting=status in LASTING_STATUSES)
        return SourceFailure(said, lasting=True)
