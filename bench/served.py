"""The server of `kvmig.cli.served`, under the name that benchmarks and tests use."""

from __future__ import annotations

from kvmig.cli.served import SMALL, Served, free_port

__all__ = ["SMALL", "Served", "free_port"]
