"""How long the parts of an instance's start took. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Compiled = Literal["", "found", "made"]


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the parts of making an engine, in their order."""

    weights_s: Annotated[float, Meta(description="Device, model and weights.")] = 0.0
    compile_s: Annotated[
        float, Meta(description="Compiling the model's graph, or loading it compiled.")
    ] = 0.0
    memory_s: Annotated[
        float, Meta(description="The step that measures what is left for the KV cache.")
    ] = 0.0
    kv_cache_s: Annotated[float, Meta(description="Making the KV cache.")] = 0.0
    graphs_s: Annotated[
        float, Meta(description="Warming up kernels and capturing CUDA graphs.")
    ] = 0.0
    compiled: Annotated[
        Compiled,
        Meta(
            description="found: the compiled graph was in the cache; made: it was compiled now;"
            " empty: nothing is compiled, or that is not known."
        ),
    ] = ""


class StartTimes(EngineTimes, frozen=True, kw_only=True):
    """The same of an instance's process, from its beginning until it serves."""

    imports_s: Annotated[
        float, Meta(description="Importing libraries; next to nothing in a fork.")
    ] = 0.0
    warm_up_s: Annotated[
        float, Meta(description="First tokens, and what is measured before requests come.")
    ] = 0.0
    total_s: Annotated[float, Meta(description="All of it, other things included.")] = 0.0

    def words(self) -> str:
        """The times in words: the whole, and each part that took a tenth of a second or more."""
        compiled = {"": "compile", "found": "compiled before", "made": "compile"}[self.compiled]
        parts = (
            ("imports", self.imports_s),
            ("weights", self.weights_s),
            (compiled, self.compile_s),
            ("memory", self.memory_s),
            ("KV cache", self.kv_cache_s),
            ("graphs", self.graphs_s),
            ("warm-up", self.warm_up_s),
        )
        said = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts if seconds >= 0.1)
        return f"{self.total_s:.1f} s" + (f": {said}" if said else "")
