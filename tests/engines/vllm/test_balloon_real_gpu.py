"""A KV cache's tensor over pages that come and go, on a GPU that there is; needs torch and vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvmig.core.layout import BlockRegion
from kvmig.engines.backing import VmmBacking
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.vmm import AddressRange

LAYERS, BLOCKS = 2, 8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def addresses() -> Iterator[AddressRange]:
    torch.zeros(1, device="cuda")
    gpu = CudaDriver(0)
    probe = AddressRange(gpu, 1)
    made = AddressRange(gpu, LAYERS * BLOCKS * probe.page)
    probe.close()
    made.cover()
    yield made
    torch.cuda.synchronize()
    made.close()


def test_a_graph_that_was_captured_at_the_start_computes_in_pages_that_have_come_and_gone(
    addresses: AddressRange,
) -> None:
    from kvmig.engines.vllm.allocation import tensor_at

    page = addresses.page
    whole = tensor_at(addresses, LAYERS * BLOCKS * page)
    assert (whole.device.type, whole.dtype) == ("cuda", torch.int8)
    assert whole.data_ptr() == addresses.address
    cache = whole.view(LAYERS, BLOCKS, page)
    cache[:] = 3  # as vLLM's warm-up
    one = torch.tensor([2], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.index_add_(1, one, torch.ones(LAYERS, 1, page, dtype=torch.int8, device="cuda"))
    torch.cuda.synchronize()
    addresses.drop(addresses.pages)
    layer = BLOCKS * page
    regions = [
        BlockRegion(addresses.address + index * layer, page, page) for index in range(LAYERS)
    ]
    backing = VmmBacking(addresses, regions, BLOCKS)
    for _ in range(3):
        backing.take_pages([2])
        graph.replay()
        graph.replay()
        assert bool((cache[:, 2] == 2).all())
        backing.give_pages([2])


def test_pages_go_back_to_the_device(addresses: AddressRange) -> None:
    addresses.drop(addresses.pages)
    free, _ = torch.cuda.mem_get_info()
    addresses.put(addresses.pages)
    assert free - torch.cuda.mem_get_info()[0] >= addresses.size
    addresses.drop(addresses.pages)
    assert free - torch.cuda.mem_get_info()[0] < addresses.page
