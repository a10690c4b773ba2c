"""How much an answer holds besides its tokens, which a front end keeps and spells."""

from __future__ import annotations

from vllm.config import ModelConfig
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams


def logprobs_of_each_token(params: SamplingParams | None, vocabulary: int) -> int:
    """Log-probabilities of each output token: its own, and those of the likeliest."""
    return 0 if params is None else _width(params.num_logprobs, vocabulary)


def logprobs_of_prompt(params: SamplingParams | None, tokens: int, vocabulary: int) -> int:
    """Log-probabilities of a prompt; its first token has none."""
    if params is None:
        return 0
    return max(0, tokens - 1) * _width(params.prompt_logprobs, vocabulary)


def numbers_of(params: PoolingParams | None, tokens: int, model: ModelConfig) -> int:
    """Numbers of the embedding or the classes of a text, or of each of its tokens."""
    if params is None:
        return 0
    if params.task in ("classify", "token_classify"):
        width = int(getattr(model.hf_config, "num_labels", 1))
    else:
        width = params.dimensions or model.get_hidden_size()
    return width * (tokens if params.task in ("token_embed", "token_classify") else 1)


def _width(wanted: int | None, vocabulary: int) -> int:
    """wanted: -1: of all tokens that there are."""
    if wanted is None:
        return 0
    return vocabulary if wanted < 0 else wanted + 1
