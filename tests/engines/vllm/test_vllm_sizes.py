"""What vLLM says of a model's sizes before it is loaded is what its engine then has."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.long]

Sizes = dict[str, Any]
"""As tests/support/measured_sizes.py finds them."""
FAMILIES = ("llama3", "deepseek-v2", "gemma3", "granite4")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sizes]:
    """By family."""
    folder = str(tmp_path_factory.mktemp("sizes"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.measured_sizes", folder, *FAMILIES],
        capture_output=True, text=True, timeout=SERVER_PATIENCE_S, check=False,
    )  # fmt: skip
    words = [one.partition(" ") for one in done.stdout.splitlines()]
    found = {family: json.loads(rest) for family, _, rest in words if family in FAMILIES}
    assert tuple(found) == FAMILIES, done.stderr[-3000:]
    return found


@pytest.mark.parametrize(("family", "split"), [("llama3", True), ("deepseek-v2", False)])
def test_a_token_takes_in_the_cache_what_vllm_said_before(
    every: dict[str, Sizes], family: str, split: bool
) -> None:
    """split: whether two workers share a token's bytes; a latent of MLA is with each."""
    found = every[family]
    assert found["token"] == sum(layers * page // block for layers, page, block in found["pages"])
    assert found["shortest"] == sum(layers * page for layers, page, _ in found["pages"])
    assert found["shared"] == (found["token"] // 2 if split else found["token"])
    assert 0 < found["part"] < found["weights"]
    assert 0 < found["on_disk"] - found["files"] < 100_000, "all but the headers"


@pytest.mark.parametrize("family", ["gemma3", "granite4", "llama3"])
def test_vllm_starts_with_the_cache_that_one_request_takes_and_with_no_block_less(
    every: dict[str, Sizes], family: str
) -> None:
    """gemma3: groups of windows are padded; granite4: states beside attention."""
    found = every[family]
    assert found["reserved"] == found["block"]
    assert found["shortest"] == len(found["pages"]) * found["block"]
    assert found["taken"] == found["need"], "whole blocks"
    assert "To serve at least one request with the model's max seq len" in found["refused"]
