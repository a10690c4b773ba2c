from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from kvmig.kernels.arrays import ArrayMemory, memory_of


class OnGpu:
    """What CuPy's arrays show; no GPU is touched."""

    def __init__(self, **more: Any) -> None:
        self.__cuda_array_interface__ = {
            "data": (0x7F00, False), "shape": (4, 3), "typestr": "<f2", "version": 3, **more,
        }  # fmt: skip


class OnOther:
    """A DLPack array of a device that kvmig knows nothing of."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 8, 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.int64])
def test_a_torch_tensor_is_found_where_torch_has_it(dtype: torch.dtype) -> None:
    tensor = torch.zeros(6, 4, dtype=dtype)[2:]
    memory = memory_of(tensor)
    assert memory == ArrayMemory(tensor.data_ptr(), tensor.nbytes, "cpu")


def test_a_torch_tensor_outlives_the_look_at_it() -> None:
    tensor = torch.arange(1000)
    for _ in range(100):
        memory_of(tensor)
    assert int(tensor.sum()) == 499500


def test_a_numpy_array_and_a_buffer_are_found() -> None:
    array = np.arange(8, dtype=np.uint16)
    memory = memory_of(array[2:])
    assert memory == ArrayMemory(array.ctypes.data + 4, 12, "cpu")
    assert memory_of(array.data[2:]) == memory


def test_read_only_bytes_are_found() -> None:
    data = b"12345678"
    memory = memory_of(data)
    assert ctypes.string_at(memory.address, memory.nbytes) == data


def test_an_array_on_a_gpu_is_found_by_its_interface() -> None:
    assert memory_of(OnGpu()) == ArrayMemory(0x7F00, 24, "cuda")
    assert memory_of(OnGpu(strides=(6, 2))) == ArrayMemory(0x7F00, 24, "cuda")


@pytest.mark.parametrize(
    "array",
    [
        torch.zeros(4, 4).t(),
        torch.zeros(4, 4)[:, :2],
        np.zeros((4, 4))[:, :2],
        memoryview(b"12345678")[::2],
        OnGpu(strides=(8, 2)),
    ],
)
def test_an_array_with_gaps_is_refused(array: Any) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        memory_of(array)


def test_an_empty_array_is_no_gap() -> None:
    assert memory_of(torch.zeros(0, 3)).nbytes == 0
    assert memory_of(np.zeros(0)).nbytes == 0


def test_another_device_is_refused_by_its_number() -> None:
    with pytest.raises(ValueError, match="device type 8 is neither"):
        memory_of(OnOther())


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(TypeError, match="float is no array"):
        memory_of(3.14)
