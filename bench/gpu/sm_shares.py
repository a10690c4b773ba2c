"""What a part of a GPU's SMs costs a step, and whether a graph keeps the part that it was captured
under: milliseconds of products of matrices as a step of decodes has them (a batch of 32 tokens),
and as a prompt of 2,048 tokens. Models' own steps are another matter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import torch

from bench.gpu.device import Site
from bench.report import Result, say
from kvmig.core.errors import KvmigError
from kvmig.engines.gate import PARTS
from kvmig.engines.shares import groups_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.green import GreenStream, smallest_groups, under_mps

SHARES = (3, 4, 5, 8)
"""Tenths, beside all."""
TOKENS = {"decode": 32, "prefill": 2048}
LAYERS = 8
KEEPS = 0.15
"""A graph's time may differ by so much from that of the same kernels on the stream itself."""


def step(site: Site, tokens: int, width: int) -> Callable[[], None]:
    """Of products in bf16 with `LAYERS` square matrices of that width."""
    values, *layers = (
        torch.randn(rows, width, device=site.device).bfloat16() / width**0.5
        for rows in (tokens, *[width] * LAYERS)
    )

    def run() -> None:
        for layer in layers:
            torch.mm(values, layer)

    return run


def measure(result: Result, site: Site, share: int, width: int) -> None:
    """Milliseconds of each kind of step on this site's stream, which takes that share."""
    with site.queue():
        for kind, tokens in TOKENS.items():
            run = step(site, tokens, width)
            result.summary[f"{kind}_ms_{share}0"] = site.seconds(run) * 1e3


def captured(site: Site, tokens: int, width: int) -> float:
    """Milliseconds on an ordinary stream of a step's graph that was captured on this site's."""
    run, graph = step(site, tokens, width), torch.cuda.CUDAGraph()
    with site.queue():
        run()
        site.settle()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            run()
    elsewhere = Site("cuda")
    with elsewhere.queue():
        return elsewhere.seconds(graph.replay) * 1e3


def on_shares(result: Result, width: int) -> None:
    """Needs torch with CUDA; says so where that, or the driver, has no parts of the SMs."""
    if not torch.cuda.is_available():
        result.samples.append({"what": "shares", "reason": "torch has no CUDA here"})
        return
    measure(result, Site("cuda"), PARTS, width)
    summary, gpu = result.summary, CudaDriver()
    try:
        summary["mps"] = float(under_mps(gpu))
        groups = smallest_groups(gpu)
        for share in SHARES:
            taken = [groups[number] for number in groups_of(share, 0, len(groups))]
            with closing(GreenStream(gpu, taken)) as stream:
                summary[f"sms_{share}0"] = stream.sms
                site = Site("cuda", stream=torch.cuda.ExternalStream(stream.handle))
                measure(result, site, share, width)
                if share == SHARES[0]:
                    graph_ms = captured(site, TOKENS["prefill"], width)
                    summary["graph_to_its_share"] = graph_ms / summary[f"prefill_ms_{share}0"]
                    summary["graph_to_all"] = graph_ms / summary[f"prefill_ms_{PARTS}0"]
        result.targets["graph_to_its_share"] = {"min": 1 - KEEPS, "max": 1 + KEEPS}
    except KvmigError as error:
        say(f"no shares: {error}")
        result.samples.append({"what": "shares", "reason": str(error)})
