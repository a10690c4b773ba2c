"""What instances get of a machine, and whether as many clients may connect as may wait."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

import pytest

from kvmig.core.config import SPARE_FILES
from kvmig.core.errors import ConfigError
from kvmig.engines.registry import with_tree
from kvmig.engines.vllm.kind import KEPT, PRODUCTS_KEPT
from kvmig.launcher.environment import (
    GIB,
    instance_environment,
    llumlet_environment,
    memory_flags,
    too_few_files,
    worker_threads,
)
from kvmig.process.sockets import raise_open_files


def on_cpu(
    *argv: str, kv_bytes: int | None = None, workers: Sequence[int] = (1, 1), **env: str
) -> list[str]:
    """Of a machine with 20 GiB."""
    return memory_flags(["MODEL", *argv], kv_bytes, workers, 0, 20 * GIB, env, weights=0)


def test_cpu_instances_share_the_available_memory() -> None:
    flag, value = on_cpu()

    assert flag == "--kv-cache-memory-bytes"
    assert 2 * (int(value) + GIB) <= 20 * GIB


def test_a_number_of_blocks_is_no_word_about_memory() -> None:
    """vLLM would ask for 92 % of the machine for each of them."""
    assert on_cpu("--num-gpu-blocks-override=600") == on_cpu()


def test_the_users_own_share_stands() -> None:
    assert on_cpu(kv_bytes=GIB) == []
    assert on_cpu("--gpu-memory-utilization=0.1") == []
    assert on_cpu(VLLM_CPU_KVCACHE_SPACE="1") == []


def test_too_many_instances_are_refused_with_what_each_needs() -> None:
    with pytest.raises(ConfigError, match=r"50 instances: each needs 1\.1 GiB"):
        on_cpu(workers=[1] * 50)


def test_a_cache_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower --instances or --kv-cache-memory-bytes"):
        on_cpu(kv_bytes=100 * GIB)
    with pytest.raises(ConfigError, match="each needs 101"):
        on_cpu(VLLM_CPU_KVCACHE_SPACE="100")


def test_a_small_cache_is_no_lack_of_memory() -> None:
    assert on_cpu(kv_bytes=32 << 20) == []


def test_instances_on_one_gpu_share_it() -> None:
    assert memory_flags([], None, [1, 1], 1, 0, {}, 0) == ["--gpu-memory-utilization", "0.450"]
    assert memory_flags([], None, [1, 1], 2, 0, {}, 0) == []
    assert memory_flags([], GIB, [1, 1], 1, 0, {}, 0) == []


def test_a_cache_on_a_gpu_that_is_shared_has_the_arenas_addresses_and_asks_for_no_free_memory() -> (
    None
):
    share, size = ["--gpu-memory-utilization", "0.01"], ["--kv-cache-memory-bytes", str(GIB)]
    assert memory_flags([], None, [1], 1, 0, {}, 0, arena=GIB) == [*share, *size]
    assert memory_flags([], 5, [1], 1, 0, {}, 0, arena=GIB) == share
    own = ["--gpu-memory-utilization=0.3"]
    assert memory_flags(own, None, [1], 1, 0, {}, 0, arena=GIB) == size


def test_each_worker_of_an_instance_takes_its_share_of_memory() -> None:
    _, value = on_cpu(workers=[2, 1])

    assert 3 * int(value) + 4 * GIB <= 20 * GIB  # two workers have a third process above them


def test_workers_share_the_cores() -> None:
    assert worker_threads([1, 2, 1], 8) == 2
    assert worker_threads([1] * 9, 8) == 1
    assert instance_environment([], 2, {})["OMP_NUM_THREADS"] == "2"
    assert instance_environment([], 2, {"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize("name", KEPT)
def test_an_instance_of_vllm_on_a_cpu_keeps_few_compiled_matrix_products(name: str) -> None:
    """The libraries' own bounds of 1,024 are half a GiB, beyond what an instance is planned for."""
    assert llumlet_environment("vllm", [], 1, {})[name] == str(PRODUCTS_KEPT)
    assert llumlet_environment("vllm", [], 1, {name: "7"})[name] == "7"
    assert name not in llumlet_environment("vllm", ["0"], 1, {})
    assert name not in llumlet_environment("transformers", [], 1, {})


def test_an_instance_sees_its_own_gpus_only() -> None:
    assert instance_environment(["5", "6"], 2, {})["CUDA_VISIBLE_DEVICES"] == "5,6"


def test_an_engine_in_a_folder_goes_before_the_installed_one_and_keeps_its_cache_apart() -> None:
    base = {"PYTHONPATH": "/own", "XDG_CACHE_HOME": "/cache"}

    here, there = (with_tree("vllm", base, tree) for tree in ("/vllm-a", "/vllm-b"))

    assert here["PYTHONPATH"] == f"/vllm-a{os.pathsep}/own"
    assert here["VLLM_CACHE_ROOT"].startswith("/cache/vllm-")
    assert here["VLLM_CACHE_ROOT"] != there["VLLM_CACHE_ROOT"]
    assert with_tree("vllm", base, "") == base


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        assert raise_open_files() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_few_are_named_with_what_is_needed() -> None:
    assert too_few_files(10_000, 10_000, 1) == (
        "only 10000 open files are allowed (ulimit -Hn), --max-waiting 10000 may take 10500:"
        " connections beyond that are closed; raise the one or lower the other"
    )


def test_front_ends_share_those_that_wait() -> None:
    assert too_few_files(5_000 + SPARE_FILES, 10_000, 2) == ""


def test_no_limit_is_enough() -> None:
    assert too_few_files(resource.RLIM_INFINITY, 10_000, 1) == ""
