"""What vLLM's application remembers between two calls, in its own process.

With several front ends the next call may go to another one, which has never seen the adapter or
the response. So what makes vLLM remember keeps a server to one front end, and is refused
by name where several are wanted. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvmig.core.errors import ConfigError

_OFF = ("", "0", "false")
_VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "LoRA adapters that are loaded through the API are known to"
    " one front end only: name them with --lora-modules, or",
    "VLLM_ENABLE_RESPONSES_API_STORE": "stored and background responses are in one front end only:",
}
_FLAGS = {
    "--enable-server-load-tracking": "/load counts the calls of one front end only: look at"
    " /metrics, which sums them up, or",
}


def refuse_remembered(
    front_ends: int, environment: Mapping[str, str], words: Sequence[str]
) -> None:
    """Raise ConfigError if several front ends would answer differently. words: vLLM's flags."""
    if front_ends > 1:
        for what, why in remembered(environment, words):
            raise ConfigError(
                f"{what}, must be left out with --front-ends {front_ends}: {why} use --front-ends 1"
            )


def remembered(environment: Mapping[str, str], words: Sequence[str]) -> list[tuple[str, str]]:
    """What is given that makes vLLM remember, and why another front end would need that."""
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    found = [
        (f"{name} is {environment[name]!r:.20}", why)
        for name, why in _VARIABLES.items()
        if environment.get(name, "").strip().lower() not in _OFF
    ]
    return found + [(f"{flag} is given", why) for flag, why in _FLAGS.items() if flag in given]
