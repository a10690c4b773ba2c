"""The toy's tokenizer: each byte of a text is a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvmig.engines.toy.model import VOCABULARY


class ByteTokenizer:
    """Implements `kvmig.openai_server.generation.Tokenizer`."""

    max_tokens: int | None = None
    vocabulary = VOCABULARY
    longest = 1
    eos_ids: Sequence[int] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
    ) -> list[int]:
        """One line a message."""
        if options:
            raise ValueError(f"there is no option {next(iter(options))}")
        return self.encode("".join(f"{one['content']}\n" for one in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def spell(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)
