"""The other vLLM that is supported, in a folder beside the installed one."""

from __future__ import annotations

import time

from kvmig_tools.patience import SERVER_PATIENCE_S
from scripts.check import NEXT, ROOT

TREE = ROOT / ".vllm" / NEXT


def next_tree() -> str:
    """Its folder; checks that run beside this one may still be fetching it."""
    deadline = time.monotonic() + SERVER_PATIENCE_S
    while not (TREE / "complete").exists():
        assert time.monotonic() < deadline, f"python scripts/setup_env.py --vllm {NEXT} makes it"
        time.sleep(0.5)
    return str(TREE)
