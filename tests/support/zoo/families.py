"""What each family's checkpoint is made of.

What shapes a layer's KV cache is the real model's: KV heads, head size, window, latent, state.
All else is as small as will do: hidden size, query heads, experts, vocabulary. Layers are enough
for every kind of KV cache group that the real model has.
"""

from __future__ import annotations

from typing import Any

_SMALL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_QWEN2 = {**_SMALL, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
_WINDOWS = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]

_SMALL_STEPS = ("--max-num-batched-tokens=128",)
"""A larger step that passes the end of a block of Mamba 2 states ends vLLM 0.32 on a CPU."""
SERVING_FLAGS: dict[str, tuple[str, ...]] = {
    "granite4": _SMALL_STEPS,
    "nemotron-h": _SMALL_STEPS,
    "paddleocr-vl": ('--limit-mm-per-prompt={"image": 0}',),
}
"""Flags without which `kvmig.serve` can't serve a family's checkpoint."""

FAMILIES: dict[str, dict[str, Any]] = {
    # Llama 3 8B, with its vocabulary
    "llama3": {
        **_SMALL,
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    # Llama 7B: as many KV heads as heads
    "llama7b": {
        **_SMALL,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    # Qwen2.5 7B
    "qwen2.5": {**_QWEN2, "model_type": "qwen2"},
    # Qwen3 0.6B
    "qwen3": {
        **_SMALL,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # Qwen3 30B A3B
    "qwen3-moe": {
        **_SMALL,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 8,
        "norm_topk_prob": True,
    },
    # Mixtral 8x7B
    "mixtral": {
        **_SMALL,
        "model_type": "mixtral",
        "intermediate_size": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    # Mistral 7B 0.1; its window is 4096, from which a test's request would take long to get out
    "mistral": {
        **_SMALL,
        "model_type": "mistral",
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 256,
    },
    # Gemma 3 1B. In the real one every sixth layer sees everything; like there, the last group of
    # windows has fewer layers than the others.
    "gemma3": {
        **_SMALL,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "layer_types": _WINDOWS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
    },
    # gpt-oss 20B: every other layer has a window
    "gpt-oss": {
        **_SMALL,
        "model_type": "gpt_oss",
        "max_position_embeddings": 131_072,
        "intermediate_size": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    # DeepSeek V2 Lite: MLA, a latent of 512 and 64 rotary values a token
    "deepseek-v2": {
        **_SMALL,
        **_EXPERTS,
        "model_type": "deepseek_v2",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    # Qwen3-Next 80B A3B: three layers with a gated delta net, then one of full attention
    "qwen3-next": {
        **_SMALL,
        **_EXPERTS,
        "model_type": "qwen3_next",
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "shared_expert_intermediate_size": 64,
    },
    # Granite 4.0 H Tiny: Mamba 2, and now and then full attention without positions
    "granite4": {
        **_SMALL,
        "model_type": "granitemoehybrid",
        "hidden_size": 512,
        "intermediate_size": 64,
        "shared_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "attention_multiplier": 128**-0.5,
        "num_local_experts": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 6,
    },
    # Nemotron Nano 9B 2: Mamba 2, multilayer perceptrons and full attention as layers of their own
    "nemotron-h": {
        **_SMALL,
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 80,
        "ssm_state_size": 128,
        "n_groups": 8,
    },
    # Mamba Codestral 7B: states alone
    "mamba2": {
        "model_type": "mamba2",
        "vocab_size": 2048,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_heads": 128,
        "head_dim": 64,
        "expand": 32,
        "state_size": 128,
        "n_groups": 8,
    },
    # Llama 4 Scout: three layers see their chunk, the fourth everything; chunks are of 8192 there
    "llama4": {
        **_SMALL,
        "model_type": "llama4_text",
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 256,
        "num_local_experts": 4,
    },
    # PaddleOCR-VL: three positions a token, as Qwen-VL, which needs torchvision
    "paddleocr-vl": {
        "model_type": "paddleocr_vl",
        "text_config": {
            **_SMALL,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500_000.0,
                "mrope_section": [16, 24, 24],
            },
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
        },
        "image_token_id": 264,
        "video_token_id": 265,
        "vision_start_token_id": 266,
        "vision_end_token_id": 267,
    },
}
"""Transformers' configuration of each, by the family's name."""
