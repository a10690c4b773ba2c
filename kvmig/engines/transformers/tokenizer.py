"""A checkpoint's tokenizer, chat template and end-of-sequence tokens, by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from kvmig.core.errors import ConfigError


class ModelTokenizer:
    """The tokenizer of one model. max_tokens: that its positions allow; None: not known.

    longest: characters of a token at most.
    """

    def __init__(self, model: str, chat_template: str | None = None) -> None:
        """chat_template: a file with one in place of the model's own. Raises ConfigError."""
        try:
            config = AutoConfig.from_pretrained(model)
            self._tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ConfigError(f"MODEL is {model}, must have a tokenizer: {error}") from error
        self._template = None if chat_template is None else Path(chat_template).read_text()
        self.max_tokens: int | None = getattr(
            config.get_text_config(), "max_position_embeddings", None
        )
        self.vocabulary: int = config.get_text_config().vocab_size
        self.longest = max(map(len, self._tokenizer.get_vocab()))
        self.eos_ids = sorted(self._eos_ids(model, config))

    def encode(self, text: str) -> list[int]:
        """Encode a text with the special tokens that the model wants around it."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> list[int]:
        """The conversation and the head of an answer. options: the template's own variables.

        Raises ValueError if there is no template, or if it refuses the conversation.
        """
        if self._template is None and self._tokenizer.chat_template is None:
            raise ValueError("the model has no chat template; start with --chat-template FILE")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                **{
                    **options,
                    "chat_template": self._template,
                    "add_generation_prompt": True,
                    "tokenize": False,
                },
            )
        except (TemplateError, TypeError) as error:  # TypeError: by options of other names
            raise ValueError(f"the chat template refuses the call: {error}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode without special tokens; bytes that are no text become U+FFFD."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def spell(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return text

    def _eos_ids(self, model: str, config: Any) -> set[int]:
        try:
            generation = GenerationConfig.from_pretrained(model).eos_token_id
        except OSError:
            generation = None  # many checkpoints have none
        found: set[int] = set()
        for ids in (
            generation,
            config.get_text_config().eos_token_id,
            self._tokenizer.eos_token_id,
        ):
            found.update(ids if isinstance(ids, list) else [ids] if ids is not None else [])
        return found
