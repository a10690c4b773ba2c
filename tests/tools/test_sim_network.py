from __future__ import annotations

import pytest

from kvmig_tools.sim.events import EventQueue
from kvmig_tools.sim.network import Network


def test_copies_out_of_one_instance_share_its_link() -> None:
    events = EventQueue()
    network = Network(events, bandwidth=100.0)
    ends: dict[str, float] = {}

    def copy(name: str, source: str, destination: str, nbytes: float) -> None:
        network.copy(source, destination, nbytes, lambda: ends.update({name: events.now}))

    copy("first", "a", "b", 100.0)
    copy("second", "a", "c", 50.0)
    copy("elsewhere", "d", "e", 100.0)
    events.run()
    # Half of the link each until the second is there, then all of it for what is left.
    assert ends == pytest.approx({"second": 1.0, "first": 1.5, "elsewhere": 1.0})


def test_a_copy_that_is_given_up_leaves_its_share_to_the_others() -> None:
    events = EventQueue()
    network = Network(events, bandwidth=100.0)
    ends: list[float] = []
    network.copy("a", "b", 100.0, lambda: ends.append(events.now))
    other = network.copy("c", "b", 100.0, lambda: ends.append(-1.0))
    events.at(1.0, lambda: network.stop(other))
    events.run()
    assert ends == pytest.approx([1.5])
    network.stop(other)  # twice is no error


def test_what_is_due_at_once_happens_in_the_order_it_was_asked_for() -> None:
    events, seen = EventQueue(), list[str]()
    events.at(1.0, lambda: seen.append("first"))
    cancelled = events.at(1.0, lambda: seen.append("never"))
    events.at(1.0, lambda: seen.append("second"))
    events.at(0.5, cancelled.cancel)
    events.run()
    assert seen == ["first", "second"]
    assert events.now == 1.0
