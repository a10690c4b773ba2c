"""What is known of models' sizes outlives the server, and goes with the last model that it fits."""

from __future__ import annotations

import msgspec
from sqlalchemy import update

from kvmig.core.model_sizes import LayerSizes, ModelSizes
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.device_sizes import forget_others, remember, remembered
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.store import FleetStore
from kvmig.fleet.tables import device_sizes
from kvmig.fleet.tensor_parallel import sized

LAYERS = (LayerSizes(kind="MLAAttentionSpec", layers=4, token=4608, request=1 << 20),)
SIZES = ModelSizes(weights=1 << 34, files=1 << 35, tokens=4096, workers=2, layers=LAYERS)
MODEL = ModelSpec(name="a", source="path:/a", flags=("--max-model-len=4096",))


def test_the_next_server_knows_what_was_learned_and_measured(store: FleetStore) -> None:
    before, after = DeviceBudget(), DeviceBudget()
    before.learn(MODEL, SIZES)
    assert before.measure(MODEL, 7, 0)
    assert not before.measure(MODEL, 6, 0), "the most counts"
    for _ in range(2):
        remember(store.database, before.to_remember(MODEL))
    for one in remembered(store.database):
        after.recall(one)
    assert (after.sizes(MODEL), after.measured(MODEL)) == (SIZES, 7)
    alike = msgspec.structs.replace(MODEL, name="b", priority=3)
    assert after.measured(alike) == 7
    other = msgspec.structs.replace(MODEL, flags=())
    assert after.sizes(other) is None
    forget_others(store.database, [alike])
    assert len(remembered(store.database)) == 1
    forget_others(store.database, [other])
    assert remembered(store.database) == []


def test_what_was_measured_with_a_number_of_gpus_that_the_fleet_chose_is_kept(
    store: FleetStore,
) -> None:
    chosen = msgspec.structs.replace(MODEL, tensor_parallel="auto")
    budget = DeviceBudget()
    assert budget.measure(sized(chosen, 4), 7, 0)
    remember(store.database, budget.to_remember(sized(chosen, 4)))
    forget_others(store.database, [chosen])
    assert [one.measured for one in remembered(store.database)] == [7]
    forget_others(store.database, [MODEL])
    assert remembered(store.database) == []


def test_sizes_that_cannot_be_read_are_as_if_the_engine_was_never_asked(store: FleetStore) -> None:
    budget = DeviceBudget()
    budget.learn(MODEL, SIZES)
    remember(store.database, budget.to_remember(MODEL))
    with store.database.transaction() as connection:
        connection.execute(update(device_sizes).values(sizes={"weights": "many"}))
    (one,) = remembered(store.database)
    assert one.sizes is None


def test_sizes_of_before_padding_counted_are_as_if_the_engine_was_never_asked(
    store: FleetStore,
) -> None:
    budget = DeviceBudget()
    for reserved in (0, 64):
        sizes = msgspec.structs.replace(SIZES, shortest=64, reserved=reserved)
        budget.learn(MODEL, sizes)
        remember(store.database, budget.to_remember(MODEL))
        (one,) = remembered(store.database)
        assert one.sizes == (sizes if reserved else None)
