"""What vLLM says of a model's sizes before it is loaded is what its engine then has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]

CODE = """
import json, sys
from pathlib import Path
from kvmig.engines.vllm.kind import VllmKind
from kvmig.engines.vllm.compat import planning
from tests.support.zoo import SERVING_FLAGS, make

kind = VllmKind()
kind.prepare()
kind.load()
model = make(sys.argv[1], Path(sys.argv[2]))
argv = [str(model), "--enforce-eager", "--kv-cache-memory-bytes=256M", "--max-model-len=1216"]
argv += SERVING_FLAGS.get(sys.argv[1], ())
both = kind.sizes(kind.parse([*argv, "--tensor-parallel-size=2"]))
sizes = kind.sizes(kind.parse(argv))
core = kind.make(argv, 0)._core
cache = core.scheduler.kv_cache_config
pages = [
    (len(group.layer_names), group.kv_cache_spec.page_size_bytes, group.kv_cache_spec.block_size)
    for group in cache.kv_cache_groups
]
block = cache.kv_cache_tensors[0].size // cache.num_blocks
specs = core.model_executor.get_kv_cache_specs()
need = sizes.request + sizes.reserved
by_model = getattr(planning, "get_global_kv_cache_groups", None)  # from 0.33 on
groups = [] if by_model is None else [by_model(core.vllm_config, specs)]
taken = planning.get_kv_cache_configs(core.vllm_config, specs, [need], *groups)[0]
try:
    planning.get_kv_cache_configs(core.vllm_config, specs, [need - block], *groups)
    refused = ""
except ValueError as error:
    refused = str(error)
files = sum(one.stat().st_size for one in model.glob("*.safetensors"))
found = dict(
    token=sizes.token, shared=both.token, weights=sizes.weights, part=both.weights,
    files=sizes.files, on_disk=files, pages=pages, block=block, shortest=sizes.shortest,
    reserved=sizes.reserved, need=need, taken=taken.num_blocks * block, refused=refused,
)
print("found: " + json.dumps(found), flush=True)
import os
os._exit(0)
"""


def found_of(family: str, folder: Path) -> dict[str, Any]:
    """What vLLM says before, and what a running engine of the family has. Sizes are bytes."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, family, str(folder)],
        capture_output=True, text=True, timeout=200, check=False, env=dict(os.environ),
    )  # fmt: skip
    lines = [one for one in done.stdout.splitlines() if one.startswith("found: ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("found: "))
    return found


@pytest.mark.parametrize(("family", "split"), [("llama3", True), ("deepseek-v2", False)])
def test_a_token_takes_in_the_cache_what_vllm_said_before(
    family: str, split: bool, tmp_path: Path
) -> None:
    """split: whether two workers share a token's bytes; a latent of MLA is with each."""
    found = found_of(family, tmp_path)
    assert found["token"] == sum(layers * page // block for layers, page, block in found["pages"])
    assert found["shortest"] == sum(layers * page for layers, page, _ in found["pages"])
    assert found["shared"] == (found["token"] // 2 if split else found["token"])
    assert 0 < found["part"] < found["weights"]
    assert 0 < found["on_disk"] - found["files"] < 100_000, "all but the headers"


@pytest.mark.parametrize("family", ["gemma3", "granite4", "llama3"])
def test_vllm_starts_with_the_cache_that_one_request_takes_and_with_no_block_less(
    family: str, tmp_path: Path
) -> None:
    """gemma3: groups of windows are padded; granite4: states beside attention."""
    found = found_of(family, tmp_path)
    assert found["reserved"] == found["block"]
    assert found["shortest"] == len(found["pages"]) * found["block"]
    assert found["taken"] == found["need"], "whole blocks"
    assert "To serve at least one request with the model's max seq len" in found["refused"]
