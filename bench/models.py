"""Models that benchmarks serve: the bundled one, and one heavy enough to stand for real ones.

The bundled checkpoint decodes a token in about 1.5 ms on a CPU, so messages weigh more in
what it shows than they ever will with a real model. `step10ms` has random weights in the
shape of Llama 3.2 1B at half the width and 6 layers of 16: about 10 ms a token with one
thread, and a KV cache as large beside its weights as that model's (6 % at 3,500 tokens).
Its text means nothing; the bundled tokenizer makes it. `qwen3-0.6b` has random weights in just
that model's shape: 28 layers, 8 KV heads of 128, a vocabulary of 151,936. `llama-1b-kv` has the KV
cache of Llama 3.2 1B, 32 KiB a token, and hardly anything else, so that a CPU fills it in seconds.
`long` is tiny, with a context of 131,072 tokens and Llama 3's vocabulary of 128,256.
`device10ms` (or another number) is the bundled one on a worker that waits as for a GPU,
`device10ms-async` the same with asynchronous scheduling: see bench/paced.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmig.models import BUNDLED

if TYPE_CHECKING:
    import torch

SEED = 1
PACED = re.compile(r"device(\d+)ms(-async)?")
NAMES = (
    "count", "step10ms", "qwen3-0.6b", "llama-1b-kv", "long", "device10ms", "device10ms-async",
)  # fmt: skip
HEAVY: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
LLAMA3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
"""Its layers; the vocabulary is the bundled tokenizer's, so that each token is known to it."""
LLAMA_KV: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
LONG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
}
MADE = {"step10ms": HEAVY, "qwen3-0.6b": QWEN3, "llama-1b-kv": LLAMA_KV, "long": LONG}


def model_folder(name: str) -> Path:
    """The checkpoint that `--model name` means: one of NAMES or a folder.

    Those of MADE are made in the user's cache unless they are there already.
    """
    if name == "count" or PACED.fullmatch(name):
        return BUNDLED
    if name not in MADE:
        return Path(name)
    shape = MADE[name]
    folder = _cache() / f"{name}-{_digest(shape)}"
    if not folder.exists():
        make_checkpoint(folder, shape)
    return folder


def model_flags(name: str, token_ms: float | None = None) -> tuple[str, ...]:
    """What `--model name` means for vLLM beside its checkpoint.

    token_ms: of a step, for each of its tokens, of one that waits as for a GPU; None: as usual.

    Those of NAMES compute in 32 bits: a CPU without bfloat16 takes many times as long for it.
    """
    if paced := PACED.fullmatch(name):
        more = "" if token_ms is None else f', "token_ms": {token_ms}'
        overlap = ', "overlap": true' if paced[2] else ""
        return (
            "--dtype=float32",
            "--worker-cls=bench.paced.PacedWorker",
            f'--additional-config={{"step_ms": {paced[1]}{more}{overlap}}}',
        )
    return ("--dtype=float32",) if name in NAMES else ()


def shape_folder(name: str, shape: dict[str, Any]) -> Path:
    """A model without weights, for `--load-format=dummy`: its configuration and a tokenizer."""
    folder = _cache() / f"{name}-{_digest(shape)}-dummy"
    if not folder.exists():
        _make(folder, shape, None)
    return folder


def kv_numbers(folder: Path) -> int:
    """How many are in a token's KV cache, as a LLaMA's or Qwen3's config.json has it."""
    config = json.loads((folder / "config.json").read_text())
    heads = int(config["num_hidden_layers"] * config["num_key_value_heads"])
    return 2 * heads * int(config["head_dim"])


def make_checkpoint(folder: Path, shape: dict[str, Any]) -> None:
    """Write a LLaMA or Qwen3 of this shape with seeded random weights; all of it or nothing."""
    _make(folder, shape, _weights)


def _make(
    folder: Path,
    shape: dict[str, Any],
    weights: Callable[[dict[str, Any]], dict[str, torch.Tensor]] | None,
) -> None:
    config = {**json.loads((BUNDLED / "config.json").read_text()), **shape}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(BUNDLED / file, made / file)
        if weights is not None:
            # Here and below: torch takes seconds to load, and most models are there already.
            from safetensors.torch import save_file

            save_file(weights(config), made / "model.safetensors", metadata={"format": "pt"})
        made.rename(folder)


def _digest(shape: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps([shape, SEED]).encode(), digest_size=4).hexdigest()


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    random = torch.Generator().manual_seed(SEED)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(rows, columns, generator=random) / columns**0.5
        return values.to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden),
        "model.norm.weight": ones(),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = ones()
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones()
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}.self_attn.{name}.weight"] = ones()[: config["head_dim"]].clone()
        for name, (rows, columns) in matrices.items():
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns)
    return weights


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvmig" / "bench"
