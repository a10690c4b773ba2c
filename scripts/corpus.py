"""Records one message of each type as this version puts it on the wire: `python -m scripts.corpus`.

Under tests/corpus/MAJOR.MINOR/, a file a type. Recorded versions are never changed: a message
that changes needs a new version (kvmig/kvtransfer/messages.py), and this script run once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import inspect

from kvmig.controlplane.messages import ClusterMessage
from kvmig.kvtransfer.messages import VERSION, Message, PeerMessage

CORPUS = Path(__file__).resolve().parent.parent / "tests" / "corpus"
TYPES: tuple[type[Message], ...] = tuple(
    dict.fromkeys((*get_args(ClusterMessage), *get_args(PeerMessage)))
)
"""All messages of control sockets."""


def example(kind: type[Message]) -> Message:
    """One with every field filled in, the same each time."""
    message = _value(inspect.type_info(kind))
    assert isinstance(message, kind)
    return message


def recorded(message: Message) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(message)


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
        case inspect.LiteralType(values=values):
            return values[-1]
        case inspect.ListType(item_type=one):
            return [_value(one)]
        case inspect.VarTupleType(item_type=one):
            return (_value(one),)
        case inspect.DictType(key_type=key, value_type=one):
            return {_value(key): _value(one)}
        case inspect.UnionType(types=several):
            return _value(next(one for one in several if not isinstance(one, inspect.NoneType)))
        case inspect.StructType(cls=struct, fields=fields):
            return struct(**{field.name: _value(field.type) for field in fields})
    raise TypeError(f"no example is known of {kind}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.corpus", description=__doc__)
    parser.add_argument("--folder", type=Path, default=CORPUS / str(VERSION), help="to write to")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.msgpack"):
        old.unlink()
    for kind in TYPES:
        (folder / f"{kind.__name__}.msgpack").write_bytes(recorded(example(kind)))
    print(f"{len(TYPES)} messages in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
