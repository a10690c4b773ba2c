"""`kvmig chat` and `kvmig run`: a conversation with a model, which starts if it must."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any

import typer

from kvmig.cli.client import CallFailure, FleetClient
from kvmig.cli.common import patience, said, where, words_of_flags
from kvmig.cli.files import INTERRUPTED, follow_download
from kvmig.cli.models import CHECKING
from kvmig.cli.names import KnownModel, known_model

Prompt = Annotated[str, typer.Argument(help="One prompt (default: read from stdin).")]
MostTokens = Annotated[int, typer.Option(help="Maximum number of tokens in an answer.")]
JsonAnswers = Annotated[bool, typer.Option("--json", help="Print each answer as a JSON object.")]


@said
def chat(
    model: str, prompt: Prompt = "", max_tokens: MostTokens = 1000, as_json: JsonAnswers = False
) -> None:
    """Chat with a model, which starts if it is not running. Ctrl-C stops an answer."""
    converse(model, prompt, max_tokens, as_json)


@said
def run_model(
    model: Annotated[
        str,
        typer.Argument(
            help="A model of the fleet, a name that `kvmig model search` lists, ORG/NAME of the"
            " Hugging Face Hub, or any source."
        ),
    ],
    prompt: Prompt = "",
    flags: Annotated[
        str,
        typer.Option(help="Flags of the engine, as one quoted string, for a model that is new."),
    ] = "",
    engine: Annotated[str, typer.Option(help="Engine of a model that is new.")] = "vllm",
    max_tokens: MostTokens = 1000,
    as_json: JsonAnswers = False,
) -> None:
    """Add a model if it is new, download its files, start it, and chat with it."""
    client = where.client()
    known = known_model(client, model)
    added = known.shown
    if added is None:
        try:
            added = add_known(client, known, engine, flags)
        except CallFailure as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            added = known_model(client, model).shown  # somebody else has added it meanwhile
            if added is None:
                raise
        with_flags = f", with {known.flags}" if known.flags else ""  # a catalogue may be anyone's
        print(f"kvmig: {known.name} is {known.source}{with_flags}", file=sys.stderr)
    if added["files"] and not added["files"]["folder"]:
        files = client.post("files", {"source": added["files"]["source"]})  # what failed, at once
        follow_download(client, files["source"], quiet=as_json)
    converse(known.name, prompt, max_tokens, as_json)


def add_known(client: FleetClient, known: KnownModel, engine: str, flags: str) -> dict[str, Any]:
    """Put a model into the catalogue of the fleet. Raises CallFailure."""
    spec = {
        "name": known.name,
        "source": known.source,
        "engine": engine,
        "flags": [*shlex.split(known.flags), *words_of_flags(flags)],
    }
    with patience(CHECKING):
        answer: dict[str, Any] = client.post("models", spec)
    return answer


def converse(model: str, prompt: str, max_tokens: int, as_json: bool) -> None:
    """Answer one prompt, or all lines of stdin. Raises CallFailure."""
    door = where.door()
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = prompt or ask()
        except KeyboardInterrupt as interrupted:
            raise typer.Exit(INTERRUPTED) from interrupted
        if text is None:
            return
        if not (prompt or text.strip()):
            continue
        messages.append({"role": "user", "content": text})
        answer, stopped = "", False
        try:
            for part in said_by(door, model, messages, max_tokens):
                answer += part
                if not as_json:
                    print(part, end="", flush=True)
        except KeyboardInterrupt:
            stopped = True
        messages.append({"role": "assistant", "content": answer})
        print(json.dumps({**messages[-1], "stopped": stopped}) if as_json else "")
        if prompt:
            if stopped:
                raise typer.Exit(INTERRUPTED)
            return


def ask() -> str | None:
    """A line of the keyboard, or of a pipe; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def said_by(
    door: FleetClient, model: str, messages: list[dict[str, str]], max_tokens: int
) -> Iterator[str]:
    """What comes, as it comes. Raises CallFailure."""
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": max_tokens}
    for line in door.stream("/v1/chat/completions", body):
        if line.startswith(": "):  # a sign of life: how far a cold model's start is
            print(line.removeprefix(": "), file=sys.stderr)
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        found = json.loads(line.removeprefix("data: "))
        if "error" in found:
            raise CallFailure(str(found["error"].get("message", found["error"])))
        for choice in found.get("choices", []):
            if text := choice["delta"].get("content"):
                yield text
