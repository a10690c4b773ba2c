"""Records one message of each type as this version puts it on the wire: `python -m scripts.corpus`.

tests/corpus/MAJOR.MINOR/ has those of control sockets, by version; recorded versions are never
changed: a message that changes needs a new version (kvmig/kvtransfer/messages.py), and this script
run once. Each protocol between processes of one host has a folder by its name (`PROTOCOLS`): these
processes are of one version, so the folder holds what travels now, with its frame. A file a type,
named by its tag.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import inspect

from kvmig.accounts.allowances import TokenGrant, TokenRequest
from kvmig.accounts.usage import HAND_OVER, HandOver
from kvmig.controlplane.messages import ClusterMessage
from kvmig.fleet.orders import News, Order
from kvmig.kvtransfer.messages import PeerMessage
from kvmig.process.fork_server import ForkNews, ForkOrder
from kvmig.proxy.messages import Down, Up
from kvmig.rpc.messages import VERSION, RpcMessage
from kvmig.sharing.messages import ToAgent, ToMember
from kvmig.sources.messages import FetchLaunch, FetchReport

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "corpus"
TYPES: tuple[type[RpcMessage], ...] = tuple(
    dict.fromkeys((*get_args(ClusterMessage), *get_args(PeerMessage)))
)
"""All messages of control sockets."""
LENGTH_BYTES = 4
Struct = TypeVar("Struct", bound=msgspec.Struct)


class Framing(NamedTuple):
    """How a message becomes the bytes that travel, and what they are read as."""

    write: Callable[[Any], bytes]
    read: Callable[[bytes, Any], Any]
    suffix: str


def _with_length(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _after_length(data: bytes, kind: Any) -> Any:
    size, body = int.from_bytes(data[:LENGTH_BYTES], "big"), data[LENGTH_BYTES:]
    if size != len(body):
        raise ValueError(f"the length is {size}, must be {len(body)}")
    return msgspec.msgpack.decode(body, type=kind)


def _line(message: msgspec.Struct) -> bytes:
    prefix = HAND_OVER if isinstance(message, HandOver) else b""
    return prefix + msgspec.json.encode(message) + b"\n"


PACKETS = Framing(
    msgspec.msgpack.encode, lambda data, kind: msgspec.msgpack.decode(data, type=kind), "msgpack"
)
"""A packet each."""
LENGTHS = Framing(_with_length, _after_length, "bin")
LINES = Framing(
    _line, lambda data, kind: msgspec.json.decode(data.removeprefix(HAND_OVER), type=kind), "jsonl"
)


class LocalProtocol(NamedTuple):
    """One between processes of a host. unions: what either end reads."""

    framing: Framing
    unions: tuple[Any, ...]

    def kinds(self) -> Iterator[tuple[type[msgspec.Struct], Any]]:
        """Each type of message, and the union that it is read as."""
        for union in self.unions:
            for kind in get_args(union) or (union,):
                yield kind, union


PROTOCOLS: Mapping[str, LocalProtocol] = {
    "unit": LocalProtocol(PACKETS, (ToAgent, ToMember)),
    "proxies": LocalProtocol(LENGTHS, (Down, Up)),
    "fleet-orders": LocalProtocol(PACKETS, (Order, News)),
    "quotas": LocalProtocol(LINES, (TokenRequest, TokenGrant, HandOver)),
    "fork-server": LocalProtocol(PACKETS, (ForkOrder, ForkNews)),
    "fetcher": LocalProtocol(LINES, (FetchLaunch, FetchReport)),
}
"""By folder."""


def example(kind: type[Struct]) -> Struct:
    """One with every field filled in, the same each time."""
    message = _value(inspect.type_info(kind))
    assert isinstance(message, kind)
    return message


def name_of(kind: type[msgspec.Struct]) -> str:
    """The message's name on the wire: its tag, which a renamed class keeps."""
    tag = kind.__struct_config__.tag
    return tag if isinstance(tag, str) else kind.__name__


def recorded(message: RpcMessage) -> bytes:
    """As it travels on a control socket."""
    return msgspec.msgpack.encode(message)


def local_messages(protocol: LocalProtocol) -> dict[str, bytes]:
    """What travels now, by file."""
    framing = protocol.framing
    return {
        f"{name_of(kind)}.{framing.suffix}": framing.write(example(kind))
        for kind, _ in protocol.kinds()
    }


PLAIN: dict[type[inspect.Type], object] = {
    inspect.BoolType: True,
    inspect.IntType: 7,
    inspect.FloatType: 1.5,
    inspect.StrType: "text",
    inspect.BytesType: b"bytes",
}


def _value(kind: inspect.Type) -> object:
    if type(kind) in PLAIN:
        return PLAIN[type(kind)]
    match kind:
        case inspect.Metadata(type=one):
            return _value(one)
        case inspect.LiteralType(values=values):
            return values[-1]
        case inspect.ListType(item_type=one):
            return [_value(one)]
        case inspect.VarTupleType(item_type=one):
            return (_value(one),)
        case inspect.TupleType(item_types=several):
            return tuple(map(_value, several))
        case inspect.DictType(key_type=key, value_type=one):
            return {_value(key): _value(one)}
        case inspect.UnionType(types=several):
            return _value(next(one for one in several if not isinstance(one, inspect.NoneType)))
        case (
            inspect.StructType(cls=made, fields=fields)
            | inspect.NamedTupleType(cls=made, fields=fields)
        ):
            return made(**{field.name: _value(field.type) for field in fields})
    raise TypeError(f"no example is known of {kind}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.corpus", description=__doc__)
    parser.add_argument("--folder", type=Path, default=CORPUS, help="to write below")
    folder: Path = parser.parse_args().folder
    files = {f"{VERSION}/{name_of(kind)}.msgpack": recorded(example(kind)) for kind in TYPES}
    for name, protocol in PROTOCOLS.items():
        files |= {f"{name}/{file}": data for file, data in local_messages(protocol).items()}
    for part in (str(VERSION), *PROTOCOLS):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for old in (folder / part).iterdir():
            old.unlink()
    for file, data in files.items():
        (folder / file).write_bytes(data)
    print(f"{len(files)} messages below {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
