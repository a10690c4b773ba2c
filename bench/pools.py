"""What a pool of two models' KV caches leaves unused, and what it costs a step.

Unused: transformers' caches in the shapes of real models (bfloat16, no weights, memory that is
never touched), in a pool of sectors, in one of head-wise blocks, and with half of it for each.
Requests of log-normal lengths are admitted while they fit, grow by a token a tick, and are taken
back, the newest first, where there is nothing left. One model has as many as fit, the other 4;
halfway they swap.

Cost: engines that decode 8 requests of some hundred tokens, with the real heads in fewer layers and
random weights. Processor time of a step with the cache in sectors, in head-wise blocks and in
memory of its own, in turns; prompts are known after the first time.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState

from bench import report
from kvmig.engines.steps import CadenceMeter
from kvmig.engines.transformers import factory, pooled
from kvmig.engines.transformers.cache import PooledCache
from kvmig.engines.transformers.config import EngineConfig
from kvmig.engines.transformers.payload import SubmittedRequest, encode
from kvmig.engines.transformers.pool import Cut, PoolShare, SharedPool, shape_of
from kvmig.engines.transformers.serving import ServingTransformers

CUTS: tuple[Cut, ...] = ("sectors", "head-wise")
MIB = 1 << 20
UNIT_ROWS = 2048
"""Tokens of a block times the size of a head: alike for all, so that heads can be shared."""
LONGEST = 2048
"""Tokens of a request."""
LENGTHS = ((161, 1.0), (338, 0.8))
"""Mean of prompts and answers, and the spread of their logarithms."""
BATCH, CONTEXT, ANSWER = 8, 300, 32


@dataclass(frozen=True)
class Model:
    """The shape of a model that there is."""

    kind: str
    layers: int
    kv_heads: int
    head: int
    q_heads: int
    hidden: int
    inner: int

    @property
    def tokens(self) -> int:
        """Of a block."""
        return UNIT_ROWS // self.head

    def folder(self, root: Path, layers: int) -> str:
        """Its configuration, with so many layers and few words."""
        folder = root / f"{self.kind}-{self.hidden}-{layers}"
        folder.mkdir(exist_ok=True)
        config = {
            "model_type": self.kind,
            "architectures": [f"{self.kind.capitalize()}ForCausalLM"],
            "num_hidden_layers": layers,
            "num_key_value_heads": self.kv_heads,
            "num_attention_heads": self.q_heads,
            "head_dim": self.head,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "vocab_size": 1024,
            "max_position_embeddings": 2 * LONGEST,
            "tie_word_embeddings": True,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


MODELS = {
    "Qwen3-0.6B": Model("qwen3", 28, 8, 128, 16, 1024, 3072),
    "Qwen3-4B": Model("qwen3", 36, 8, 128, 32, 2560, 9728),
    "Llama-3.1-8B": Model("llama", 32, 8, 128, 32, 4096, 14336),
    "Llama-3.2-1B": Model("llama", 16, 8, 64, 32, 2048, 8192),
    "TinyLlama-1.1B": Model("llama", 22, 4, 64, 32, 2048, 5632),
    "SmolLM2-135M": Model("llama", 30, 3, 64, 9, 576, 1536),
}
PAIRS = (
    ("Qwen3-0.6B", "Llama-3.2-1B"),
    ("Qwen3-4B", "Llama-3.1-8B"),
    ("Qwen3-0.6B", "SmolLM2-135M"),
    ("TinyLlama-1.1B", "Llama-3.2-1B"),
    ("TinyLlama-1.1B", "SmolLM2-135M"),
)
KEYS = ("unused of what is leased", "memory that holds tokens")
STEPPED = {"Qwen3-0.6B": 2, "SmolLM2-135M": 6}
"""Models whose steps are measured, and of how many layers."""


# -- what is left unused


def config_of(model: Model, root: Path, **more: Any) -> EngineConfig:
    """Of an engine of all its layers, for requests up to LONGEST."""
    return EngineConfig(
        model=model.folder(root, model.layers),
        dtype="bfloat16",
        block_tokens=model.tokens,
        num_blocks=LONGEST // model.tokens,
        **more,
    )


def caches(names: Sequence[str], root: Path, num_bytes: int, cut: Cut) -> list[PooledCache]:
    """transformers' caches of these models in one pool; no weights are there."""
    configs = {name: config_of(MODELS[name], root) for name in names}
    models = {name: AutoConfig.from_pretrained(one.model) for name, one in configs.items()}
    shapes = {name: (one, shape_of(one, models[name])) for name, one in configs.items()}
    pool, made = SharedPool(num_bytes, shapes, cut), []
    for name, one in configs.items():
        batching = ContinuousBatchingConfig(
            page_size=one.block_tokens,
            num_blocks=one.num_blocks,
            max_batch_tokens=256,
            max_blocks_per_request=0,
            allow_block_sharing=False,
            max_memory_percent=0.9,
        )
        stock = {
            "config": models[name],
            "continuous_batching_config": batching,
            "device": "cpu",
            "distributed_helper": DistributedHelper(None, cpu_group_timeout=1),
            "dtype": torch.bfloat16,
        }
        made.append(PooledCache(pool, one.num_blocks, **stock))
    return made


@dataclass
class Queue:
    """One model's requests, of which there are always more."""

    cache: PooledCache
    token_bytes: int
    chance: random.Random
    running: list[tuple[RequestState, int]] = field(default_factory=list)
    """With the length at which each ends."""
    names: Iterator[int] = field(default_factory=count)
    short: bool = False
    """Whether there was no room for the next."""

    def tick(self, most: int) -> None:
        """A token more for each that runs; new ones until `most` run."""
        for state, end in list(self.running):
            if not any(one is state for one, _ in self.running):
                continue  # taken back for an older one
            while not self.cache.can_store_request_tokens(state, 1):
                if not self._room():
                    self.end(self.running[-1])
                if not any(one is state for one, _ in self.running):
                    break
            else:
                state.position_offset += 1
                if state.position_offset >= end:
                    self.end((state, end))
        self.short = False
        while len(self.running) < most and not self.cache.pool.must_wait():
            prompt, answer = (self._length(*one) for one in LENGTHS)
            state = RequestState(request_id=str(next(self.names)), initial_tokens=[])
            fits = self.cache.can_store_request_tokens(state, prompt)
            if not fits and not (
                self._room() and self.cache.can_store_request_tokens(state, prompt)
            ):
                self.short = True
                return
            state.position_offset = prompt
            self.running.append((state, prompt + answer))

    def held(self) -> int:
        """Bytes of tokens."""
        tokens: int = sum(state.position_offset for state, _ in self.running)
        return self.token_bytes * tokens

    def leased(self) -> int:
        """Bytes that the other model can't have."""
        share: PoolShare = self.cache.pool
        return share.live() * share.pool.unit_bytes

    def _room(self) -> bool:
        """Whether somebody had something without use."""
        before = self.cache.pool.pool.free_units()
        self.cache.pool.try_to_free_sectors()
        return self.cache.pool.pool.free_units() > before

    def end(self, one: tuple[RequestState, int]) -> None:
        self.running.remove(one)
        self.cache.free_blocks(one[0].request_id)

    def _length(self, average: float, spread: float) -> int:
        drawn = self.chance.lognormvariate(0, spread) * average / 2.718281828 ** (spread**2 / 2)
        return min(max(4, int(drawn)), LONGEST // 2)


def waste(
    pair: tuple[str, str], root: Path, num_bytes: int, cut: Cut | None, ticks: int
) -> dict[str, float]:
    """Shares of the memory while the load swaps halfway. cut: None: half of it is each model's."""
    if cut is None:
        sides = [caches((name,), root, num_bytes // 2, "sectors")[0] for name in pair]
    else:
        sides = caches(pair, root, num_bytes, cut)
    queues = [
        Queue(cache, token_bytes(MODELS[name]), random.Random(f"{name} {number}"))
        for number, (name, cache) in enumerate(zip(pair, sides, strict=True))
    ]
    for queue in queues:
        queue.cache.pool.is_short = functools.partial(getattr, queue, "short")
    rows: list[tuple[float, float]] = []
    for tick in range(ticks):
        crowd = 10_000, 4
        for queue, most in zip(queues, crowd if tick < ticks // 2 else crowd[::-1], strict=True):
            queue.tick(most)
        if tick % 10 == 0 and tick % (ticks // 2) > ticks // 10:
            leased = num_bytes if cut is None else sum(one.leased() for one in queues)
            rows.append((sum(one.held() for one in queues), leased))
    return {
        "unit MiB": queues[0].cache.pool.pool.unit_bytes / MIB,
        "unused of what is leased": 1 - mean(held / leased for held, leased in rows),
        "memory that holds tokens": mean(held for held, _ in rows) / num_bytes,
    }


def token_bytes(model: Model) -> int:
    """Of a token's KV in bfloat16."""
    return 2 * 2 * model.layers * model.kv_heads * model.head


# -- what a step costs


class Meter(CadenceMeter):
    """Processor seconds of each step of an engine; on the engine's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[float] = []
        self._cpu_s = 0.0

    def step(self, began: float, ended: float) -> None:
        """As the engine's loop calls it."""
        super().step(began, ended)
        now = time.thread_time()
        self.steps.append(now - self._cpu_s)
        self._cpu_s = now


class Engine:
    """One that decodes batches, and how long that takes."""

    def __init__(self, serving: ServingTransformers) -> None:
        self.serving, self.meter, self.open = serving, Meter(), 0
        serving._loop.cadence_meter = self.meter
        self.done = asyncio.Event()
        self.error: BaseException | None = None
        serving.connect(self._took, lambda *call: None, self._ended)
        self.names = count()

    def _took(self, client: int, emitted: Any, frames: Any) -> None:
        self.open -= sum(one.finished for one in emitted)
        if not self.open:
            self.done.set()

    def _ended(self, error: BaseException | None) -> None:
        self.error = error
        self.done.set()

    async def batch(self) -> list[float]:
        """Processor us of each decode step of a batch."""
        chance, self.open = random.Random(0), BATCH
        self.done.clear()
        self.meter.steps.clear()
        for _ in range(BATCH):
            prompt = [chance.randrange(1024) for _ in range(CONTEXT)]
            request = SubmittedRequest(prompt_token_ids=prompt, max_tokens=ANSWER)
            self.serving.submit(1, f"r{next(self.names)}", [encode(request)])
        async with asyncio.timeout(300):
            await self.done.wait()
        if self.error is not None:
            raise self.error
        return [1e6 * one for one in self.meter.steps[-ANSWER // 2 :]]


async def costs(root: Path, rounds: int) -> list[dict[str, Any]]:
    """Rows of processor us a step: each model, each place of its cache."""
    fields: dict[str, dict[str, Any]] = {
        name: {
            "model": MODELS[name].folder(root, layers),
            "random_weights": True,
            "block_tokens": MODELS[name].tokens,
            "num_blocks": BATCH * LONGEST // 2 // MODELS[name].tokens,
        }
        for name, layers in STEPPED.items()
    }
    size = 1 << 30
    engines = {("own", name): Engine(factory(**one)) for name, one in fields.items()}
    for cut in CUTS:
        made = pooled(size, fields, cut)
        engines |= {(cut, name): Engine(one) for name, one in made.items()}
    rows: list[dict[str, Any]] = []
    for one in engines.values():
        await one.batch()
    for number in range(rounds):
        for name in fields:
            for place in ("own", *CUTS):
                steps = await engines[place, name].batch()
                rows.append({"round": number, "model": name, "place": place, "us": median(steps)})
    for one in engines.values():
        await one.serving.close(10)
    return rows


def times(rows: list[dict[str, Any]], name: str, place: str) -> float:
    """A step's time in units of one with the cache in memory of its own: median of the rounds."""
    by: dict[tuple[int, str], float] = {
        (one["round"], one["place"]): one["us"] for one in rows if one["model"] == name
    }
    return median(us / by[number, "own"] for (number, where), us in by.items() if where == place)


def unused(root: Path, sizes: Sequence[int], ticks: int) -> list[dict[str, Any]]:
    """A row for each pair of models, memory and way to cut it."""
    rows: list[dict[str, Any]] = []
    for pair in PAIRS:
        for mib in sizes:
            for cut in (None, *CUTS):
                found = waste(pair, root, mib * MIB, cut, ticks)
                rows.append({"pair": " + ".join(pair), "MiB": mib, "cut": cut or "halves", **found})
                gc.collect()
    return rows


def main(argv: list[str] | None = None) -> int:
    options = report.parser(__doc__).parse_args(argv)
    ticks, rounds = (300, 2) if options.quick else (2000, 11)
    sizes = (2048,) if options.quick else (1024, 2048, 8192)
    result = report.begin("pools", {"ticks": ticks, "rounds": rounds, "MiB": sizes})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        rows = unused(Path(name), sizes, ticks)
        steps = asyncio.run(costs(Path(name), rounds))
    result.samples = [*rows, *steps]
    result.summary = {
        **{
            f"{cut}: {key}, median": median(one[key] for one in rows if one["cut"] == cut)
            for cut in ("halves", *CUTS)
            for key in KEYS
        },
        **{
            f"{name}, {cut}: step / with a cache of its own": times(steps, name, cut)
            for name in STEPPED
            for cut in CUTS
        },
    }
    result.targets = {
        f"{name}, sectors: step / with a cache of its own": {"max": 1.05} for name in STEPPED
    }
    columns = ("pair", "MiB", "cut", "unit MiB", *KEYS)
    cells = [[one[column] for column in columns] for one in rows]
    return report.finish(result, options, [report.table("pools", columns, cells)])


if __name__ == "__main__":
    sys.exit(main())
