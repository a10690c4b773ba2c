"""A request moves between two engines in one's own process, and its answer goes on.

python -m examples.embedding
"""

from __future__ import annotations

import asyncio

import kvmig
from kvmig.engines.toy import factory

PROMPT, LENGTH = list(range(100)), 400


async def main() -> None:
    engines = {"left": factory(), "right": factory()}
    tokens: dict[str, list[int]] = {"left": [], "right": []}
    ended = asyncio.Event()

    async with kvmig.Migrator(engines) as migrator:
        for name, engine in engines.items():

            def take(client: int, emitted: list, frames: list, name: str = name) -> None:  # type: ignore[type-arg]
                for one in engines[name].decode_outputs(frames):
                    tokens[name] += one.token_ids
                    if one.finish_reason:
                        ended.set()

            engine.connect(migrator.tap(name, take), lambda *done: None, lambda error: None)

        engines["left"].submit(1, "r", engines["left"].encode_request(PROMPT, LENGTH))
        await asyncio.sleep(0.02)
        report = await migrator.migrate("r", "left", "right")
        await asyncio.wait_for(ended.wait(), 30)

    print(f"{report.state}: {len(tokens['left'])} tokens left, {len(tokens['right'])} right")
    await asyncio.gather(*(engine.close(5.0) for engine in engines.values()))


if __name__ == "__main__":
    asyncio.run(main())
