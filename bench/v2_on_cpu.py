"""vLLM's model runner V2, which GPUs have, at the pace of a CPU: for `bench.pause --runner v2`, and
for most tests on V2 (tests/support/quick_runner_v2.py).

Its kernels are Triton's, which on a CPU only an interpreter runs, at some 100 ms a token. Those of
a greedy decode step stand here in plain torch, and write the same numbers; all others are left to
the interpreter. `python -m bench.v2_on_cpu` is a nursery (`kvmig.launcher.shared_fork_server`) with
them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvmig.engines.vllm.kind import VllmKind
from kvmig.launcher import shared_fork_server
from kvmig.process.child import leave

PAD = -1
"""The place of no token."""


class HostKernel:
    """Launched as Triton's: `kernel[grid](arguments)`."""

    def __init__(
        self,
        run: Callable[..., None],
        instead_of: Any = None,
        applies: Callable[..., bool] = lambda *_, **__: True,
    ) -> None:
        """run: gets the arguments. instead_of: the kernel that it stands for, and that is launched
        where it doesn't apply."""
        self._run = run
        self._applies = applies
        self.instead_of = instead_of

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            if self._applies(*arguments, **options):
                self._run(grid, *arguments, **options)
            else:
                self.instead_of[grid](*arguments, **options)

        return launch


def is_one_group(*_: Any, MULTI_GROUP: bool, **__: int) -> bool:  # noqa: N803 - the kernel's
    """Of KV cache."""
    return not MULTI_GROUP


def apply_write(
    grid: tuple[int], out: Tensor, stride: int, rows: Tensor, starts: Tensor, contents: Tensor,
    ends: Tensor, _: None, **__: int,
) -> None:  # fmt: skip
    """Each row's new part."""
    flat, begin = out.view(-1), 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        at = row * stride + start
        flat[at : at + end - begin] = contents[begin:end]
        begin = end


def prepare_prefill_inputs(
    grid: tuple[int], ids: Tensor, after: Tensor, _: int, ahead: int, seats: Tensor,
    begins: Tensor, tokens: Tensor, __: int, prefill: Tensor, computed: Tensor, **___: int,
) -> None:  # fmt: skip
    """Tokens of prompts, and those that follow them."""
    bounds = begins.tolist()
    for place, seat in enumerate(seats.tolist()):
        done, length = int(computed[seat]), int(prefill[seat])
        if done >= length:
            continue
        begin, end = bounds[place], bounds[place + 1]
        until = done + end - begin
        ids[begin:end] = tokens[seat, done:until]
        for number in range(ahead):
            following = until + number
            after[number, seat] = int(tokens[seat, following]) if following < length else 0


def prepare_pos_seq_lens(
    grid: tuple[int], pos: Tensor, lengths: Tensor, seats: Tensor, begins: Tensor,
    computed: Tensor, most: int, **_: int,
) -> None:  # fmt: skip
    """Positions, and the length of each sequence."""
    bounds, count = begins.tolist(), grid[0] - 1
    for place, seat in enumerate(seats.tolist()):
        done, begin, end = int(computed[seat]), bounds[place], bounds[place + 1]
        lengths[place] = done + end - begin
        pos[begin:end] = torch.arange(done, done + end - begin)
    lengths[count:most] = 0


def is_without_drafts(*arguments: Any, **options: int) -> bool:
    """Whether each one gets one token."""
    drafts: Tensor = arguments[6]
    return drafts.shape[-1] == 0 and options.get("NUM_NEW_SAMPLED_TOKENS", 1) == 1


def combine_sampled(
    grid: tuple[int], ids: Tensor, seats: Tensor, sampled: Tensor, begins: Tensor, lengths: Tensor,
    prefill: Tensor, drafts: Tensor, _: int, logits: Tensor, indices: Tensor, **__: int,
) -> None:  # fmt: skip
    """The token that was sampled last, where one was; where each one's logits are."""
    ends = begins[1 : grid[0] + 1]
    indices[: grid[0]] = ends - 1
    decodes = lengths[: grid[0]] > prefill[seats]
    ids[(ends - 1)[decodes].long()] = sampled[seats][decodes].view(-1).to(ids.dtype)


def count_sampled(
    grid: tuple[int], sampled: Tensor, rejected: Tensor, lengths: Tensor, logits: Tensor,
    seats: Tensor, prefill: Tensor, **_: int,
) -> None:  # fmt: skip
    """How many tokens each has got, and how many it has not."""
    in_prefill = lengths[: grid[0]] < prefill[seats]
    sampled[in_prefill] = 0
    rejected[:] = (logits[1 : grid[0] + 1] - logits[: grid[0]]).to(sampled.dtype) - sampled
    rejected[in_prefill] = 0


def has_no_drafts(*arguments: Any, **_: int) -> bool:
    """The last arguments are drafts, from vLLM 0.33 on."""
    return all(one is None for one in arguments[13:15])


def post_update(
    grid: tuple[int], seats: Tensor, computed: Tensor, last: Tensor, counts: Tensor | None, _: int,
    tokens: Tensor, __: int, sampled: Tensor, rejected: Tensor, begins: Tensor | None,
    all_tokens: Tensor, ___: int, lengths: Tensor, *____: Any, **_____: int,
) -> None:  # fmt: skip
    """What each one has after the step."""
    bounds = begins.tolist() if begins is not None else [0] * (grid[0] + 1)
    for place, seat in enumerate(seats.tolist()):
        if seat < 0:
            continue
        number, length = int(sampled[place]), int(lengths[seat])
        if number:
            new = tokens[place, :number]
            last[seat] = new[-1]
            all_tokens[seat, length : length + number] = new
            lengths[seat] = length + number
            if counts is not None:
                counts[seat].index_add_(0, new, torch.ones_like(new, dtype=counts.dtype))
        computed[seat] += bounds[place + 1] - bounds[place] - int(rejected[place])


def on_one_group(run: Callable[..., Any], kernels: Callable[..., Any]) -> Callable[..., Any]:
    """A method of block tables. kernels: as vLLM has it, for models with several groups."""

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        one = self.num_kv_cache_groups == 1 == self.cp_size and bool(self.slot_mapping_enabled[0])
        windows = getattr(self, "has_sliding_window_groups", False)  # from vLLM 0.33 on
        return (run if one and not windows else kernels)(self, *arguments, **options)

    return method


def gather_block_tables(
    self: Any, idx_mapping: Tensor, num_reqs_padded: int, out: Any = None, out_ptrs: Any = None,
    num_computed_tokens: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The blocks of those in the batch; no other row has any."""
    found = tuple(self.input_block_tables) if out is None else tuple(out)
    for group, table in enumerate(found):
        for place, seat in enumerate(idx_mapping.tolist()):
            blocks = int(self.num_blocks.gpu[group, seat])
            table[place, :blocks] = self.block_tables[group].gpu[seat, :blocks]
        table[len(idx_mapping) :] = 0
    return tuple(table[:num_reqs_padded] for table in found)


def compute_slot_mappings(
    self: Any, idx_mapping: Tensor, query_start_loc: Tensor, positions: Tensor,
    num_tokens_padded: int, out: Any = None,
) -> Tensor:  # fmt: skip
    """Where in the KV cache each token's row is."""
    mappings: Tensor = self.slot_mappings if out is None else out
    bounds = query_start_loc.tolist()
    for group, size in enumerate(self.block_sizes):
        table = self.block_tables[group].gpu
        for place, seat in enumerate(idx_mapping.tolist()):
            begin, end = bounds[place], bounds[place + 1]
            at = positions[begin:end].long()
            slots = table[seat, at // size].long() * size + at % size
            mappings[group, begin:end] = slots if seat >= 0 else PAD
        mappings[group, bounds[len(idx_mapping)] :] = PAD
    return mappings[:, :num_tokens_padded]


def is_greedy(*arguments: Any, **_: Any) -> bool:
    """Whether no token is drawn, and no draft's logits are kept."""
    seats, temperature = arguments[12], arguments[15]
    return arguments[4] is None and not bool((temperature[seats] != 0).any())


def sample_greedy(grid: tuple[int, int], *arguments: Any, **options: Any) -> None:
    """The largest logit of each block."""
    places, _, values, *_ = arguments
    logits, size = arguments[10], options["BLOCK_SIZE"]
    for block in range(grid[1]):
        part = logits[: grid[0], block * size : (block + 1) * size].float()
        found = part.max(dim=-1)
        values[:, block] = found.values
        places[:, block] = found.indices + block * size


def replace_kernels() -> None:
    """In this process's vLLM, whose Triton is interpreted."""
    from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch
    from vllm.v1.worker.gpu.sample import gumbel

    def replace(
        module: ModuleType, name: str, run: Callable[..., None], *applies: Callable[..., bool]
    ) -> None:
        vars(module)[name] = HostKernel(run, vars(module)[name], *applies)

    replace(buffer_utils, "_apply_write_kernel", apply_write, is_one_group)
    replace(input_batch, "_prepare_prefill_inputs_kernel", prepare_prefill_inputs)
    replace(input_batch, "_prepare_pos_seq_lens_kernel", prepare_pos_seq_lens)
    replace(
        input_batch, "_combine_sampled_and_draft_tokens_kernel", combine_sampled, is_without_drafts
    )
    replace(input_batch, "_get_num_sampled_and_rejected_kernel", count_sampled)
    replace(input_batch, "_post_update_kernel", post_update, has_no_drafts)
    replace(gumbel, "_gumbel_sample_kernel", sample_greedy, is_greedy)
    tables: Any = block_table.BlockTables
    for run in (gather_block_tables, compute_slot_mappings):
        setattr(tables, run.__name__, on_one_group(run, getattr(tables, run.__name__)))


def main(words: Sequence[str]) -> int:
    """As `kvmig.launcher.shared_fork_server`."""
    from tests.support import runner_v2  # before vLLM: it looks for Triton's backends

    load = VllmKind.load

    def load_runner(kind: VllmKind) -> None:
        runner_v2.pytest_collection_finish()
        replace_kernels()
        load(kind)

    VllmKind.load = load_runner  # type: ignore[assignment,method-assign]
    return shared_fork_server.main(words)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
