"""UCX's transports for a GPU's memory, which NIXL uses: named before it starts, and those that the
machine lacks are logged.

UCX takes what works without a word, so a machine without one kernel module is only slow. Where the
KV cache is on a GPU its transports are therefore asked for by name, and a log line names those that
aren't there, with what UCX does instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

NAMED = "ib,tcp,sm,self,cuda_copy,cuda_ipc,gdr_copy"
"""UCX_TLS: RDMA, and what there is without it; of GPUs' memory by NVLink or PCIe (cuda_ipc), by
small writes of the CPU (gdr_copy), and through the host's memory (cuda_copy)."""
_PEERMEM, _GDR = "sys/module/nvidia_peermem", "dev/gdrdrv"
_ROOT = Path("/")


def name_gpu_transports() -> None:
    """Ask for them, unless the user has chosen others. Before UCX starts in this process."""
    os.environ.setdefault("UCX_TLS", NAMED)


def find_fall_backs(dma_buf: bool, root: Path = _ROOT) -> Iterator[str]:
    """What isn't there for a GPU's memory, and what UCX does then, a line each.

    dma_buf: whether the GPU's memory can be registered as a DMA-BUF.
    """
    chosen = os.environ.get("UCX_TLS", "")
    if not dma_buf and not (root / _PEERMEM).exists():
        yield (
            "RDMA devices don't reach the GPU's memory (the module nvidia_peermem isn't loaded, "
            "the driver exports no DMA-BUF): UCX copies through the host's memory (cuda_copy)"
        )
    if "gdr_copy" in chosen and not (root / _GDR).exists():
        yield "gdr_copy isn't there (no /dev/gdrdrv): UCX copies small pieces by cuda_copy"
    if "cuda_ipc" not in chosen and "cuda" not in chosen.split(",") and chosen != "all":
        yield (
            f"UCX_TLS is {chosen}, without cuda_ipc: GPUs of one host go through the host's memory"
        )
