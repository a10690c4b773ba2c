"""Process groups of torch.distributed as a way for chunks: Gloo in host memory, NCCL on GPUs.

A group has two ranks, a source (0) and a destination (1), and is made for them alone: it
shares nothing with the groups that an engine's workers use.
"""

from __future__ import annotations

import mmap
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kvmig.ground.errors import TransportError
from kvmig.kernels.face import Device

if TYPE_CHECKING:
    import torch

POLL_S = 0.0001
NCCL_CTAS = 8
"""Of one transfer: few enough to leave the GPU to the engine's steps."""


class Backend(ABC):
    """What Gloo and NCCL do differently. Methods block; they run on a worker's thread."""

    name: str
    device: Device
    """Where its staging memory is."""
    ordered: bool
    """Whether chunks are matched by their order only, so that none may be left out."""

    @abstractmethod
    def check(self) -> None:
        """Raises TransportError if it can't be used here."""

    @abstractmethod
    def memory(self, nbytes: int) -> torch.Tensor:
        """Staging memory, uint8 [nbytes]."""

    @abstractmethod
    def open(self, store: Any, rank: int, host: str, timeout_s: float) -> Any:
        """The group, once the other rank is there, too. Raises RuntimeError if it isn't."""

    @abstractmethod
    def wait(self, work: Any, timeout_s: float) -> None:
        """Until a receive is over. Raises RuntimeError if it fails or takes too long."""


class Gloo(Backend):
    """Sockets of its own, in the clear; from pinned memory where there is a GPU."""

    name = "gloo"
    device = "cpu"
    ordered = False

    def check(self) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_gloo_available():
            raise TransportError("this build of torch has no Gloo")

    def memory(self, nbytes: int) -> torch.Tensor:
        import torch

        if torch.cuda.is_available():
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    def open(self, store: Any, rank: int, host: str, timeout_s: float) -> Any:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        return ProcessGroupGloo(store, rank, 2, options)

    def wait(self, work: Any, timeout_s: float) -> None:
        work.wait(timedelta(seconds=timeout_s))


class Nccl(Backend):
    """A communicator of its own, on streams of its own, with few CTAs."""

    name = "nccl"
    device = "cuda"
    ordered = True

    def check(self) -> None:
        import torch
        import torch.distributed as dist

        if not torch.cuda.is_available():
            raise TransportError("NCCL needs an NVIDIA GPU, and torch sees none")
        if not dist.is_available() or not dist.is_nccl_available():
            raise TransportError("this build of torch has no NCCL")

    def memory(self, nbytes: int) -> torch.Tensor:
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def open(self, store: Any, rank: int, host: str, timeout_s: float) -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.max_ctas = NCCL_CTAS
        return ProcessGroupNCCL(store, rank, 2, options)

    def wait(self, work: Any, timeout_s: float) -> None:
        # Its own wait() holds up a stream, not the caller.
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a receive has not ended within {timeout_s:g} s")
            time.sleep(POLL_S)


BACKENDS: dict[str, Backend] = {one.name: one for one in (Gloo(), Nccl())}
"""By transport's name."""
