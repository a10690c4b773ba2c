"""Which of a request's blocks travel, and where they go: vLLM's KV cache groups of every kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvmig.core.errors import UnsupportedLayout
from kvmig.engines.base import HOLE
from kvmig.engines.vllm.subblocks import BlockPage, SubBlocks, merged
from kvmig.engines.vllm.tables import NULL_BLOCK, RequestTables, SentBlocks

pytestmark = pytest.mark.engine

BLOCK = 16
WINDOW = 40


def attention(kind: type[KVCacheSpec], **more: int) -> KVCacheSpec:
    return kind(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float16, **more)


FULL = attention(FullAttentionSpec)
WINDOWED = attention(SlidingWindowSpec, sliding_window=WINDOW)
CHUNKED = attention(ChunkedLocalAttentionSpec, attention_chunk_size=WINDOW)
STATE = MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.float32,))


def tables(*specs: KVCacheSpec, units: SubBlocks | None = None) -> RequestTables:
    """Of an engine with one KV cache group of each kind."""

    def outside(spec: KVCacheSpec, computed: int) -> int:
        return max(0, computed - WINDOW + 1) if spec is WINDOWED else 0

    managers = [
        SimpleNamespace(
            max_admission_blocks_per_request=4 if spec is WINDOWED else None,
            get_num_skipped_tokens=lambda computed, spec=spec: outside(spec, computed),
        )
        for spec in specs
    ]
    scheduler = SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[KVCacheGroupSpec([f"layer.{at}"], one) for at, one in enumerate(specs)]
        ),
        kv_cache_manager=SimpleNamespace(
            coordinator=SimpleNamespace(single_type_managers=managers)
        ),
    )
    return RequestTables(cast("Scheduler", scheduler), units or SubBlocks(specs[0].block_size))


def test_places_of_full_attention_alone_are_its_blocks_in_order() -> None:
    plain = tables(FULL)

    assert plain.plain
    assert plain.full([[7, 3, 9]], 40, SentBlocks(0, 0)) == ([0, 1], [7, 3])
    assert plain.unsent_blocks([[7, 3, 9]], 40, SentBlocks(16, 1)) == ([1, 2], [3, 9])
    assert plain.by_place([[7, 3, 9]], 16) == [7, 3, 9]


def test_blocks_cut_in_units_have_a_place_for_each_unit() -> None:
    halves = tables(FULL, units=SubBlocks(8, 2))

    assert halves.full([[7, 3]], 28, SentBlocks(0, 0)) == ([0, 1, 2], [14, 15, 6])


def test_what_lies_outside_the_window_does_not_travel() -> None:
    both = tables(WINDOWED, FULL)
    ids = [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]]

    places, blocks = both.unsent_blocks(ids, 90, SentBlocks(0, 0))

    assert blocks == [4, 5, 6, 11, 12, 13, 14, 15, 16]
    assert places == [6, 8, 10, 1, 3, 5, 7, 9, 11]


def test_blocks_that_vllm_has_freed_do_not_travel() -> None:
    places, blocks = tables(CHUNKED).full([[NULL_BLOCK, NULL_BLOCK, 3]], 48, SentBlocks(0, 0))

    assert (places, blocks) == ([2], [3])


def test_a_state_goes_in_the_tail_only() -> None:
    hybrid = tables(STATE, FULL)
    ids = [[NULL_BLOCK, 9], [1, 2, 3, 4, 5, 6]]

    assert hybrid.full(ids, 90, SentBlocks(0, 0))[1] == [1, 2, 3, 4, 5]
    assert hybrid.unsent_blocks(ids, 90, SentBlocks(80, 5)) == ([0, 11], [9, 6])


def test_a_request_without_computed_tokens_has_no_state_to_send() -> None:
    assert tables(STATE, FULL).unsent_blocks([[], []], 0, SentBlocks(0, 0)) == ([], [])


def test_prefix_hits_of_the_destination_do_not_travel() -> None:
    both = tables(WINDOWED, FULL)

    places, _ = both.unsent_blocks(
        [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]], 90, SentBlocks(64, 4)
    )

    assert places == [8, 10, 9, 11]


def test_blocks_that_the_prefix_cache_shares_are_nobodys_place() -> None:
    found = tables(WINDOWED, FULL).by_place([[NULL_BLOCK, 2, 3], [11, 12, 13]], 32)

    assert found == [HOLE, HOLE, HOLE, HOLE, 3, 13]


def test_a_stage_that_did_not_go_is_named_again() -> None:
    plain, sent = tables(FULL), SentBlocks(0, 0)
    sent.places += plain.full([[7, 3, 9]], 40, sent)[0]

    sent.back_to(0)

    assert plain.full([[7, 3, 9]], 48, sent) == ([0, 1, 2], [7, 3, 9])


def test_a_request_demands_a_state_and_as_much_of_a_window_as_it_may_hold() -> None:
    assert tables(STATE, WINDOWED, FULL).demand(160) == 1 + 4 + 10


@pytest.mark.parametrize("kind", [FULL, CHUNKED, attention(MLAAttentionSpec)])
def test_kinds_of_attention_are_moved(kind: KVCacheSpec) -> None:
    assert tables(kind).count == 1


def test_other_kinds_of_kv_cache_are_named_as_unmovable() -> None:
    crossed = tables(attention(CrossAttentionSpec), FULL)

    assert (crossed.unmovable, tables(FULL).unmovable) == ("KV cache kind CrossAttentionSpec", "")


def test_states_that_may_be_taken_back_are_unmovable() -> None:
    drafted = MambaSpec(
        block_size=64, shapes=((4, 4),), dtypes=(torch.float32,), num_speculative_blocks=2
    )

    assert tables(drafted).unmovable == "KV cache kind of states with speculative decoding"


def test_only_full_attention_is_cut_in_units() -> None:
    cut = tables(WINDOWED, FULL, units=SubBlocks(8, 2))

    assert cut.unmovable == "only blocks of full attention can be cut in units"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 3))
def test_whatever_the_stages_each_block_that_is_read_goes_exactly_once(
    steps: list[int], hits: int
) -> None:
    both = tables(WINDOWED, FULL, STATE)
    computed, sent = 64, SentBlocks(hits * BLOCK, hits)
    went: list[int] = []
    for step in steps:
        computed += step
        blocks = -(-computed // BLOCK)
        states = -(-computed // 64)
        ids = [[100 + at for at in range(blocks)], [200 + at for at in range(blocks)]]
        ids.append([NULL_BLOCK] * (states - 1) + [9])
        places, named = both.full(ids, computed, sent)
        went += named
        sent.places += places
    went += both.unsent_blocks(ids, computed, sent)[1]

    assert len(set(went)) == len(went)
    first = (computed - WINDOW + 1) // BLOCK
    read = {100 + at for at in range(max(first, hits), blocks)}
    assert read | {200 + at for at in range(hits, blocks)} | {9} <= set(went)


def test_pages_of_groups_that_share_memory_are_one() -> None:
    over, apart = BlockPage(0, 128, 128), BlockPage(1280, 128, 100)

    assert merged([over, apart, over, BlockPage(1280, 128, 128)], 10) == (
        over,
        BlockPage(1280, 128, 128),
    )


def test_neighbouring_pages_of_a_block_are_one_run() -> None:
    assert merged([BlockPage(64, 192, 64), BlockPage(0, 192, 64), BlockPage(128, 192, 64)], 10) == (
        BlockPage(0, 192, 192),
    )


def test_groups_whose_blocks_are_spaced_otherwise_in_shared_memory_are_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="blocks of 128 and 256 bytes"):
        merged([BlockPage(0, 128, 128), BlockPage(256, 256, 256)], 10)
