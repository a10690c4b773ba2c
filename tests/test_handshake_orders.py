"""Every order of events in both machines together, with lost, doubled and late messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.handshake_world import World


@pytest.mark.parametrize(("can_follow", "together"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("faults", [0, 1])
def test_in_every_order_at_most_one_side_decodes_and_in_the_end_one_does(
    faults: int, can_follow: bool, together: bool
) -> None:
    start = World(faults, can_follow, together)
    seen, waiting, ends = {start.key()}, [start], 0
    while waiting:
        world = waiting.pop()
        if not world.progress():
            world.check_end()
            ends += 1
        for index in range(len(world.moves())):
            after = world.copy()
            was_committed = after.destination.committed_here
            after.moves()[index]()
            after.check()
            assert after.destination.committed_here or not was_committed
            key = after.key()
            if key not in seen:
                seen.add(key)
                waiting.append(after)
    assert ends > 10


@given(st.data(), st.booleans(), st.booleans())
def test_with_many_faults_too(data: st.DataObject, can_follow: bool, together: bool) -> None:
    world = World(faults=6, can_follow=can_follow, together=together)
    while world.progress():
        was_committed = world.destination.committed_here
        data.draw(st.sampled_from(world.moves()))()
        world.check()
        assert world.destination.committed_here or not was_committed
    world.check_end()
