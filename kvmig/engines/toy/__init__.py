"""An inference engine of a few pages that computes nothing, and all that lets its requests migrate.

    pytest --pyargs kvmig.testing --engine kvmig.engines.toy:factory
    python -m kvmig.serve toy --engine toy

`core` is the engine: model, KV cache and batching; `engine` is its adapter: the Engine port of
kvmig. `kind` lets `kvmig.serve` start it, `script` lets a test decide when it does what.
Everything runs on one event loop, so each method runs between two steps.
"""

from kvmig.engines.toy.engine import ToyEngine


def factory() -> ToyEngine:
    """A new engine."""
    return ToyEngine()
