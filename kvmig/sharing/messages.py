"""The messages between a unit's agent and its members: one msgpack message per packet.

An instance sends Hello with what it is, then Held whenever its use of memory changes; the agent
answers with Lease, or Refused and the end. A process that only wants to
know sends Ask, and gets Unit. A member that shall be guaranteed another size sends Guarantee, and
gets GuaranteeSet.
One that sends its ComputeShares, too, gets Crowd; while others are there it sends a StepRequest
before each step, gets a StepGrant, and sends Done; where the grant stands it goes on until it
gets Recalled.
"""

from __future__ import annotations

import msgspec

from kvmig.engines.gate import ComputeShares, StepGrant, StepRequest

VERSION = 3
MOST_BYTES = 1 << 16
"""Most bytes of one packet."""


class UnitMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all, except the three that the step gate defines."""


# -- member to agent


class MemberHello(UnitMessage, frozen=True, tag="Hello"):
    """I am this instance. Bytes; see `kvmig.sharing.lease_ledger.MemberClaim`."""

    version: int
    instance: str
    """The member's name, which no other one in the unit has."""
    model: str
    floor: int
    capacity: int
    granule: int
    guarantee: int = 0
    lease: int = 0


class HeldMemory(UnitMessage, frozen=True, tag="Held"):
    """The memory that the sender has. Bytes; see `kvmig.sharing.lease_ledger.MemberReport`."""

    seq: int
    lease: int
    used: int
    cached: int
    wanted: int


class GuaranteeRequest(UnitMessage, frozen=True, tag="Guarantee"):
    """The bytes that the sender wants back from now on whenever it wants them; 0: a fair part of
    what others weren't promised."""

    number: int
    size: int


class AskUnit(UnitMessage, frozen=True, tag="Ask"):
    """What is the unit?"""

    version: int


class StepDone(UnitMessage, frozen=True, tag="Done"):
    """The step that this question's answer was for has ended, or won't be made."""

    number: int


# -- agent to member


class MemoryLease(UnitMessage, frozen=True, tag="Lease"):
    """The most bytes to have: more at once, or less as soon as the member can."""

    seq: int
    quota: int
    limit: int
    """What it could have if all others gave."""
    guarantee: int
    """What it gets back whenever it wants it."""
    arena: int


class GuaranteeSet(UnitMessage, frozen=True, tag=True):
    """Answer to the Guarantee of this number."""

    number: int
    size: int
    refused: str = ""
    """The reason for a refusal, and the guarantee is as before; empty: it is so from now on."""


class GrantRecalled(UnitMessage, frozen=True, tag="Recalled"):
    """The answer to this question stands no more: say Done once no step is made with it."""

    number: int


class MemberCount(UnitMessage, frozen=True, tag="Crowd"):
    """The number of members that ask, the receiver among them; one that is alone doesn't ask."""

    members: int


class MemberRefused(UnitMessage, frozen=True, tag="Refused"):
    """The reason why the member can't join; the connection ends."""

    why: str


class MemberShare(msgspec.Struct, frozen=True):
    """One member's part. Bytes."""

    instance: str
    model: str
    process: int
    """The process's id on this host."""
    guarantee: int
    quota: int
    lease: int
    used: int
    cached: int
    wanted: int
    connected: bool


class UnitState(UnitMessage, frozen=True, tag="Unit"):
    """The unit as it is now."""

    arena: int
    rule: str
    shares: list[MemberShare]


ToAgent = (
    MemberHello | HeldMemory | GuaranteeRequest | AskUnit | ComputeShares | StepRequest | StepDone
)
ToMember = (
    MemoryLease | GuaranteeSet | MemberRefused | UnitState | StepGrant | GrantRecalled | MemberCount
)

encode = msgspec.msgpack.Encoder().encode


def tag_of(message: ToAgent) -> str:
    """The message's name on the wire."""
    return str(message.__struct_config__.tag)


to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
to_member: msgspec.msgpack.Decoder[ToMember] = msgspec.msgpack.Decoder(ToMember)


class InUnit(msgspec.Struct, frozen=True):
    """What an instance has of the unit that it is in. Bytes."""

    lease: int
    """What it has not given back."""
    wanted: int
    """Bytes that all its requests want, waiting ones included."""
    guarantee: int
    """What it gets back whenever it wants it."""
    waited_s: float
    """Seconds that its steps have waited for their turn since its start."""
    connected: bool
    """Whether the unit's agent is there."""
    used: int = 0
    """Bytes that running requests hold."""
    asked: int | None = None
    """The guarantee that it was ordered to ask for; 0: a fair part. None: an older llumlet's."""
    decode_parts: int = 0
    """Tenths of the device for its steps with decodes only; 0: its steps don't ask."""
