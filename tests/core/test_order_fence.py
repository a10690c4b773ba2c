"""Orders of servers that die, of late ones, and of connections that are made again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvmig.core.order_fence import NO_TOKEN, PROGRAM_TOKEN, OrderFence, OrderToken

WANTED = 3
"""Instances of the model."""


def test_an_order_of_an_earlier_server_is_refused() -> None:
    fence = OrderFence()
    assert not fence.refuse(OrderToken(5, 1))
    assert not fence.refuse(OrderToken(6, 1))
    assert "its token is 5.9, must be 6.1 or higher" in fence.refuse(OrderToken(5, 9))
    assert not fence.refuse(OrderToken(6, 1)), "orders of one contact have the same token"
    assert "earlier connection" in fence.refuse(OrderToken(6, 0))


def test_peoples_orders_have_no_token_and_are_carried_out() -> None:
    fence = OrderFence(OrderToken(7, 7))
    assert not fence.refuse(NO_TOKEN)
    assert fence.highest == OrderToken(7, 7)


def test_a_programs_orders_are_carried_out_until_a_fleets_server_has_given_one() -> None:
    fence = OrderFence()
    assert not fence.refuse(PROGRAM_TOKEN)
    assert not fence.refuse(OrderToken(1, 0))
    assert fence.refuse(PROGRAM_TOKEN).startswith("a fleet's server gives the orders here")
    assert not fence.refuse(NO_TOKEN)


def test_a_token_is_read_as_it_was_written() -> None:
    token = OrderToken(1_795_000_000_000, 12)
    assert OrderToken.parse(str(token)) == token


@pytest.mark.parametrize("text", ["", "5", "5.", "-1.2", "1.2.3", "٣.1", "1e3.1", "9" * 19 + ".1"])
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be TERM\.CONTACT"):
        OrderToken.parse(text)


@dataclass(frozen=True)
class Packet:
    """On its way to the deployment, with the server that sent it; or dead."""

    what: Literal["look", "add"]
    token: OrderToken
    count: int = 0


@dataclass
class MadeUpDeployment:
    """Carries out orders. Its front end may start again, its launcher, who has the fence, can't."""

    fence: OrderFence = field(default_factory=OrderFence)
    instances: int = 1


@dataclass
class MadeUpServer:
    """Gives an order for what is missing, by what its contact has told it."""

    token: OrderToken
    known: int | None = None
    """Instances, by the last contact; None: it has heard nothing."""


class AnyOrderOfDeaths(RuleBasedStateMachine):
    """Servers that die, freeze and take over, and packets that arrive in any order, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.deployment = MadeUpDeployment(self.fence())
        self.leader = MadeUpServer(OrderToken(1))
        self.deposed: list[MadeUpServer] = []
        self.packets: list[Packet] = []
        self.began: list[OrderToken] = []
        """Contacts that the deployment has answered."""

    def fence(self) -> OrderFence:
        return OrderFence()

    @rule()
    def another_server_takes_over(self) -> None:
        """The one before may be frozen, and go on later by what it knows."""
        self.deposed = [*self.deposed[-1:], self.leader]
        self.leader = MadeUpServer(OrderToken(self.leader.token.term + 1))

    @rule(frozen=st.booleans())
    def a_server_begins_a_contact(self, frozen: bool) -> None:
        server = self.deposed[-1] if frozen and self.deposed else self.leader
        server.token = server.token._replace(contact=server.token.contact + 1)
        server.known = None
        self.packets.append(Packet("look", server.token))

    @rule(frozen=st.booleans())
    def a_server_gives_an_order(self, frozen: bool) -> None:
        server = self.deposed[-1] if frozen and self.deposed else self.leader
        if server.known is not None and server.known < WANTED:
            self.packets.append(Packet("add", server.token, WANTED - server.known))
            server.known = None  # until it hears what came of it

    @rule(at=st.integers(0, 9))
    def a_packet_arrives(self, at: int) -> None:
        if not self.packets:
            return
        packet = self.packets.pop(at % len(self.packets))
        if self.deployment.fence.refuse(packet.token):
            return
        if packet.what == "add":
            self.deployment.instances += packet.count
            return
        for server in (*self.deposed, self.leader):
            if server.token == packet.token:
                server.known = self.deployment.instances

    @rule(at=st.integers(0, 9))
    def a_packet_is_lost(self, at: int) -> None:
        if self.packets:
            self.packets.pop(at % len(self.packets))

    @rule()
    def the_front_end_starts_again(self) -> None:
        """Its connections end; what is in their buffers may come nevertheless."""
        self.leader.known = None

    @invariant()
    def no_order_is_done_twice(self) -> None:
        assert self.deployment.instances <= WANTED


AnyOrderOfDeaths.TestCase.settings = settings(stateful_step_count=40)
test_no_order_is_done_twice_in_any_order_of_deaths = AnyOrderOfDeaths.TestCase


def test_without_the_fence_an_order_is_done_twice() -> None:
    """So the machine above would find it."""

    class NoFence(OrderFence):
        def refuse(self, token: OrderToken) -> str:
            return ""

    class Unfenced(AnyOrderOfDeaths):
        def fence(self) -> OrderFence:
            return NoFence()

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Unfenced,
            settings=settings(
                max_examples=2000,
                stateful_step_count=40,
                database=None,
                phases=[Phase.generate],  # whatever it finds: to make it small takes seconds
            ),
        )
