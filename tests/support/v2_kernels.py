"""`python -m tests.support.v2_kernels`: the kernels of `bench.v2_on_cpu` beside Triton's own, which
its interpreter runs; both are called as vLLM calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.support import runner_v2  # noqa: F401 - before vLLM: it looks for Triton's backends

# ruff: isort: split
import torch
from vllm.v1.worker.gpu import buffer_utils, input_batch
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from bench.v2_on_cpu import replace_kernels

CPU = torch.device("cpu")
SEATS = torch.tensor([5, 0, 3], dtype=torch.int32)
BEGINS = torch.tensor([0, 1, 8, 9], dtype=torch.int32)
"""One token, seven tokens and one token: of prompts or behind them, as the seed has it."""
SEEDS = range(12)


def states(seed: int) -> dict[str, torch.Tensor]:
    """What each of eight requests has; all that a call may write is made for it."""
    made = torch.Generator().manual_seed(seed)

    def some(*size: int, most: int = 1000) -> torch.Tensor:
        return torch.randint(0, most, size, generator=made, dtype=torch.int32)

    prefill, computed = 1 + some(8, most=30), some(8, most=40)
    return {
        "tokens": some(8, 64),
        "prefill": prefill,
        "computed": computed,
        "lengths": torch.maximum(prefill, computed + 1),
        "last": some(8, 1).long(),
        "ids": some(9),
        "after": some(1, 8),
        "counts": some(8, 1000, most=3),
    }


def prefill(of: dict[str, torch.Tensor]) -> None:
    input_batch.prepare_prefill_inputs(
        of["ids"], of["after"], SEATS, BEGINS, of["tokens"], of["prefill"], of["computed"]
    )


def positions(of: dict[str, torch.Tensor]) -> None:
    of["pos"], of["seq"] = torch.zeros(9, dtype=torch.int64), torch.ones(8, dtype=torch.int32)
    input_batch.prepare_pos_seq_lens(SEATS, BEGINS, of["computed"], of["pos"], of["seq"])


def combined(of: dict[str, torch.Tensor]) -> None:
    positions(of)
    of["logits"] = input_batch.combine_sampled_and_draft_tokens(
        of["ids"], SEATS, of["last"], BEGINS, of["seq"], of["prefill"],
        torch.zeros(8, 0, dtype=torch.int64), torch.arange(4, dtype=torch.int32), 3,
    )  # fmt: skip


def updated(of: dict[str, torch.Tensor]) -> None:
    positions(of)
    ends, drawn = torch.arange(4, dtype=torch.int32), torch.tensor([[11], [12], [13]])
    of["sampled"], of["rejected"] = input_batch.get_num_sampled_and_rejected(
        torch.ones(3, dtype=torch.int32), of["seq"], ends, SEATS, of["prefill"]
    )
    input_batch.post_update(
        SEATS, of["computed"], of["last"], of["counts"], drawn, of["sampled"], of["rejected"],
        BEGINS, of["tokens"], of["lengths"],
    )  # fmt: skip


def sampled(of: dict[str, torch.Tensor]) -> None:
    logits = torch.randn(3, 2500, generator=torch.Generator().manual_seed(3))
    for name, temperature in (("greedy", 0.0), ("drawn", 0.7)):
        of[name] = gumbel_sample(
            logits, SEATS, torch.full((8,), temperature), torch.arange(8), torch.arange(3),
            apply_temperature=True, is_drafting=False,
        )  # fmt: skip


def placed(of: dict[str, torch.Tensor]) -> None:
    positions(of)
    tables = BlockTables([4], 8, 16, [12], CPU)
    for seat in range(8):
        blocks = [1 + seat * 12 + number for number in range(12)]
        tables.append_block_ids(seat, (blocks[: 7 + seat % 5],), overwrite=True)
    tables.apply_staged_writes()
    (of["blocks"],) = tables.gather_block_tables(SEATS, num_reqs_padded=4)
    of["slots"] = tables.compute_slot_mappings(SEATS, BEGINS, of["pos"], num_tokens_padded=12)


CALLS: tuple[Callable[[dict[str, torch.Tensor]], None], ...] = (
    prefill, combined, updated, sampled, placed,
)  # fmt: skip


def results() -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    found: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    for call in CALLS:
        for seed in SEEDS:
            of: dict[str, Any] = states(seed)
            call(of)
            found[call.__name__, seed] = copy.deepcopy(of)
    return found


def main() -> None:
    vars(buffer_utils)["UvaBuffer"] = buffer_utils.NonUvaBuffer
    vars(buffer_utils)["is_uva_available"] = lambda: False
    by_triton = results()
    replace_kernels()
    here = results()
    for call, tensors in by_triton.items():
        for name, expected in tensors.items():
            assert torch.equal(here[call][name], expected), (call, name, here[call][name], expected)
        print(*call)


if __name__ == "__main__":
    main()
