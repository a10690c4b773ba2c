"""An inference engine of a few pages, and all that it takes to let its requests migrate.

    pytest --pyargs kvmig.testing --engine examples.toy_engine:factory

`model` and `batch` are the engine, `cache` its KV cache; `engine` is its adapter: the Engine port
of kvmig. Everything runs on one event loop, so whatever a method does, it does between two steps.
"""

from examples.toy_engine.engine import ToyEngine


def factory() -> ToyEngine:
    """A new engine."""
    return ToyEngine()
