"""`kvmig instance` and `kvmig model why-not`: why instances are where they are."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvmig.cli.client import path_part
from kvmig.cli.common import Json, said, show, time_of, where
from kvmig.core.errors import ConfigError

instance_app = typer.Typer(help="Look at instances of models.", no_args_is_help=True)

STRATEGIES = {"spread": "spread over the emptiest", "pack": "packed onto the fullest"}


def needed(one: dict[str, Any]) -> str:
    """What an instance needs of a worker."""
    need = f"{one['need_bytes']} bytes of memory"
    if not one["gpus"]:
        return need
    of_gpus = "a GPU" if one["gpus"] == 1 else f"each of {one['gpus']} GPUs that reach each other"
    return f"{need} and {one['gpu_bytes']} bytes of {of_gpus}"


def node_lines(node: dict[str, Any]) -> list[str]:
    """What a decision says of one worker."""
    if node["refusals"]:
        return [
            f"  {node['node']}: refused",
            *(f"    {one['filter']}: {one['why']}" for one in node["refusals"]),
        ]
    score = f"{node['score']:.2f}"
    if node["locality"]:
        score += f" ({node['strategy_score']:.2f}, and {node['locality']:g} for its files there)"
    on_gpus = f", on {', '.join(node['gpus'])}" if node["gpus"] else ""
    return [f"  {node['node']}: {score}{on_gpus}{', chosen' if node['chosen'] else ''}"]


def decision_lines(one: dict[str, Any]) -> list[str]:
    """A decision about one instance."""
    lines = [f"it needs {needed(one)}; {STRATEGIES[one['strategy']]}"]
    return [*lines, *(line for node in one["nodes"] for line in node_lines(node))]


def move_lines(found: dict[str, Any]) -> list[str]:
    """Moves that would make room."""

    def place(node: str, gpus: list[str]) -> str:
        return f"{node}, {', '.join(gpus)}" if gpus else node

    return [
        f"moves of other models would make room in about {found['seconds']:.0f} s:",
        *(
            f"  {one['model']}/{one['instance']}: from {place(one['node'], one['gpus'])} to"
            f" {place(one['to_node'], one['to_gpus'])}; {one['load_bytes']} bytes are loaded,"
            f" {one['move_bytes']} move"
            for one in found["moves"]
        ),
    ]


def refusal_view(name: str, one: dict[str, Any]) -> str:
    """`kvmig model why-not` for people."""
    taken = any(node["chosen"] for node in one["nodes"])
    said_first = "another instance finds a worker" if taken else "no worker takes another instance"
    state = f"{one['state']} ({one['why']})" if one["why"] else one["state"]
    moves = move_lines(one["moves"]) if one["moves"] else one["moving"]
    return "\n".join([f"{name} is {state}; {said_first}", *decision_lines(one), *moves])


def reason_view(name: str, one: dict[str, Any]) -> str:
    """`kvmig instance why` for people."""
    on_gpus = f", on {', '.join(one['gpus'])}" if one["gpus"] else ""
    first = f"{name}/{one['instance']} is on worker {one['worker']}{on_gpus}"
    if one["decision"] is None:
        return f"{first}; why is not kept: an earlier server started it"
    return "\n".join([f"{first} since {time_of(one['at'])}", *decision_lines(one["decision"])])


@said
def why_not_model(name: str, as_json: Json = False) -> None:
    """Show what each worker says to another instance of a model: its score, or each filter that
    refuses it, in bytes."""
    answer = where.client().get(f"why-not/{path_part(name)}")
    show(answer, as_json, lambda found: refusal_view(name, found))


@instance_app.command("why")
@said
def why_instance(
    instance: Annotated[
        str, typer.Argument(metavar="MODEL/INSTANCE", help="The instance, such as qwen/i0.")
    ],
    as_json: Json = False,
) -> None:
    """Show why an instance runs where it does: each worker's score, or why it was refused."""
    name, slash, last = instance.rpartition("/")
    if not (slash and name and last):
        raise ConfigError(f"the instance is {instance!r:.100}, must be MODEL/INSTANCE as qwen/i0")
    answer = where.client().get(f"why/{path_part(name)}", instance=last)
    show(answer, as_json, lambda found: reason_view(name, found))
