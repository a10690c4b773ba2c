"""A Whisper with random weights, a feature extractor and a tokenizer, made on the spot."""

from __future__ import annotations

import io
import math
import struct
import wave
from pathlib import Path

LETTERS = 256
"""Its first tokens: one for each byte. The special ones follow."""
RATE = 16_000
"""Samples a second that it listens to."""
LENGTH = 448
"""Tokens of an answer at most, as Whisper's; it never ends earlier."""
QUIET = 0.001
"""Embeddings of special tokens against those of letters: none is ever the likeliest."""


def make(folder: Path) -> Path:
    """Write the checkpoint into `folder`, and return it."""
    import torch
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizer,
    )
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    special = [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{language}|>" for language in LANGUAGES),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"),
        *("<|nospeech|>", "<|notimestamps|>"),
    ]
    vocabulary = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    vocabulary |= {word: LETTERS + number for number, word in enumerate(special)}
    ends, starts = vocabulary["<|endoftext|>"], vocabulary["<|startoftranscript|>"]
    tokens = {
        "bos_token_id": ends, "eos_token_id": ends, "pad_token_id": ends,
        "decoder_start_token_id": starts,
    }  # fmt: skip
    config = WhisperConfig(
        vocab_size=len(vocabulary), num_mel_bins=80, d_model=64, max_target_positions=LENGTH,
        encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_layers=6, decoder_attention_heads=2, decoder_ffn_dim=64,
        suppress_tokens=None, begin_suppress_tokens=None, **tokens,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = WhisperForConditionalGeneration(config)
        model.model.decoder.embed_tokens.weight.data[LETTERS:] *= QUIET
    model.generation_config = GenerationConfig(max_length=LENGTH, **tokens)
    model.save_pretrained(folder)
    tokenizer = WhisperTokenizer(
        vocab=vocabulary, merges=[], extra_special_tokens=special[1:], model_max_length=1024
    )
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    return folder


def recording(seconds: float) -> bytes:
    """A WAV file with a tone."""
    samples = (
        int(8000 * math.sin(2 * math.pi * 440 * at / RATE)) for at in range(int(seconds * RATE))
    )
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes(b"".join(struct.pack("<h", one) for one in samples))
    return file.getvalue()
