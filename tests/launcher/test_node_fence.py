"""What servers of a fleet may do to a node while one of them leads, and others stand still."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvmig.core.order_fence import NO_TOKEN, OrderToken
from kvmig.launcher.node_fence import FenceUnknown, NodeFence
from tests.support.examples import examples
from tests.support.open_files import no_descriptor

FLEET = "f" * 32


def test_a_wish_of_an_earlier_server_is_refused_by_each_agent_of_the_node(tmp_path: Path) -> None:
    assert not NodeFence(tmp_path).refuse(FLEET, OrderToken(7))
    assert not NodeFence(tmp_path).refuse(FLEET, OrderToken(12))
    why = NodeFence(tmp_path).refuse(FLEET, OrderToken(7))
    assert "its token is 7.0, must be 12.0 or higher" in why
    assert not NodeFence(tmp_path).refuse(FLEET, OrderToken(12)), "the wish is sent every second"


def test_a_shorter_token_in_the_place_of_a_longer_one_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / f"{FLEET}.token").write_text(f"{'5.0':<40}")
    assert not NodeFence(tmp_path).refuse(FLEET, OrderToken(1_795_000_000_000))
    assert NodeFence(tmp_path).refuse(FLEET, OrderToken(1_794_999_999_999))


def test_fleets_do_not_fence_each_other(tmp_path: Path) -> None:
    fence = NodeFence(tmp_path)
    assert not fence.refuse(FLEET, OrderToken(9))
    assert not fence.refuse("e" * 32, OrderToken(1))


def test_before_a_server_has_said_that_it_leads_nothing_is_done(tmp_path: Path) -> None:
    assert NodeFence(tmp_path).refuse(FLEET, NO_TOKEN) == "no server has sent a token yet"


@pytest.mark.parametrize("text", ["nonsense", "-1.0", "\u00e9"])
def test_where_the_highest_token_cannot_be_read_nothing_is_done(tmp_path: Path, text: str) -> None:
    (tmp_path / f"{FLEET}.token").write_text(text)
    assert "can't be used" in NodeFence(tmp_path).refuse(FLEET, OrderToken(9))
    assert "can't be used" in NodeFence(tmp_path / "absent").refuse(FLEET, OrderToken(9))


def test_an_agent_that_can_open_no_file_learns_nothing_of_other_servers(tmp_path: Path) -> None:
    fence = NodeFence(tmp_path)
    assert not fence.refuse(FLEET, OrderToken(9))
    with no_descriptor(), pytest.raises(FenceUnknown, match=r"can't be opened now: .*Too many"):
        fence.refuse(FLEET, OrderToken(9))
    assert not fence.refuse(FLEET, OrderToken(9))


class ServersOfOneNode(RuleBasedStateMachine):
    """Servers that take over, and agents that start again, and wishes that come late."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.leads = 1
        self.agents: dict[int, NodeFence] = {}
        self.seen = 0
        """The highest term of all wishes that have reached the node."""
        self.holds: set[int] = set()
        """Terms whose agents do something on the node."""

    def fence(self) -> NodeFence:
        return NodeFence(Path(self.folder.name))

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule()
    def another_server_leads(self) -> None:
        self.leads += 1

    @rule(term=st.integers(1, 6))
    def a_wish_reaches_its_agent(self, term: int) -> None:
        """Also a late one, and one of a server that stands still and goes on."""
        if term > self.leads:
            return
        agent = self.agents.setdefault(term, self.fence())
        self.seen = max(self.seen, term)
        if agent.refuse(FLEET, OrderToken(term)):
            self.holds.discard(term)
        else:
            self.holds.add(term)
            assert term == self.seen, "a server changes a node that has seen a later one"

    @rule(term=st.integers(1, 6))
    def an_agent_starts_again(self, term: int) -> None:
        self.agents.pop(term, None)
        self.holds.discard(term)

    @rule()
    def all_agents_look(self) -> None:
        """No wish comes, and each agent looks for itself."""
        for term in sorted(self.holds):
            if self.agents[term].refuse(FLEET, OrderToken(term)):
                self.holds.discard(term)
        assert self.holds <= {self.seen}, "one holds on to a node that has seen a later server"

    @invariant()
    def nobody_is_later_than_the_leader(self) -> None:
        assert self.seen <= self.leads


ServersOfOneNode.TestCase.settings = examples(50, stateful_step_count=40)
test_only_the_latest_server_changes_a_node = ServersOfOneNode.TestCase


def test_with_a_memory_in_each_agent_alone_an_earlier_server_changes_a_node() -> None:
    """So the machine above would find it."""

    class OwnMemory(ServersOfOneNode):
        def fence(self) -> NodeFence:
            return NodeFence(Path(tempfile.mkdtemp(dir=self.folder.name)))

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            OwnMemory,
            settings=settings(
                max_examples=500, stateful_step_count=40, database=None, phases=[Phase.generate]
            ),
        )
