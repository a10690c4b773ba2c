"""Models come from disk unless the user allows a hub."""

from __future__ import annotations

import os
from pathlib import Path

from kvmig.ground.errors import ConfigError

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}
"""Defaults of the environment; what the user has set stays."""


def set_offline() -> None:
    """To be called before a library that knows hubs is imported."""
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)


def check_model(model: str) -> None:
    """Refuse a model that is not a folder on disk, unless the user allowed the hub."""
    if os.environ.get("HF_HUB_OFFLINE") != "1":
        return
    path = Path(model)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"MODEL is {model}, must be a folder with a config.json"
            " (to load from a hub, set HF_HUB_OFFLINE=0)"
        )
