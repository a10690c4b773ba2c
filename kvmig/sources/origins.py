"""What a place must be able to do for its files to be fetched, and which library does it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

from kvmig.core.errors import ConfigError
from kvmig.sources.digested_file import DigestedFile
from kvmig.sources.file_list import FileList, RemoteFile
from kvmig.sources.source import ModelSource

PACKAGES = {"s3": ("boto3", "s3"), "modelscope": ("modelscope_hub", "modelscope")}
"""What else must be installed: the package, and the extra of kvmig that has it."""


class FilesOrigin(Protocol):
    """A place with a model's files, for one download."""

    @property
    def secret(self) -> str:
        """The token, which no report may have; empty: none."""
        ...

    def list_files(self) -> FileList:
        """List what is there. Raises SourceFailure, OSError, or the library's own errors."""
        ...

    def fetch(self, file: RemoteFile, into: DigestedFile, listed: FileList) -> None:
        """Write what a file lacks. Raises the same."""
        ...

    def read(self, file: RemoteFile, begin: int, count: int, listed: FileList) -> bytes:
        """Read some bytes of a file. Raises the same."""
        ...


def check_installed(source: ModelSource) -> None:
    """Raises ConfigError where a library that its files need is missing."""
    package, extra = PACKAGES.get(source.scheme, ("", ""))
    if package and find_spec(package) is None:
        raise ConfigError(
            f"source is {str(source)!r:.200}, which needs the package {package}: install"
            f" kvmig[{extra}]"
        )


def origin_of(source: ModelSource, endpoint: str = "") -> FilesOrigin:
    """endpoint: of the hub; empty: as the environment says. Raises ConfigError."""
    check_installed(source)
    match source.scheme:
        case "hf":
            from kvmig.sources.hub import HubOrigin

            return HubOrigin(source, endpoint)
        case "https":
            from kvmig.sources.web import WebOrigin

            return WebOrigin(source)
        case "s3":
            from kvmig.sources.bucket import BucketOrigin

            return BucketOrigin(source)
        case "modelscope":
            from kvmig.sources.modelscope_hub import ModelscopeOrigin

            return ModelscopeOrigin(source)
        case "path":
            raise ConfigError(f"source is {str(source)!r:.200}, which is on this disk already")
