"""What vLLM says of the sizes of the zoo's models before it loads them, and what their engines then
have: `python -m tests.support.measured_sizes FOLDER FAMILY...`.

Prints a line for each family: its name, and its findings as JSON. Sizes are bytes. vLLM is loaded
once; each engine is in a fork of its own, for it leaves what vLLM keeps once a process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from kvmig.engines.vllm import compat
from kvmig.engines.vllm.kind import VllmKind
from tests.support.zoo import SERVING_FLAGS, make

PLANNING: Any = vars(compat)["planning"]
"""vLLM's module, which has another name from 0.33 on."""


def measure(kind: VllmKind, family: str, folder: Path) -> dict[str, Any]:
    argv = [str(make(family, folder)), "--enforce-eager", "--kv-cache-memory-bytes=256M"]
    argv += ["--max-model-len=1216", *SERVING_FLAGS.get(family, ())]
    both: Any = kind.sizes(kind.parse([*argv, "--tensor-parallel-size=2"]))
    sizes: Any = kind.sizes(kind.parse(argv))
    made: Any = kind.make(argv, 0)
    core = made._core
    cache = core.scheduler.kv_cache_config
    pages = [
        (
            len(group.layer_names),
            group.kv_cache_spec.page_size_bytes,
            group.kv_cache_spec.block_size,
        )
        for group in cache.kv_cache_groups
    ]
    block = cache.kv_cache_tensors[0].size // cache.num_blocks
    specs = core.model_executor.get_kv_cache_specs()
    need = sizes.request + sizes.reserved
    by_model = getattr(PLANNING, "get_global_kv_cache_groups", None)  # from 0.33 on
    groups = [] if by_model is None else [by_model(core.vllm_config, specs)]
    taken = PLANNING.get_kv_cache_configs(core.vllm_config, specs, [need], *groups)[0]
    try:
        PLANNING.get_kv_cache_configs(core.vllm_config, specs, [need - block], *groups)
        refused = ""
    except ValueError as error:
        refused = str(error)
    files = sum(one.stat().st_size for one in Path(argv[0]).glob("*.safetensors"))
    return {
        "token": sizes.token, "shared": both.token, "weights": sizes.weights, "part": both.weights,
        "files": sizes.files, "on_disk": files, "pages": pages, "block": block,
        "shortest": sizes.shortest, "reserved": sizes.reserved, "need": need,
        "taken": taken.num_blocks * block, "refused": refused,
    }  # fmt: skip


def main(folder: Path, families: list[str]) -> None:
    kind = VllmKind()
    kind.prepare()
    kind.load()
    for family in families:
        if not (child := os.fork()):
            try:
                print(family, json.dumps(measure(kind, family, folder)), flush=True)
            except BaseException:  # noqa: BLE001 - the fork ends with it, and the test lacks its line
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
