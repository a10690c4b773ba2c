"""One memory for the KV caches of several models in a process, of units that any engine takes.

A unit is a sector, which holds a whole number of each engine's blocks; or, head-wise, one head's
part of a layer (`headwise`). Each engine has transformers' own `CachePool`, a `PoolShare`, and what
is free is one for all. What an engine only keeps (units without blocks, cached prefixes), any other
takes when it runs short; what its requests hold stays theirs.

Progress: the pool is at least as large as one longest request of each engine together, the
engines' floors. An engine that is short below its floor keeps those above theirs from admitting
requests, until it has what it wants: so it waits for those that run, at longest.

Engines step on threads of their own. All that touches a share happens under `SharedPool.lock`; the
model's forward pass, which takes nearly all of a step, doesn't.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, lcm
from typing import Any, Literal

import numpy as np
import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import CachePool
from transformers.generation.continuous_batching.cache_allocators.cache_pool import RegularTrees
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from kvmig.core.errors import ConfigError
from kvmig.engines.transformers.config import EngineConfig
from kvmig.kernels.heads import HeadUnits, heads

Cut = Literal["sectors", "head-wise"]
ALIGNMENT = 128
"""transformers aligns its sectors so."""
TRASH = 2
"""Units at the tensor's start that no engine gets: padding is read and written there."""


@dataclass(frozen=True)
class CacheShape:
    """The KV cache of a model: bytes of `tokens` tokens of one head of one layer, and how many."""

    unit_bytes: int
    units: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of all layers."""
        return self.unit_bytes * self.units


def shape_of(config: EngineConfig, model_config: Any) -> CacheShape:
    """model_config: of the text model."""
    itemsize = getattr(torch, config.dtype).itemsize
    return CacheShape(
        2 * config.block_tokens * find_head_dim(model_config) * itemsize,
        find_num_key_value_heads(model_config) * model_config.num_hidden_layers,
    )


class SharedPool:
    """The memory, and which of its units are free."""

    def __init__(
        self,
        num_bytes: int,
        engines: Mapping[str, tuple[EngineConfig, CacheShape]],
        cut: Cut = "sectors",
    ) -> None:
        """engines: those that will join, by name.

        Raises ConfigError for engines that can't share, or not in that few bytes.
        """
        _check_alike({name: config for name, (config, _) in engines.items()})
        shapes = {name: shape for name, (_, shape) in engines.items()}
        self.cut, self.unit_bytes = cut, _unit_bytes(cut, engines)
        self.num_units = num_bytes // self.unit_bytes
        floors = {
            name: config.num_blocks * shapes[name].units
            if cut == "head-wise"
            else ceil(config.num_blocks / (self.unit_bytes // shapes[name].block_bytes))
            for name, (config, _) in engines.items()
        }
        if sum(floors.values()) > self.num_units:
            least = sum(floors.values()) * self.unit_bytes
            raise ConfigError(
                f"transformers pool: {num_bytes} bytes are {self.num_units} units of"
                f" {self.unit_bytes}, but one longest request of each engine takes {floors}:"
                f" {least - num_bytes} bytes are missing"
            )
        # Not all zeros: who has asked for much has no more in use than what was written so far.
        self.tensor = torch.empty((self.num_units + TRASH) * self.unit_bytes, dtype=torch.uint8)
        self.tensor[: TRASH * self.unit_bytes] = 0
        self.lock = threading.RLock()
        free = range(TRASH, self.num_units + TRASH)
        self.free_sectors = list(free) if cut == "sectors" else []
        self.heads: HeadUnits | None = None
        """Free units, where they are those of heads."""
        if cut == "head-wise":
            self.heads = heads(np.array(free, np.int64))
        self.shares: list[PoolShare] = []

    def free_units(self) -> int:
        """Units that no engine has."""
        return self.heads.free if self.heads is not None else len(self.free_sectors)


def _check_alike(configs: Mapping[str, EngineConfig]) -> None:
    if not configs:
        raise ConfigError("transformers pool: it has no engine, must have one or more")
    for field in ("dtype", "device"):
        values = {name: getattr(one, field) for name, one in configs.items()}
        if len(set(values.values())) > 1:
            raise ConfigError(f"transformers pool: {field} is {values}, must be alike for all")
    if any(one.device != "cpu" for one in configs.values()):
        raise ConfigError("transformers pool: device is 'cuda', must be cpu for now")


def _unit_bytes(cut: Cut, engines: Mapping[str, tuple[EngineConfig, CacheShape]]) -> int:
    if cut == "sectors":
        return lcm(*(shape.block_bytes for _, shape in engines.values()), ALIGNMENT)
    sizes = {name: shape.unit_bytes for name, (_, shape) in engines.items()}
    if len(set(sizes.values())) > 1:
        tokens = {name: config.block_tokens for name, (config, _) in engines.items()}
        raise ConfigError(
            f"transformers pool: head-wise blocks are of {sizes} bytes with block_tokens"
            f" {tokens}, must be alike for all: fewer tokens where heads are larger"
        )
    return next(iter(sizes.values()))


class PoolShare(CachePool):
    """One engine's blocks, in sectors of the pool."""

    def __init__(
        self, pool: SharedPool, cache: PagedAttentionCache, floor_blocks: int, num_sectors: int
    ) -> None:
        """floor_blocks: what the engine's longest request takes."""
        self.pool, self.cache = pool, cache
        self.floor_blocks = floor_blocks
        self.is_short: Callable[[], bool] = lambda: False
        """Whether its scheduler has requests that it has no room for; under the lock."""
        super().__init__(num_sectors, num_allocators=1, num_reserved_sectors=TRASH)
        pool.shares.append(self)

    def reset(self) -> None:
        """Begin again without a sector."""
        self._free_blocks = [RegularTrees(0)]

    @property
    def free_sectors(self) -> Sequence[int]:
        """Anybody's."""
        return self.pool.free_sectors

    @property
    def others(self) -> list[PoolShare]:
        """The pool's other engines."""
        return [one for one in self.pool.shares if one is not self]

    def live_blocks(self) -> set[int]:
        """Blocks that requests hold."""
        (allocator,) = self.cache.cache_allocators.values()
        return {block for held in allocator.block_table.values() for block in held}

    def live(self) -> int:
        """Units that no other engine can have: a request has something in them."""
        per_sector = self.blocks_per_sector[0]
        return len({block // per_sector for block in self.live_blocks()})

    def floor(self) -> int:
        """Units that one longest request takes."""
        return ceil(self.floor_blocks / self.blocks_per_sector[0])

    def blocks_in(self, units: int) -> int:
        """Blocks that `units` units hold."""
        return units * self.blocks_per_sector[0]

    def blocks_left(self) -> int:
        """Blocks that its requests could have now, if all engines gave what they only keep."""
        units = self.pool.num_units - sum(one.live() for one in self.others)
        return self.blocks_in(units) - len(self.live_blocks())

    def must_wait(self) -> bool:
        """Whether it has more than its floor while another is short of its own."""
        if not any(one.is_short() and one.live() < one.floor() for one in self.others):
            return False
        return self.live() > self.floor()

    def give_back(self) -> None:
        """Give back its units that hold no block."""
        super().try_to_free_sectors()

    def try_to_free_sectors(self) -> None:
        """Let all engines give back the units in which they have no block."""
        for one in self.pool.shares:
            one.give_back()

    def leave(self) -> None:
        """Give back everything, for good."""
        with self.pool.lock:
            if self in self.pool.shares:
                self.cache.reset()
                self.pool.shares.remove(self)
