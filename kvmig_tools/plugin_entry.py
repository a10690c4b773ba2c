"""kvmig's entry point for vLLM in a folder, as an installed kvmig has it."""

from __future__ import annotations

from pathlib import Path

GROUP = "vllm.general_plugins"


def entry_point(folder: Path) -> Path:
    """Write it there; the folder goes on PYTHONPATH."""
    installed = folder / "kvmig_entry-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kvmig-entry\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(f"[{GROUP}]\nkvmig = kvmig.plugin:start\n")
    return folder
