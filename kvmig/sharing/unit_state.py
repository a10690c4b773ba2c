"""The state of a unit, as its agent answers it to any process of the host."""

from __future__ import annotations

import asyncio

from kvmig.core.errors import ConfigError, TransportError
from kvmig.rpc.unix_packets import UnixPackets
from kvmig.sharing.messages import (
    MOST_BYTES,
    VERSION,
    AskUnit,
    MemberRefused,
    ToMember,
    UnitState,
    encode,
    to_member,
)


async def fetch_unit(path: str, timeout_s: float = 5.0) -> UnitState:
    """The unit there as it is now. Raises TransportError, or ConfigError where it refuses."""
    packets = UnixPackets.connect(path, MOST_BYTES)
    try:
        async with asyncio.timeout(timeout_s):
            packets.send(encode(AskUnit(VERSION)))
            message = decoded(await packets.recv())
    except TimeoutError as error:
        raise TransportError(f"no answer at {path} within {timeout_s:g} s") from error
    finally:
        packets.close()
    if isinstance(message, MemberRefused):
        raise ConfigError(message.why)
    assert isinstance(message, UnitState)
    return message


def decoded(packet: bytes) -> ToMember:
    """Raises TransportError: the agent has gone, or is none."""
    if not packet:
        raise TransportError("the unit's agent has gone")
    try:
        return to_member.decode(packet)
    except ValueError as error:
        raise TransportError(f"what the unit's agent says can't be read: {error}") from error
