"""Tiny random checkpoints of the families that people serve, each with a KV cache of real shape."""

from tests.support.zoo.checkpoints import eagle, make
from tests.support.zoo.families import FAMILIES, SERVING_FLAGS

__all__ = ["FAMILIES", "SERVING_FLAGS", "eagle", "make"]
