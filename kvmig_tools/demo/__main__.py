"""Arguments, a server if none is named, and the exit code."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import Console

from kvmig.core.errors import KvmigError
from kvmig_tools.demo.client import Api, DemoFailed
from kvmig_tools.demo.run import Moved, marks, unmoved
from kvmig_tools.demo.screen import Screen, committed
from kvmig_tools.served import SMALL, Served

PROMPT = "Count: 0001 0002"


def positive(text: str) -> int:
    """A number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def parser() -> argparse.ArgumentParser:
    """The demo's flags."""
    root = argparse.ArgumentParser(
        prog="python -m kvmig_tools.demo",
        description="Stream a long answer, move it between instances while it streams, and compare "
        "it with the same answer left alone. Exit code 1 if they differ.",
    )
    root.add_argument("--url", help="a running server (default: starts one for the demo)")
    root.add_argument("--prompt", default=PROMPT, help="default: %(default)r")
    root.add_argument("--tokens", type=positive, default=2000, help="default: %(default)s")
    root.add_argument("--moves", type=positive, default=6, help="default: %(default)s")
    return root


async def demo(url: str, options: argparse.Namespace, screen: Screen) -> bool:
    """Whether the text that was moved equals the one that was not. Raises DemoFailed."""
    async with Api.at(url) as api:
        body = {
            "model": await api.model(),
            "prompt": options.prompt,
            "max_tokens": options.tokens,
            "temperature": 0,
        }

        def alone() -> dict[str, object]:
            # A salt of its own: no run finds the other's blocks in a prefix cache.
            return {**body, "cache_salt": secrets.token_hex(8)}

        screen.say(f"\n{options.prompt}")
        run = Moved(api, alone(), marks(options.tokens, options.moves), screen.show)
        shown = await run.run()
        screen.end()
        text = await unmoved(api, alone())
    screen.table(shown)
    if not committed(shown):
        raise DemoFailed("no migration came about")
    equal = text == shown.ledger.text
    screen.verdict(equal)
    return equal


def main(argv: Sequence[str]) -> int:
    """0 if all was as it should be; 1 if the texts differ or it failed, with one sentence."""
    options = parser().parse_args(argv)
    screen = Screen(Console(highlight=False))
    try:
        with ExitStack() as stack:
            url = options.url or stack.enter_context(Served(SMALL)).url
            return 0 if asyncio.run(demo(url, options, screen)) else 1
    except KvmigError as failure:
        print(f"kvmig: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
