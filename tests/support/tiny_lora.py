"""LoRA adapters for the bundled model, random ones, in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path


def make(folder: Path, number: int, within: str = "") -> Path:
    """An adapter of rank 4 in a folder of its own there; the same for the same number.

    within: what comes before the names of the model's modules, if it is a part of another.
    """
    import torch
    from safetensors.torch import save_file

    path = folder / str(number)
    path.mkdir()
    chance = torch.Generator().manual_seed(number)
    weights = {}
    for layer in range(4):
        for name, wide in (("q_proj", 256), ("v_proj", 128)):
            prefix = f"base_model.model.{within}model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(4, 128, generator=chance) * 0.2
            weights[f"{prefix}.lora_B.weight"] = torch.randn(wide, 4, generator=chance) * 0.2
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path
