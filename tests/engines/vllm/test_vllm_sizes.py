"""What vLLM says of a model's sizes before it is loaded is what its engine then has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]

CODE = """
import json, sys
from pathlib import Path
from kvmig.engines.vllm.kind import VllmKind
from tests.support.zoo import make

kind = VllmKind()
kind.prepare()
kind.load()
model = make(sys.argv[1], Path(sys.argv[2]))
argv = [str(model), "--enforce-eager", "--kv-cache-memory-bytes=64M", "--max-model-len=1216"]
both = kind.sizes(kind.parse([*argv, "--tensor-parallel-size=2"]))
sizes = kind.sizes(kind.parse(argv))
cache = kind.make(argv, 0)._core.scheduler.kv_cache_config
pages = [
    (len(group.layer_names), group.kv_cache_spec.page_size_bytes, group.kv_cache_spec.block_size)
    for group in cache.kv_cache_groups
]
files = sum(one.stat().st_size for one in model.glob("*.safetensors"))
found = (
    sizes.token, both.token, sizes.weights, both.weights, sizes.files, files, pages, sizes.shortest
)
print("found: " + json.dumps(found), flush=True)
import os
os._exit(0)
"""


@pytest.mark.parametrize(("family", "split"), [("llama3", True), ("deepseek-v2", False)])
def test_a_token_takes_in_the_cache_what_vllm_said_before(
    family: str, split: bool, tmp_path: Path
) -> None:
    """split: whether two workers share a token's bytes; a latent of MLA is with each."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, family, str(tmp_path)],
        capture_output=True, text=True, timeout=200, check=False, env=dict(os.environ),
    )  # fmt: skip
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("found: ")]
    found = json.loads(line.removeprefix("found: "))
    token, shared, weights, part, files, on_disk, pages, shortest = found
    assert token == sum(layers * page // block for layers, page, block in pages)
    assert shortest == sum(layers * page for layers, page, _ in pages)
    assert shared == (token // 2 if split else token)
    assert 0 < part < weights
    assert 0 < on_disk - files < 100_000, "all but the headers"
