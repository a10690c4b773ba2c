"""Files of ModelScope: listed by its own package, with a SHA-256 each.

Of public models: no token is sent with a download. ModelScope ends a list at a number of files; its
package would then ask folder by folder, up to thousands of times. Models have fewer files."""

from __future__ import annotations

import os
from urllib.parse import quote_plus

from huggingface_hub.errors import HfHubHTTPError

os.environ["MODELSCOPE_REPO_TREE_MAX_REQUESTS"] = "1"  # read when the package is imported

from modelscope_hub import HubApi, get_default_config
from modelscope_hub.constants import REPO_FILES_TRUNCATION_LIMIT
from modelscope_hub.errors import HubError

from kvmig.sources.digested_file import DigestedFile
from kvmig.sources.downloads import PLAIN_HEADERS, read_range, read_rest
from kvmig.sources.file_list import FileList, RemoteFile, SourceFailure, check_listed, state_of
from kvmig.sources.source import ModelSource

MAIN = "master"
"""ModelScope's main branch."""
TOKEN = "MODELSCOPE_API_TOKEN"
"""Environment variable."""


class ModelscopeOrigin:
    """A model of ModelScope."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._revision = source.revision or MAIN
        self._endpoint = str(get_default_config().endpoint).rstrip("/")

    @property
    def secret(self) -> str:
        """The token, which no report may have; empty: none."""
        return os.environ.get(TOKEN, "")

    def list_files(self) -> FileList:
        """See `FilesOrigin`. The files' own digests name the revision: there are no commits."""
        try:
            found = HubApi().list_repo_files(
                self._source.place, "model", revision=self._revision, recursive=True
            )
        except HubError as error:
            raise SourceFailure(f"{self._source}: {error}", lasting=True) from error
        check_listed(str(self._source), len(found), REPO_FILES_TRUNCATION_LIMIT)
        files = tuple(
            RemoteFile(one.path, int(one.size), f"sha256:{one.sha256}" if one.sha256 else "")
            for one in found
            if one.type != "tree"
        )
        return FileList(state_of(files), files)

    def fetch(self, file: RemoteFile, into: DigestedFile, listed: FileList) -> None:
        """See `FilesOrigin`."""
        try:
            read_rest(self._url(file), file, into, PLAIN_HEADERS)
        except HfHubHTTPError as error:
            raise self._failure(error) from error

    def read(self, file: RemoteFile, begin: int, count: int, listed: FileList) -> bytes:
        """See `FilesOrigin`."""
        try:
            return read_range(self._url(file), begin, count, PLAIN_HEADERS)
        except HfHubHTTPError as error:
            raise self._failure(error) from error

    def _url(self, file: RemoteFile) -> str:
        asked = f"Revision={quote_plus(self._revision)}&FilePath={quote_plus(file.name)}"
        return f"{self._endpoint}/api/v1/models/{self._source.place}/repo?{asked}"

    def _failure(self, error: HfHubHTTPError) -> SourceFailure:
        return SourceFailure(f"{self._source}: ModelScope answered {error.response.status_code}")
