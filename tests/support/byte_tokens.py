"""A tokenizer whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EOS = 0


@dataclass
class Bytes:
    """max_tokens: of a request, its prompt included."""

    max_tokens: int

    vocabulary, eos_ids, longest = 256, (EOS,), 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> list[int]:
        raise ValueError("the model has no chat template")

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    spell = decode
