"""A BLIP-2 that reads with the bundled model and sees with random eyes, made on the spot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from kvmig.models import BUNDLED

IMAGE_TOKEN = 263
"""The bundled tokenizer's <|end|>, under another name."""
IMAGE_TOKENS = 4
PIXELS = 28
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": PIXELS,
    "patch_size": 14,
}
_QFORMER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "encoder_hidden_size": 32,
}
_PROCESSOR = {
    "processor_class": "Blip2Processor",
    "image_processor_type": "BlipImageProcessor",
    "num_query_tokens": IMAGE_TOKENS,
    "size": {"height": PIXELS, "width": PIXELS},
}


def make(folder: Path) -> Path:
    """Write the checkpoint into `folder`, and return it."""
    config = {
        "architectures": ["Blip2ForConditionalGeneration"],
        "model_type": "blip-2",
        "text_config": json.loads((BUNDLED / "config.json").read_text()),
        "vision_config": _VISION,
        "qformer_config": _QFORMER,
        "num_query_tokens": IMAGE_TOKENS,
        "image_token_index": IMAGE_TOKEN,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).write_text(json.dumps(_PROCESSOR))
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, folder)
    tokenizer = (BUNDLED / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace("<|end|>", "<image>"))
    _write_weights(folder)
    return folder


def _write_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        Blip2QFormerConfig,
        Blip2QFormerModel,
        Blip2VisionConfig,
        Blip2VisionModel,
    )

    torch.manual_seed(1)
    read = load_file(BUNDLED / "model.safetensors")
    weights = {f"language_model.{name}": tensor for name, tensor in read.items()}
    parts = {
        "vision_model": Blip2VisionModel(Blip2VisionConfig(**_VISION)),
        "qformer": Blip2QFormerModel(Blip2QFormerConfig(**_QFORMER)),
        "language_projection": torch.nn.Linear(32, 128),
    }
    for part, module in parts.items():
        for name, tensor in module.state_dict().items():
            if tensor.dim() > 1:  # wide enough for one image to look unlike another
                tensor.normal_(std=0.4)
            weights[f"{part}.{name}"] = tensor.to(torch.bfloat16).contiguous()
    weights["query_tokens"] = torch.randn(1, IMAGE_TOKENS, 32, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
