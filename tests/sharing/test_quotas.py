"""How models of a unit share its KV cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.sharing.memory_quotas import RULES, MemoryUse, fair, kvmig, muxserve


def use(
    model: str, quota: int, mean: float, wanted: float, *, held: int | None = None, floor: int = 10
) -> MemoryUse:
    return MemoryUse(model, quota, floor, int(mean) if held is None else held, mean, wanted)


@st.composite
def units(draw: st.DrawFn) -> list[MemoryUse]:
    uses = []
    for name in draw(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True)):
        quota = draw(st.integers(10, 100_000))
        held = draw(st.integers(0, quota))
        uses.append(
            MemoryUse(
                name,
                quota,
                draw(st.integers(1, quota)),
                held,
                draw(st.floats(0, quota)),
                draw(st.floats(held, 200_000)),
            )
        )
    return uses


@given(uses=units(), rule=st.sampled_from(sorted(RULES)))
def test_no_rule_leases_more_than_the_arena_or_less_than_is_held(
    uses: list[MemoryUse], rule: str
) -> None:
    quotas = RULES[rule](uses)
    assert quotas.keys() == {one.model for one in uses}
    assert sum(quotas.values()) <= sum(one.quota for one in uses)
    for one in uses:
        assert quotas[one.model] >= max(one.held, one.floor) or quotas[one.model] == one.quota


@given(uses=units(), rule=st.sampled_from(sorted(RULES)))
def test_the_order_in_which_models_are_listed_means_nothing(
    uses: list[MemoryUse], rule: str
) -> None:
    assert RULES[rule](uses) == RULES[rule](uses[::-1])


@given(quota=st.integers(100, 10_000), wanted=st.floats(0, 20_000), count=st.integers(2, 5))
def test_equal_loads_get_equal_quotas(quota: int, wanted: float, count: int) -> None:
    uses = [use(name, quota, 0, wanted, held=0) for name in "abcde"[:count]]
    for rule in RULES.values():
        quotas = rule(uses).values()
        assert max(quotas) - min(quotas) <= 1


def test_muxserves_rule_gives_a_tenth_of_its_use_to_who_is_full() -> None:
    quotas = muxserve([use("full", 1000, 990, 5000), use("idle", 1000, 200, 200)])
    assert quotas == {"full": 1099, "idle": 901}


def test_muxserves_rule_gives_nothing_to_who_has_no_backlog() -> None:
    quotas = muxserve([use("full", 1000, 990, 1000), use("idle", 1000, 200, 200)])
    assert quotas == {"full": 1000, "idle": 1000}


def test_muxserves_rule_takes_from_all_who_give_in_the_ratio_of_what_they_can() -> None:
    quotas = muxserve(
        [use("full", 1000, 1000, 9000), use("a", 1000, 150, 150), use("b", 1000, 550, 550)]
    )
    assert quotas["full"] == pytest.approx(1100, abs=1)
    assert (1000 - quotas["a"]) == pytest.approx(2 * (1000 - quotas["b"]), abs=2)


def test_kvmigs_rule_fills_who_wants_least_and_levels_the_others() -> None:
    quotas = kvmig([use("small", 300, 0, 50), use("large", 300, 0, 900), use("huge", 300, 0, 2000)])
    assert quotas["small"] == 50
    assert quotas["large"] == quotas["huge"] == 425


def test_kvmigs_rule_leaves_what_nobody_wants_where_it_is() -> None:
    quotas = kvmig([use("a", 300, 0, 100), use("b", 100, 0, 50)])
    assert quotas == {"a": 300, "b": 100}


def test_kvmigs_rule_takes_from_all_who_have_more_than_they_want_alike() -> None:
    quotas = kvmig([use("a", 300, 0, 100), use("b", 150, 0, 50), use("c", 100, 0, 250)])
    assert quotas == {"a": 300 - 100, "b": 150 - 50, "c": 250}


def test_kvmigs_rule_takes_what_is_held_for_who_is_owed_its_guarantee() -> None:
    lent = use("lent", 900, 800, 900)._replace(guarantee=500)
    owed = use("owed", 100, 100, 700)._replace(guarantee=500)
    assert kvmig([lent, owed]) == {"lent": 500, "owed": 500}


def test_kvmigs_rule_takes_nothing_that_is_held_for_who_wants_more_than_its_guarantee() -> None:
    first = use("first", 600, 600, 900)._replace(guarantee=500)
    second = use("second", 400, 400, 900)._replace(guarantee=400)
    assert kvmig([first, second]) == {"first": 600, "second": 400}


def test_first_quotas_are_floors_and_the_rest_by_demand() -> None:
    assert fair(1000, {"a": 100, "b": 100}, {"a": 3, "b": 1}) == {"a": 700, "b": 300}
    assert fair(1000, {"a": 100, "b": 100}, {"a": 0, "b": 0}) == {"a": 500, "b": 500}


def test_floors_beyond_the_arena_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one request of each model needs 3 MiB .* has 2 MiB"):
        fair(2 << 20, {"a": 1 << 20, "b": 2 << 20}, {"a": 1, "b": 1})
