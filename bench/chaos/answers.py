"""What a client got, and how it differs from what it should have got. Pure.

The bundled model's tokens are bytes, so a token of an answer is a character of its text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LAST_DIGITS = 1e-3
"""Of a log-probability (float32): what was decoded token by token is computed as a whole when a
request runs again, and the same numbers are added in another order."""
NEAR = 200
"""Characters by which an answer may have slipped and still be recognised."""
SURE = 16
"""Characters that must agree behind a slip."""


@dataclass
class Choice:
    """One choice of a response, put together from its chunks."""

    text: str = ""
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """One response. tokens: as its usage says, of all choices; None while it runs."""

    choices: dict[int, Choice] = field(default_factory=dict)
    tokens: int | None = None

    def take(self, document: dict[str, Any]) -> bool:
        """A chunk of a stream, or a whole response; whether it brought text."""
        grown = False
        for part in document["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            said = part.get("delta") or part.get("message")
            text = (said.get("content") or "") if said else part.get("text") or ""
            choice.text += text
            grown = grown or bool(text)
            choice.logprobs += _logprobs(part.get("logprobs"))
            choice.finish_reason = part.get("finish_reason") or choice.finish_reason
        if usage := document.get("usage"):
            self.tokens = usage["completion_tokens"]
        return grown


def _logprobs(given: dict[str, Any] | None) -> list[tuple[str, float]]:
    """Of the sampled tokens; chat completions and completions have shapes of their own."""
    if not given:
        return []
    if "content" in given:
        return [(one["token"], one["logprob"]) for one in given["content"] or ()]
    return list(zip(given["tokens"], given["token_logprobs"], strict=True))


@dataclass(frozen=True)
class Verdict:
    """lost, repeated: characters, which are tokens. what: empty when the answer is right."""

    what: str = ""
    lost: int = 0
    repeated: int = 0


RIGHT = Verdict()


def judge(seen: Answer, wanted: Answer, whole: bool = True) -> Verdict:
    """Compare. whole: the answer has ended; otherwise it may stop anywhere."""
    for index, choice in seen.choices.items():
        if index not in wanted.choices:
            return Verdict(f"choice {index} should not be there")
        verdict = _judge(choice, wanted.choices[index], whole)
        if verdict != RIGHT:
            return verdict
    if whole and seen.choices.keys() != wanted.choices.keys():
        return Verdict(f"choices {sorted(seen.choices)}, should be {sorted(wanted.choices)}")
    if whole and seen.tokens != wanted.tokens:
        return Verdict(f"usage says {seen.tokens} tokens, should be {wanted.tokens}")
    return RIGHT


def _judge(seen: Choice, wanted: Choice, whole: bool) -> Verdict:
    if not wanted.text.startswith(seen.text) or (whole and seen.text != wanted.text):
        return slip(seen.text, wanted.text)
    if whole and seen.finish_reason != wanted.finish_reason:
        return Verdict(f"ended with {seen.finish_reason}, should be {wanted.finish_reason}")
    if whole and len(seen.logprobs) != len(wanted.logprobs):
        return Verdict(f"{len(seen.logprobs)} log-probabilities of {len(wanted.logprobs)}")
    for place, (one, other) in enumerate(zip(seen.logprobs, wanted.logprobs, strict=False)):
        if one[0] != other[0] or abs(one[1] - other[1]) > LAST_DIGITS * max(1.0, abs(other[1])):
            return Verdict(f"log-probability {place} is {one}, should be {other}")
    return RIGHT


def slip(seen: str, wanted: str) -> Verdict:
    """How one text differs from the other: what is missing, twice, or something else.

    Example: "0012 0014" of "0012 0013 0014" has lost five, "0012 12 0013" repeats three.
    """
    at = next(
        (n for n, (a, b) in enumerate(zip(seen, wanted, strict=False)) if a != b),
        min(len(seen), len(wanted)),
    )
    words = f"at {at}: {seen[at : at + 12]!r}, should be {wanted[at : at + 12]!r}"
    if at == len(seen):
        return Verdict(f"ends early, {words}", lost=len(wanted) - at)
    if at == len(wanted):
        return Verdict(f"ends late, {words}", repeated=len(seen) - at)
    for far in range(1, NEAR):
        if _goes_on(seen[at:], wanted[at + far :]):
            return Verdict(f"{far} lost {words}", lost=far)
        if _goes_on(wanted[at:], seen[at + far :]):
            return Verdict(f"{far} repeated {words}", repeated=far)
    return Verdict(f"differs {words}")


def _goes_on(text: str, other: str) -> bool:
    return len(other) > 0 and text[:SURE] == other[:SURE]
