"""What vLLM takes of a CPU's memory for its largest step, by the model's configuration. Pure.

The widest layer counts with all that lives at once while it computes the step's tokens, or the
sampler with the logits of all requests, whichever is more: the one is freed before the other
begins. What vLLM keeps twice, packed for the processor, is added. The factors were measured with
vLLM 0.32 on sixteen small models of different architectures (`bench.model_memory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RULE = 2
"""Version of the rule: figures that were measured under another one don't count."""
FLOAT = 4
"""Bytes of a number where vLLM computes in float32."""
RESIDUALS = 4
"""Tensors as wide as the model: the stream, its norm, a layer's input and output."""
CONVOLUTION = 8
"""Copies of a convolution's input that live at once, in the layout of oneDNN and without."""
DELTA_COPIES = 3
"""Further copies in a gated delta net, which reorders its projection."""
SCORES = 4
"""Matrices of attention's scores that live at once where it is dense (MLA): what is merged with a
request's past needs the sums of their exponentials, too."""
LOGITS = 5.5
"""Tensors of logits in float32 that live at once in the sampler, and the model's own are added: a
copy, the sorted ones, their indices of 8 bytes, probabilities, and two masks. All requests have a
top-k and a top-p, as where vLLM measures itself; log-probabilities and penalties would add more."""
ENTRY, MERGE = 400, 530
"""Bytes of an entry and of a merge of a vocabulary, as `tokenizers` holds them: measured with
tokenizers of 32,000 to 256,000 entries, with and without merges."""
MLA_WORKSPACE = 64 << 10
"""Tokens of a request's past that a step of MLA takes at once."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How large a step may be. Sizes are bytes."""

    tokens: int
    """--max-num-batched-tokens."""
    requests: int
    """--max-num-seqs."""
    length: int
    """--max-model-len."""
    number: int = 2
    """Size of a number of the model."""
    fitting: float = 0.0
    """Requests of the whole length that the KV cache has room for; 0: not known."""

    sampled: float = 0.0
    """Requests of the shortest length that the KV cache has room for; 0: not known."""

    @property
    def rows(self) -> int:
        """Requests at most that one step samples for."""
        return min(self.requests, max(1, int(self.sampled))) if self.sampled else self.requests

    @property
    def step(self) -> int:
        """Tokens of the largest step."""
        at_once = min(self.requests, max(1.0, self.fitting or self.requests))
        return min(self.tokens, int(at_once * self.length))

    @property
    def prompts(self) -> int:
        """Prompts at most that one step reads. Half a request keeps a state of its own, too."""
        fitting = int(2 * self.fitting) or self.requests
        return min(self.requests, self.step, max(1, fitting))


def step_memory(config: Mapping[str, object], limits: StepLimits, workers: int = 1) -> int:
    """Bytes of each worker. config: the model's config.json."""
    text = config.get("text_config")
    model = _Configuration({**config, **text} if isinstance(text, dict) else config)
    widest = max(
        _dense(model, limits), _attention(model, limits), _mla(model, limits),
        _mamba(model, limits), _delta(model, limits),
    )  # fmt: skip
    stream = RESIDUALS * model.hidden * limits.number * limits.step
    vocabulary = model("vocab_size")
    sampler = int((LOGITS * FLOAT + limits.number) * limits.rows * vocabulary)
    packed = 2 * vocabulary * model.hidden * limits.number // workers
    return packed + max(stream + widest // workers, sampler)


class _Configuration:
    """Numbers of a config.json by the names that architectures have for them."""

    def __init__(self, found: Mapping[str, object]) -> None:
        self._found = found

    def __call__(self, *names: str, usual: int = 0) -> int:
        """The first of these that is there."""
        for name in names:
            value = self._found.get(name)
            if isinstance(value, int | float) and 0 < value < 1 << 40:
                return int(value)
        return usual

    @property
    def hidden(self) -> int:
        return self("hidden_size", "d_model", "n_embd")

    @property
    def heads(self) -> int:
        return self("num_attention_heads", "n_head")

    @property
    def head(self) -> int:
        return self("head_dim", usual=self.hidden // max(1, self.heads))

    @property
    def kind(self) -> str:
        return str(self._found.get("model_type", ""))


def _dense(model: _Configuration, limits: StepLimits) -> int:
    """A multilayer perceptron, or the experts of a token."""
    inner = 3 * model("intermediate_size", "n_inner", usual=4 * model.hidden)
    experts = model("num_experts_per_tok") * (
        3 * model("moe_intermediate_size", "intermediate_size") + model.hidden
    )
    return max(inner, experts) * limits.number * limits.step


def _attention(model: _Configuration, limits: StepLimits) -> int:
    """Queries, keys and values, and the result; norms of queries and keys copy these."""
    queries = model.heads * model.head
    keys = model("num_key_value_heads", usual=model.heads) * model.head
    row = limits.number * (2 * queries + 2 * keys)
    if model.kind.startswith("llama4"):  # its norm computes in float32
        row += 3 * FLOAT * (queries + keys)
    elif model.kind.startswith(("qwen3", "gemma3")):
        row += limits.number * (queries + keys)
    return row * limits.step


def _mla(model: _Configuration, limits: StepLimits) -> int:
    """Dense attention over a latent, one request after the other."""
    if not model("kv_lora_rank"):
        return 0
    key = model("qk_nope_head_dim") + model("qk_rope_head_dim")
    value, heads = model("v_head_dim", usual=key), model.heads
    asked = min(limits.step, limits.length)
    seen = max(asked, min(limits.length, MLA_WORKSPACE))
    scores = SCORES * heads * asked * seen
    operands = heads * (asked * key + seen * (key + value))
    return FLOAT * (scores + operands) + limits.number * heads * (2 * key + value) * limits.step


def _mamba(model: _Configuration, limits: StepLimits) -> int:
    """Mamba 2: the projection, its convolution, and states of the requests whose prompts it
    reads."""
    heads = model("mamba_n_heads", "mamba_num_heads", "num_heads")
    head = model("mamba_d_head", "mamba_head_dim", "head_dim")
    state = model("mamba_d_state", "ssm_state_size", "state_size")
    if not (heads and state):
        return 0
    inner = heads * head
    convolved = inner + 2 * model("mamba_n_groups", "n_groups", usual=1) * state
    row = inner + convolved + heads + CONVOLUTION * convolved
    return row * limits.number * limits.step + limits.prompts * inner * state * FLOAT


def _delta(model: _Configuration, limits: StepLimits) -> int:
    """A gated delta net: the same with queries and keys, which it computes with in float32."""
    values = model("linear_num_value_heads") * model("linear_value_head_dim")
    if not values:
        return 0
    convolved = 2 * model("linear_num_key_heads") * model("linear_key_head_dim") + values
    row = convolved + values + (CONVOLUTION + DELTA_COPIES) * convolved
    return (row * limits.number + 4 * FLOAT * values) * limits.step
