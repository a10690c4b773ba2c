"""The mixed load: calls drawn from a seed, and what each must answer. Pure.

Greedy completions count on from their prompt. The answers of all others are those of an
undisturbed run (`REFERENCES`), so they are drawn from a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from bench.chaos.answers import Answer, Choice

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
Manner = Literal["stream", "whole", "leave", "slow"]
"""How the client takes the answer: as it comes, at once at its end, until it leaves early, or
more slowly than it is made."""
SHORT, LONG = 8, 300
"""Numbers in a prompt; five tokens each."""
STARTS = 9000
"""Numbers that a prompt may start with: none wraps around."""


@dataclass(frozen=True)
class Call:
    """kind: for reports. reference: the undisturbed answer's name; empty: it counts."""

    kind: str
    path: str
    body: dict[str, Any]
    manner: Manner = "stream"
    reference: str = ""
    number: int = 0
    """The next number that a greedy answer counts."""
    leave_at: int = 0
    """Characters after which the client leaves."""

    @property
    def streams(self) -> bool:
        """Whether the answer comes in chunks."""
        return self.manner != "whole"


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    """A seeded completion."""
    body = {"prompt": "Count: 0017 0018", "max_tokens": 300, "ignore_eos": True}
    return COMPLETIONS, {**body, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    """A chat completion."""
    messages = [{"role": "user", "content": "Count from 0042"}]
    return CHAT, {"messages": messages, "max_tokens": 250, "ignore_eos": True, **fields}


REFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "seeded, top-p": completion(temperature=1.2, top_p=0.9, seed=7),
    "seeded, top-k": completion(temperature=1.5, top_k=20, seed=8, max_tokens=500),
    "seeded, penalties": completion(
        temperature=0.9, seed=9, presence_penalty=0.6, repetition_penalty=1.1
    ),
    "log-probabilities": completion(temperature=0.8, seed=3, logprobs=3),
    "log-probabilities, long prompt": completion(
        temperature=0.7, seed=4, logprobs=1, prompt=" ".join(f"{n:04d}" for n in range(100, 400))
    ),
    "n = 2": completion(temperature=1.1, seed=11, n=2, logprobs=1),
    "chat": chat(temperature=0),
    "chat, seeded": chat(temperature=0.9, seed=6, logprobs=True, top_logprobs=2),
}  # fmt: skip
COUNTING = ("greedy", "greedy, long prompt", "stop string")
KINDS = (*COUNTING, *REFERENCES)
MANNERS: tuple[Manner, ...] = ("stream", "whole", "leave", "slow")
OFTEN = (12, 3, 3, 1)


def reference(name: str) -> Call:
    """The call whose undisturbed answer is the reference."""
    path, body = REFERENCES[name]
    return Call(name, path, body, reference=name)


def draw(random: Random, kinds: Sequence[str] = KINDS) -> Call:
    """One call of the mixed load."""
    kind = random.choice(kinds)
    manner = random.choices(MANNERS, OFTEN)[0]
    leave_at = random.randrange(1, 200)
    if kind in REFERENCES:
        path, body = REFERENCES[kind]
        return Call(kind, path, body, manner, kind, leave_at=leave_at)
    start = random.randrange(STARTS)
    length = LONG if "long" in kind else SHORT
    number = start + length
    prompt = "Count: " + " ".join(f"{one:04d}" for one in range(start, number))
    body = {
        "prompt": prompt, "max_tokens": random.randrange(50, 700), "ignore_eos": True,
        "temperature": 0,
    }  # fmt: skip
    if kind == "stop string":
        body["stop"] = [f"{number + random.randrange(10, 120):04d}"]
    return Call(kind, COMPLETIONS, body, manner, number=number, leave_at=leave_at)


def counted(call: Call) -> Answer:
    """What a greedy completion answers: the numbers from `call.number` on."""
    tokens: int = call.body["max_tokens"]
    numbers = range(call.number, call.number + tokens // 5 + 1)
    text = "".join(f" {one:04d}" for one in numbers)[:tokens]
    for stop in call.body.get("stop", ()):
        if (at := text.find(stop)) >= 0:
            return Answer({0: Choice(text[:at], finish_reason="stop")}, at + len(stop))
    return Answer({0: Choice(text, finish_reason="length")}, tokens)
