"""`python make_gguf.py FILE`: the bundled model as a GGUF file, for llama.cpp.

For the Python that has the package `gguf`, which needs nothing else of this repository.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np

MODEL = Path(__file__).resolve().parents[2] / "kvmig" / "models" / "count"
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


def tensors(file: Path) -> dict[str, np.ndarray]:
    """All of a safetensors file, as 32-bit floats."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    found = {}
    for name, one in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + at for at in one["data_offsets"])
        raw = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16  # bfloat16
        found[name] = raw.view(np.float32).reshape(one["shape"])
    return found


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head in the order in which llama.cpp rotates them."""
    rows, columns = weights.shape
    cut = weights.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(cut.swapaxes(1, 2).reshape(rows, columns))


def name_of(name: str) -> str:
    """llama.cpp's name of a tensor."""
    stem = name.removesuffix(".weight")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.weight"


def write(file: Path) -> None:
    """Make the file."""
    config = json.loads((MODEL / "config.json").read_text())
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    template = json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    made = gguf.GGUFWriter(str(file), "llama")
    made.add_block_count(config["num_hidden_layers"])
    made.add_context_length(config["max_position_embeddings"])
    made.add_embedding_length(config["hidden_size"])
    made.add_feed_forward_length(config["intermediate_size"])
    made.add_head_count(heads)
    made.add_head_count_kv(kv_heads)
    made.add_key_length(config["head_dim"])
    made.add_value_length(config["head_dim"])
    made.add_rope_dimension_count(config["head_dim"])
    made.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    made.add_layer_norm_rms_eps(config["rms_norm_eps"])
    made.add_vocab_size(config["vocab_size"])
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    special = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    words |= special
    made.add_tokenizer_model("gpt2")
    made.add_tokenizer_pre("gpt-2")
    made.add_token_list([words[number] for number in range(config["vocab_size"])])
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    made.add_token_types([kinds[number not in special] for number in range(config["vocab_size"])])
    made.add_token_merges([f"{words[0]} {words[1]}"])  # of two bytes that no text has; one must be
    made.add_bos_token_id(config["bos_token_id"])
    made.add_eos_token_id(config["eos_token_id"])
    made.add_add_bos_token(True)
    made.add_chat_template(template)
    for name, weights in tensors(MODEL / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            weights = permuted(weights, heads if "q_proj" in name else kv_heads)  # noqa: PLW2901
        made.add_tensor(name_of(name), weights)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
