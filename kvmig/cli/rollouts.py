"""`kvmig model rollout` and `kvmig model history`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvmig.cli.client import path_part
from kvmig.cli.common import Json, patience, said, show, table_of, time_of, where
from kvmig.core.errors import ConfigError

rollout_app = typer.Typer(
    help="Follow and steer the roll-out of a changed model.", no_args_is_help=True
)

CHECKING = "the engine checks the flags and the model's configuration"

CanaryOption = Annotated[
    str,
    typer.Option(
        "--canary",
        help="Percentages of new requests that the changed model gets, step by step, as 10,50,100.",
    ),
]
HoldOption = Annotated[
    float, typer.Option("--hold", help="Seconds from one step of --canary to the next.")
]
DeadlineOption = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        help="Seconds that running requests get to end where they are (default: no limit).",
    ),
]


def rollout_body(canary: str, hold_s: float, deadline_s: float | None) -> dict[str, Any]:
    """What an order says of how changed models roll out. Raises ConfigError."""
    steps = [one.strip() for one in canary.split(",")] if canary else []
    if any(not one.isdecimal() for one in steps):
        raise ConfigError(f"--canary is {canary!r:.100}, must be percentages such as 10,50,100")
    return {"canary": [int(one) for one in steps], "hold_s": hold_s, "deadline_s": deadline_s}


SIDE_COLUMNS = ("", "revision", "state", "instances", "running", "calls", "cut", "TTFT")


def side_row(name: str, one: dict[str, Any]) -> tuple[object, ...]:
    """A row of one of the two deployments."""
    figures = one["figures"] or {"ended": None, "cut": None, "ttft_ms": None}
    ttft = figures["ttft_ms"]
    return (
        name, one["revision"], one["state"], one["serving"], one["running"], figures["ended"],
        figures["cut"], None if ttft is None else f"{ttft:.0f} ms",
    )  # fmt: skip


def rollout_line(one: dict[str, Any] | None) -> str:
    """A roll-out in a line; empty: there is none."""
    if one is None:
        return ""
    steps = ", ".join(map(str, one["canary"]))
    said = f"{one['share']} % of new requests go to the new one (steps: {steps})"
    if one["way"] == "roll":
        said = f"{one['rolled']} of {one['old']['serving']} instances have started again"
    why = f"; {one['why']}" if one["why"] else ""
    return f"{one['state']}: {said}{why}"


def show_rollout(answer: Any, as_json: bool) -> None:
    """How a roll-out stands, for people."""
    one = answer["rollout"]
    if as_json or one is None:
        show(answer, as_json, lambda _: f"{answer['name']} does not roll out")
        return
    rows = [side_row("old", one["old"])]
    if one["new"] is not None:
        rows.append(side_row("new", one["new"]))
    show(answer, as_json, lambda _: table_of(SIDE_COLUMNS, rows))
    print(rollout_line(one))


@rollout_app.command("status")
@said
def rollout_status(name: str, as_json: Json = False) -> None:
    """Show how far a roll-out is."""
    show_rollout(where.client().get(f"models/{path_part(name)}/rollout"), as_json)


def order_rollout(name: str, as_json: bool, action: str, **more: Any) -> None:
    """Give an order to a roll-out, and show how it stands then."""
    path = f"models/{path_part(name)}/rollout"
    with patience(CHECKING):
        answer = where.client().post(path, {"action": action, **more})
    show_rollout(answer, as_json)


@rollout_app.command("pause")
@said
def pause_rollout(name: str, as_json: Json = False) -> None:
    """Keep the share of new requests as it is."""
    order_rollout(name, as_json, "pause")


@rollout_app.command("resume")
@said
def resume_rollout(name: str, as_json: Json = False) -> None:
    """Continue a roll-out that was paused, or try one again that has stopped by itself."""
    order_rollout(name, as_json, "resume")


@rollout_app.command("promote")
@said
def promote_rollout(name: str, as_json: Json = False) -> None:
    """Take the next step now."""
    order_rollout(name, as_json, "promote")


@rollout_app.command("undo")
@said
def undo_rollout(
    name: str,
    revision: Annotated[
        int | None,
        typer.Option(help="Revision to go back to (default: the one before the roll-out)."),
    ] = None,
    canary: CanaryOption = "",
    hold: HoldOption = 60.0,
    deadline: DeadlineOption = None,
    as_json: Json = False,
) -> None:
    """Go back to an earlier revision; requests end where they run."""
    more = rollout_body(canary, hold, deadline)
    order_rollout(name, as_json, "undo", revision=revision, **more)


@said
def show_history(name: str, as_json: Json = False) -> None:
    """List the revisions of a model, newest first: who made them, when, and what changed."""
    found = where.client().get(f"models/{path_part(name)}")["revisions"]
    rows = [
        (one["revision"], time_of(one["changed"]), one["author"], changed_fields(one, before))
        for one, before in zip(found, [*found[1:], None], strict=True)
    ]
    show({"data": found}, as_json, lambda _: table_of(("revision", "at", "by", "changed"), rows))


def changed_fields(one: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Names of the specification's fields that a revision has otherwise than the one before."""
    if before is None:
        return "added"
    now, was = one["spec"], before["spec"]
    return ", ".join(name for name in now if now[name] != was.get(name)) or "nothing"
