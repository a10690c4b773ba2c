"""`vllm serve` with kvmig's plugin: as a module, since the command wants vLLM's other package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvmig.models import BUNDLED
from kvmig_tools.plugin_entry import entry_point
from kvmig_tools.served import Served

ROOT = Path(__file__).parents[2]
COMMAND = ("-m", "vllm.entrypoints.openai.api_server")


def plugin_server(
    flags: Sequence[str],
    folder: Path,
    model: str | Path = BUNDLED,
    environment: Mapping[str, str] | None = None,
    admin_key: str = "",
    first: Sequence[str | Path] = (),
    command: Sequence[str] = COMMAND,
) -> Served:
    """In a folder for its log. first: folders before all others on its path."""
    return Served(
        flags,
        model=model,
        command=command,
        environment={**plugin_environment(folder, first), **(environment or {})},
        log=folder / "log",
        admin_key=admin_key,
    )


def plugin_environment(folder: Path, first: Sequence[str | Path] = ()) -> dict[str, str]:
    """KVMIG=1, and the plugin's entry point in `folder`, beside what else is there."""
    path = ":".join(map(str, (*first, entry_point(folder), ROOT)))
    return {"PYTHONPATH": path, "KVMIG": "1"}
