"""`python make_diffusion.py FOLDER`: a Stable Diffusion with random weights, and museq's catalogue.

For the Python that has the package `diffusers`, which needs nothing else of this repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

WIDTH = 32
CATALOGUE = {
    "model_id": "tiny",
    "modality": "image/generation",
    "backend_path": "muse.modalities.image_generation.runtimes.diffusers:DiffusersText2ImageModel",
    "hf_repo": "none/tiny",
    "capabilities": {
        "device": "cpu", "dtype": "float32", "default_size": [64, 64], "default_steps": 2,
    },
}  # fmt: skip


def tokenizer() -> CLIPTokenizer:
    """A token for each byte, also for one that ends a word."""
    letters = list(bytes_to_unicode().values())
    words = [*letters, *(f"{one}</w>" for one in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def pipeline() -> StableDiffusionPipeline:
    """All of its parts, as small as will do."""
    torch.manual_seed(4)
    words = tokenizer()
    text = CLIPTextConfig(
        vocab_size=len(words), hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1,
        num_attention_heads=2, bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, norm_num_groups=8,
        block_out_channels=(WIDTH, WIDTH), cross_attention_dim=WIDTH, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    pictures = AutoencoderKL(
        block_out_channels=[WIDTH] * 4, latent_channels=4, norm_num_groups=8, sample_size=64,
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
    )  # fmt: skip
    return StableDiffusionPipeline(
        vae=pictures, text_encoder=CLIPTextModel(text), tokenizer=words, unet=unet,
        scheduler=DDIMScheduler(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip


def main(folder: Path) -> None:
    model = folder / "model"
    pipeline().save_pretrained(model)
    listed = {"tiny": {"local_dir": str(model), "hf_repo": "none/tiny", "manifest": CATALOGUE}}
    (folder / "catalog.json").write_text(json.dumps(listed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
