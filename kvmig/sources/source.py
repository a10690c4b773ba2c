"""The place of a model's files, in one line such as `hf:Qwen/Qwen3-0.6B@main`. Pure."""

from __future__ import annotations

import re
from typing import Literal, cast, get_args
from urllib.parse import urlsplit

import msgspec

from kvmig.core.errors import ConfigError
from kvmig.core.shown_urls import shown_url

Scheme = Literal["hf", "modelscope", "s3", "https", "path"]
SCHEMES: tuple[str, ...] = get_args(Scheme)
FORMS = (
    "hf:ORG/NAME[@REVISION], modelscope:ORG/NAME[@REVISION], s3://BUCKET/FOLDER/,"
    " https://HOST/FOLDER/ or path:FOLDER"
)
PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
REPOSITORY = re.compile(rf"({PART}/)?{PART}")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
HUB_HOSTS = ("huggingface.co", "hf.co")
NEAR_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Hosts from which files may come without TLS."""
MOST_CHARACTERS = 2048


class ModelSource(msgspec.Struct, frozen=True):
    """A place with a model's files."""

    scheme: Scheme
    place: str
    """The repository; the bucket with a folder; the whole URL; or the folder."""
    revision: str = ""
    """Branch, tag or commit of a hub's repository; empty: its main branch."""

    def __str__(self) -> str:
        if self.scheme == "https":
            return self.place
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.scheme}:{'//' * (self.scheme == 's3')}{self.place}{at}"

    @property
    def is_remote(self) -> bool:
        """Whether its files must be fetched before a model can start."""
        return self.scheme != "path"

    @property
    def short_name(self) -> str:
        """The last part of the place, which names the model to people."""
        return self.place.rstrip("/").rpartition("/")[2]


def parse_source(text: str) -> ModelSource:
    """Read a source. Raises ConfigError, which begins with "source is"."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in (*SCHEMES, "http") or len(text) > MOST_CHARACTERS:
        raise wrong(text, f"must be {FORMS}")
    if scheme in ("http", "https"):
        return _url(text)
    if scheme == "s3":
        return _bucket(text, rest)
    if scheme == "path":
        if not rest or "\0" in rest:
            raise wrong(text, "must be path:FOLDER")
        return ModelSource("path", rest)
    return _repository(text, cast("Scheme", scheme), rest)


def is_remote(text: str) -> bool:
    """Whether a source's files must be fetched first. Raises ConfigError."""
    return parse_source(text).is_remote


def wrong(text: str, allowed: str) -> ConfigError:
    """The refusal of a source."""
    return ConfigError(f"source is {shown_url(text)!r:.200}, {allowed}")


def _repository(text: str, scheme: Scheme, rest: str) -> ModelSource:
    place, at, revision = rest.partition("@")
    if REPOSITORY.fullmatch(place) is None or ".." in place or "--" in place:
        raise wrong(text, f"must be {scheme}:ORG/NAME or {scheme}:ORG/NAME@REVISION")
    if scheme == "modelscope" and "/" not in place:
        raise wrong(text, "must be modelscope:ORG/NAME")
    if at and (REVISION.fullmatch(revision) is None or ".." in revision):
        raise wrong(text, "must have a branch, a tag or a commit after @")
    return ModelSource(scheme, place, revision)


def _bucket(text: str, rest: str) -> ModelSource:
    bucket, _, folder = rest.removeprefix("//").partition("/")
    sound = rest.startswith("//") and BUCKET.fullmatch(bucket) and folder.strip("/")
    if not sound or _climbs(folder) or not text.isprintable():
        raise wrong(text, "must be s3://BUCKET/FOLDER/")
    return ModelSource("s3", f"{bucket}/{folder.strip('/')}/")


def _url(text: str) -> ModelSource:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise wrong(text, f"must be https://HOST/FOLDER/: {error}") from error
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        # Whatever is secret in it would stand in the database and in answers.
        said = f"{parts.scheme}://{host}{parts.path}"
        raise wrong(said, "must be a URL without a user, a password, a query and a fragment")
    if not host or not parts.path.strip("/") or _climbs(parts.path) or not text.isprintable():
        raise wrong(text, "must be https://HOST/FOLDER/")
    if parts.scheme == "http" and host not in NEAR_HOSTS:
        raise wrong(text, "must be https: without TLS a model can be changed on the way")
    if host in HUB_HOSTS:
        return _hub_page(text, parts.path)
    return ModelSource("https", text)


def _hub_page(text: str, path: str) -> ModelSource:
    """A model's page at the hub stands for the model."""
    words = path.strip("/").split("/")
    revision = words[3] if len(words) == 4 and words[2] == "tree" else ""
    if len(words) > 2 and not revision:
        raise wrong(text, "must be a model's page, https://huggingface.co/ORG/NAME")
    return _repository(text, "hf", "/".join(words[:2]) + (f"@{revision}" if revision else ""))


def _climbs(path: str) -> bool:
    return ".." in path.split("/")
