"""Downloads of models' files into a folder of the tests' own, in this process or in a fetcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvmig.sources.fetch import SourceFetch
from kvmig.sources.fetcher import reported
from kvmig.sources.files_folder import FilesFolder
from kvmig.sources.heads import HeadsFetch
from kvmig.sources.messages import (
    FetchFailed,
    FetchHeads,
    FetchListed,
    FetchReport,
    FetchWhole,
    report_of,
)
from kvmig.sources.origins import origin_of
from kvmig.sources.source import parse_source

WEIGHTS = "model.safetensors"
KEPT = ["README.md", "config.json", WEIGHTS, "tokenizer.json"]
"""What is fetched of `small_model`."""


class FolderFetching:
    """Downloads into one folder. source: what is fetched unless a test says otherwise."""

    def __init__(self, root: Path, source: str, hub: str = "") -> None:
        self.folder = FilesFolder(root)
        self.source = source
        self.hub_url = hub
        self.listed: list[FetchListed] = []

    def __call__(self, text: str = "") -> FetchWhole | FetchFailed:
        text = text or self.source
        source = parse_source(text)
        fetch = SourceFetch(source, origin_of(source, self.hub_url), self.folder)
        found = reported(text, lambda: fetch.run(self.listed.append))
        assert not isinstance(found, FetchHeads)
        return found

    def whole(self, text: str = "") -> FetchWhole:
        found = self(text)
        assert isinstance(found, FetchWhole), found
        return found

    def failed(self, text: str = "") -> FetchFailed:
        found = self(text)
        assert isinstance(found, FetchFailed), found
        return found

    def refused(self, said: str, text: str = "", *, lasting: bool = True) -> str:
        """Why it fails: among others this. lasting: whether another try would be in vain."""
        found = self.failed(text)
        assert said in found.why
        assert found.lasting is lasting
        return found.why

    def heads(self, text: str = "") -> HeadsFetch:
        source = parse_source(text or self.source)
        return HeadsFetch(source, origin_of(source, self.hub_url), self.folder)

    def files(self, found: FetchWhole) -> dict[str, bytes]:
        """Without those that kvmig adds."""
        folder = self.folder.whole(found.folder)
        return {
            str(one.relative_to(folder)): one.read_bytes()
            for one in sorted(folder.rglob("*"))
            if one.is_file() and ".kvmig" not in one.parts
        }


def start_fetcher(launch: Mapping[str, str], **more: str) -> subprocess.Popen[bytes]:
    """A fetcher's process. more: of its environment."""
    child = subprocess.Popen(
        [sys.executable, "-m", "kvmig.sources.fetcher"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **more},
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(launch).encode() + b"\n")
    child.stdin.flush()
    return child


def follow_reports(
    child: subprocess.Popen[bytes], enough: Callable[[FetchReport], bool]
) -> list[FetchReport]:
    """Reports up to the first one that is enough; it gets room."""
    assert child.stdin is not None
    assert child.stdout is not None
    found: list[FetchReport] = []
    for line in child.stdout:
        found.append(report_of(line))
        if isinstance(found[-1], FetchListed):
            child.stdin.write(b"\n")
            child.stdin.flush()
        if enough(found[-1]):
            break
    return found
