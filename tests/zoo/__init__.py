"""Tiny random checkpoints of the families that people serve, each with a KV cache of real shape."""

from tests.zoo.checkpoints import eagle, make
from tests.zoo.families import FAMILIES

__all__ = ["FAMILIES", "eagle", "make"]
