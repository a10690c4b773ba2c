"""Which kind of engine a name means."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvmig.engines.kind import EnginePlugin


def kind_of(name: str) -> EnginePlugin:
    """name: one of `kvmig.core.config.ENGINES`. Nothing else of that kind is imported."""
    if name == "transformers":
        from kvmig.engines.transformers.kind import TransformersKind

        return TransformersKind()
    if name == "toy":
        from kvmig.engines.toy.kind import ToyKind

        return ToyKind()
    from kvmig.engines.vllm.kind import VllmKind

    return VllmKind()


def with_tree(engine: str, environment: Mapping[str, str], tree: str) -> dict[str, str]:
    """The environment of a process whose engine is that in the folder `tree`; empty: installed."""
    if not tree:
        return dict(environment)
    path = os.pathsep.join(filter(None, (tree, environment.get("PYTHONPATH", ""))))
    return {**environment, "PYTHONPATH": path, **kind_of(engine).apart(tree, environment)}
