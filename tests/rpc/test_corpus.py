"""Control sockets: this version reads every recorded message, and its neighbours read its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmig.controlplane.messages import ClusterMessage
from kvmig.kvtransfer.messages import PeerMessage
from kvmig.rpc.codec import MessageCodec
from kvmig.rpc.messages import VERSION, ProtocolVersion
from scripts.corpus import CORPUS, TYPES, example, name_of, recorded

FILES = sorted(CORPUS.glob("[0-9]*/*.msgpack"))
CODEC = MessageCodec(ClusterMessage | PeerMessage)


def version(folder: Path) -> ProtocolVersion:
    major, minor = folder.name.split(".")
    return ProtocolVersion(int(major), int(minor))


def named(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def fields(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(data)
    return found


def contains(newer: object, older: object) -> bool:
    """Whether all that the older one says is in the newer one, which may say more."""
    if isinstance(newer, dict) and isinstance(older, dict):
        return all(key in newer and contains(newer[key], older[key]) for key in older)
    if isinstance(newer, list) and isinstance(older, list):
        return len(newer) == len(older) and all(map(contains, newer, older))
    return newer == older


def test_this_versions_messages_are_those_that_were_recorded() -> None:
    folder = CORPUS / str(VERSION)
    have = {path.stem: path.read_bytes() for path in folder.glob("*.msgpack")}
    now = {name_of(kind): recorded(example(kind)) for kind in TYPES}
    changed = sorted(name for name in now.keys() | have.keys() if now.get(name) != have.get(name))
    assert changed == [], (
        "messages have changed: raise VERSION in kvmig/kvtransfer/messages.py, "
        "unless it isn't released yet, and run python -m scripts.corpus"
    )


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_recorded_message_of_this_major_version_is_read(path: Path) -> None:
    if version(path.parent).major != VERSION.major:
        pytest.skip("of another major version")
    data = path.read_bytes()
    message, payload = CODEC.decode([memoryview(data)])
    assert (name_of(type(message)), payload) == (path.stem, [])
    assert contains(fields(recorded(message)), fields(data))


@pytest.mark.parametrize(
    "path", [one for one in FILES if version(one.parent) != VERSION], ids=named
)
def test_an_older_minor_ignores_what_is_new_in_this_one(path: Path) -> None:
    older = fields(path.read_bytes())
    (kind,) = (one for one in TYPES if name_of(one) == path.stem)
    known = [(one.encode_name, one.type) for one in msgspec.structs.fields(kind)]
    struct = msgspec.defstruct(
        kind.__name__, [one for one in known if one[0] in older], tag_field="type", tag=path.stem
    )
    read = msgspec.msgpack.decode(recorded(example(kind)), type=struct)
    newer, names = example(kind), [name for name, _ in known if name in older]
    assert [getattr(read, name) for name in names] == [getattr(newer, name) for name in names]


@pytest.mark.parametrize(
    ("other", "understood"),
    [
        (VERSION, True),
        (VERSION._replace(minor=VERSION.minor + 1), True),
        (VERSION._replace(minor=VERSION.minor - 1), True),
        (VERSION._replace(minor=VERSION.minor + 2), False),
        (VERSION._replace(major=VERSION.major + 1), False),
    ],
    ids=str,
)
def test_versions_that_differ_by_one_minor_work_together(
    other: ProtocolVersion, understood: bool
) -> None:
    assert VERSION.understands(other) == other.understands(VERSION) == understood
