"""Several engines with a KV connector each in this process, and NIXL under the name vLLM wants."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from vllm import envs
from vllm.distributed.kv_transfer import kv_transfer_state

from tests.support.vllm_pair import Engines
from tests.support.vllm_side import Configuration, Side

NIXL = "nixl_cu13"
"""NIXL's build; the package `nixl`, which chooses one, would bring two."""
PARTS = ("_api", "_bindings", "_utils", "logging")
ALIAS = f"""import importlib, sys
for part in {PARTS}:
    sys.modules["nixl." + part] = importlib.import_module("{NIXL}." + part)
"""


def have_nixl() -> None:
    """Let vLLM find NIXL in this process; skips where it isn't installed."""
    sys.modules.setdefault("nixl", pytest.importorskip(NIXL))
    for part in PARTS:
        sys.modules.setdefault(f"nixl.{part}", importlib.import_module(f"{NIXL}.{part}"))


def nixl_alias(folder: Path) -> Path:
    """The same for other processes: a folder for their path. Skips where it isn't installed."""
    pytest.importorskip(NIXL)
    package = folder / "nixl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ALIAS)
    return folder


def start_connected(engines: Engines, wanted: Configuration, number: int) -> Side:
    """Start an engine unless it is there, and give it its own connector back for its steps.

    vLLM has one connector a process, for its one worker there.
    """
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    envs.disable_envs_cache()  # each engine has settings of its own there
    side = engines.side(wanted, number)
    agent = kv_transfer_state._KV_CONNECTOR_AGENT
    if agent is None:  # it was there
        return side
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    step = side.core._process_engine_step

    def step_with_agent() -> bool:
        kv_transfer_state._KV_CONNECTOR_AGENT = agent
        try:
            return step()
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    setattr(side.core, "_process_engine_step", step_with_agent)  # noqa: B010
    return side
