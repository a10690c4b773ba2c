"""Models that travel with the package."""

from pathlib import Path

BUNDLED: Path = Path(__file__).resolve().parent / "count"
"""Folder of the bundled checkpoint, which counts on from the prompt's number."""

__all__ = ["BUNDLED"]
