"""The command `kvmig`: starts a fleet, and talks to one that runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from kvmig import __version__
from kvmig.accounts.people import LoginTerms
from kvmig.cli.accounts import key_app, user_app
from kvmig.cli.chat import chat, run_model
from kvmig.cli.client import KEY
from kvmig.cli.common import (
    FleetAddress,
    Json,
    patience,
    said,
    show,
    show_table,
    table_of,
    time_of,
    where,
)
from kvmig.cli.doctor import DATABASE, doctor
from kvmig.cli.files import pull_files
from kvmig.cli.login import log_in
from kvmig.cli.mirror import mirror_hub
from kvmig.cli.models import (
    CHECKING,
    alias_app,
    list_running,
    model_app,
    placement_app,
    remove_model,
    say_what_waits,
)
from kvmig.cli.places import instance_app
from kvmig.cli.rollouts import CanaryOption, DeadlineOption, HoldOption, rollout_body
from kvmig.cli.top.command import show_top
from kvmig.cli.usage import usage_app
from kvmig.cli.workers import worker_app
from kvmig.core.errors import ConfigError
from kvmig.core.quantities import bytes_of, size_text
from kvmig.fleet.device_room import Strategy
from kvmig.fleet.settings import FleetSettings, certificate_files, check_settings, data_folder
from kvmig.fleet.spec import read_yaml
from kvmig.launcher.environment import cores
from kvmig.launcher.ray_resources import parse_resources
from kvmig.tracing.collector import check_packages
from kvmig.tracing.settings import settings_of

__all__ = ["DATABASE", "FleetAddress", "app", "main"]

app = typer.Typer(
    help="Serve many models at one address. Models start on demand and stop when idle; users"
    " have API keys, limits and quotas.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(model_app, name="model")
app.add_typer(instance_app, name="instance")
app.add_typer(alias_app, name="alias")
app.add_typer(placement_app, name="placement")
app.add_typer(worker_app, name="worker")
app.add_typer(key_app, name="key")
app.add_typer(user_app, name="user")
app.add_typer(usage_app, name="usage")


def print_version(wanted: bool) -> None:
    """Print the version where `--version` is given, and exit."""
    if wanted:
        print(f"kvmig {__version__}")
        raise typer.Exit


@app.callback()
def common(
    data: Annotated[
        str, typer.Option(help="The fleet's data folder (environment: KVMIG_DATA).")
    ] = "",
    url: Annotated[
        str, typer.Option(help="URL of a fleet on another host (environment: KVMIG_URL).")
    ] = "",
    key: Annotated[
        str,
        typer.Option(
            help="API key for --url, with the scope admin or read (environment: KVMIG_KEY)."
        ),
    ] = "",
    _: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Take what all commands have in common."""
    where.data, where.url, where.key = data, url, key


# -- the fleet


@app.command()
@said
def up(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    proxies: Annotated[int, typer.Option(help="Number of proxy processes.")] = 1,
    database: Annotated[
        str,
        typer.Option(
            envvar=DATABASE,
            help="URL of a PostgreSQL database (default: SQLite in the data folder). Set a URL with"
            " a password in KVMIG_DATABASE: flags are visible to every user of the host.",
        ),
    ] = "",
    threads: Annotated[
        int, typer.Option(help="CPU cores for each instance on a CPU (default: half of the cores).")
    ] = 0,
    memory: Annotated[
        str,
        typer.Option(help="Memory for all models, in bytes or as 24GB (default: all of the host)."),
    ] = "",
    model_files: Annotated[
        str,
        typer.Option(
            help="Disk space for downloaded models, in bytes or as 500GB (default: no limit). Files"
            " that no model uses and that are not pinned go first, by their last use."
        ),
    ] = "",
    hub_port: Annotated[
        int,
        typer.Option(
            help="Port of a mirror of the Hugging Face Hub for this host's programs, which set"
            " HF_ENDPOINT to it (default: none). See also `kvmig mirror`."
        ),
    ] = 0,
    hub_disk: Annotated[
        str,
        typer.Option(help="Disk space for the mirror's files, as --model-files."),
    ] = "",
    catalogue: Annotated[
        str,
        typer.Option(
            help="File or https:// URL of the models that `kvmig model search` lists (default: the"
            " list that comes with kvmig)."
        ),
    ] = "",
    ray: Annotated[
        str,
        typer.Option(
            help="Run the models' instances on the nodes of a Ray cluster: HOST:PORT of its head,"
            " or auto for the cluster that this host belongs to (default: on this host)."
        ),
    ] = "",
    reserve: Annotated[
        str,
        typer.Option(
            help="Spare nodes that Ray's autoscaler keeps, with --ray: 3=1,16=2 keeps one with less"
            " than 3 workers, and two with 3 or more (default: the autoscaler is not asked)."
        ),
    ] = "",
    reserve_node: Annotated[
        str,
        typer.Option(
            help="CPUs and GPUs of a spare node, such as '{\"GPU\": 8}' (default: as the largest"
            " worker)."
        ),
    ] = "",
    gpu_placement: Annotated[
        str,
        typer.Option(
            help="Which GPU an instance gets of those with room: spread (the one with the fewest"
            " instances, then the emptiest) or pack (the fullest)."
        ),
    ] = "spread",
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish at shutdown.")
    ] = 30.0,
    keep_usage_days: Annotated[
        int,
        typer.Option(
            help="Days to keep the usage record of each call; 0: no limit. Daily totals are kept."
        ),
    ] = 400,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may call models, such as https://chat.example.com, or *"
            " for all (default: none). May be given several times."
        ),
    ] = None,
    tls_cert: Annotated[
        str,
        typer.Option(
            help="File with the certificate of the port in PEM form, then those of its issuers:"
            " clients connect by https. Both files are read again when they change."
        ),
    ] = "",
    tls_key: Annotated[
        str, typer.Option(help="File with the private key of --tls-cert in PEM form.")
    ] = "",
    allow_commands: Annotated[
        bool,
        typer.Option(
            "--allow-commands",
            help="Let admins add models with `engine: command`: an admin's key then lets its"
            " holder run any program of this host.",
        ),
    ] = False,
    oidc_issuer: Annotated[
        str,
        typer.Option(help="URL of an identity provider (OpenID Connect) for `kvmig login`."),
    ] = "",
    oidc_client_id: Annotated[
        str, typer.Option(help="Client id of this fleet at the identity provider.")
    ] = "",
    oidc_admin_group: Annotated[
        list[str] | None,
        typer.Option(help="Group whose people are admins. May be given several times."),
    ] = None,
    oidc_user_group: Annotated[
        list[str] | None,
        typer.Option(
            help="Group whose people may log in (default: all people). May be given several times."
        ),
    ] = None,
    oidc_groups_claim: Annotated[
        str, typer.Option(help="Claim of a token that lists a person's groups.")
    ] = "groups",
    oidc_name_claim: Annotated[
        str, typer.Option(help="Claim of a token that names a person.")
    ] = "preferred_username",
    oidc_key_hours: Annotated[
        float, typer.Option(help="Hours that a key from `kvmig login` is valid.")
    ] = 12.0,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Wait while another host serves the fleet of the same PostgreSQL database, and"
            " take over when that host is gone. Calls go to that host meanwhile. Give it on each"
            " of the hosts.",
        ),
    ] = False,
    peer_port: Annotated[
        int,
        typer.Option(
            help="Port on --host for the calls that the other hosts of --standby relay; 0: a free"
            " one."
        ),
    ] = 0,
) -> None:
    """Start a fleet and serve it until Ctrl-C."""
    from kvmig.fleet.supervisor import up as run

    check_packages(settings_of(os.environ))
    for secret in (DATABASE, KEY):  # models' processes need neither
        os.environ.pop(secret, None)
    if threads > cores():
        raise ConfigError(
            f"--threads is {threads}, must be 1 to {cores()}, the number of cores of this host"
        )
    settings = FleetSettings(
        data=data_folder(where.data),
        host=host,
        port=port,
        proxies=proxies,
        database=database,
        threads=threads or max(1, cores() // 2),
        memory=bytes_of("--memory", memory),
        files_bytes=bytes_of("--model-files", model_files),
        hub_port=hub_port,
        hub_bytes=bytes_of("--hub-disk", hub_disk),
        catalogue=catalogue
        if "://" in catalogue or not catalogue
        else str(Path(catalogue).absolute()),
        ray=ray,
        reserve=reserve,
        reserve_node=parse_resources(reserve_node, "--reserve-node"),
        gpu_placement=placement_of(gpu_placement),
        shutdown_timeout_s=shutdown_timeout,
        keep_usage_days=keep_usage_days,
        allowed_origins=tuple(allowed_origins or ()),
        certificate=certificate_files(tls_cert, tls_key),
        allow_commands=allow_commands,
        login=login_terms(
            oidc_issuer,
            oidc_client_id,
            groups_claim=oidc_groups_claim,
            name_claim=oidc_name_claim,
            user_groups=tuple(oidc_user_group or ()),
            admin_groups=tuple(oidc_admin_group or ()),
            key_hours=oidc_key_hours,
        ),
        standby=standby,
        peer_port=peer_port,
    )
    check_settings(settings)
    if ray:
        from kvmig.fleet.cluster_watch import check_cluster

        with patience(f"the Ray cluster {ray} is joined"):
            check_cluster(ray)
    status = run(settings)
    if status:
        raise typer.Exit(status)


def login_terms(issuer: str, client_id: str, **more: Any) -> LoginTerms | None:
    """How people log in; None: not at all. Raises ConfigError."""
    if client_id and not issuer:
        raise ConfigError(
            f"--oidc-client-id is {client_id!r:.200}, must be given together with --oidc-issuer"
        )
    return LoginTerms(issuer=issuer, client_id=client_id, **more) if issuer else None


def placement_of(text: str) -> Strategy:
    """Raises ConfigError."""
    if text not in get_args(Strategy):
        raise ConfigError(f"--gpu-placement is {text!r:.50}, must be spread or pack")
    return cast("Strategy", text)


@app.command()
@said
def status(as_json: Json = False) -> None:
    """Show the state of the fleet."""

    def row(name: str, value: Any) -> tuple[str, object]:
        if name.endswith("_bytes"):
            return name.removesuffix("_bytes"), size_text(value)
        return name, value

    show(
        where.client().get("status"),
        as_json,
        lambda found: table_of(["", ""], [row(*pair) for pair in found.items()]),
    )


@app.command()
@said
def apply(
    file: Annotated[Path, typer.Argument(help="YAML file with models and aliases.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would change.")
    ] = False,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Also remove models and aliases that are not in the file."),
    ] = False,
    canary: CanaryOption = "",
    hold: HoldOption = 60.0,
    deadline: DeadlineOption = None,
    as_json: Json = False,
) -> None:
    """Apply a file to the catalogue of models and aliases."""
    try:
        given = read_yaml(file.read_text())
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{file} can't be used: {error}") from error
    body = {
        "fleet": given,
        "folder": str(file.absolute().parent),
        "dry_run": dry_run,
        "prune": prune,
        "rollout": rollout_body(canary, hold, deadline),
    }
    with patience(CHECKING):
        answer = where.client().post("apply", body)
    columns = ("", "", "name")
    show_table(answer, as_json, columns, lambda one: (one["action"], one["kind"], one["name"]))
    say_what_waits(answer, as_json)


@app.command()
@said
def audit(
    limit: Annotated[int, typer.Option(help="Number of entries.")] = 20, as_json: Json = False
) -> None:
    """List changes of the catalogue, users and keys, newest first."""
    answer = where.client().get("audit", limit=limit)
    show_table(answer, as_json, ("at", "who", "from", "what", ""), audit_row)


def audit_row(one: dict[str, Any]) -> Sequence[object]:
    """A row of `kvmig audit`."""
    return time_of(one["at"]), one["actor"], one["address"], one["action"], one["object"]


@app.command()
@said
def backup(
    file: Annotated[Path, typer.Argument(help="File to write the copy to.")], as_json: Json = False
) -> None:
    """Back up the database while the fleet runs."""
    answer = where.client().post("backup", {"path": str(file.absolute())})
    holds = f"{file} holds the catalogue, the users and the keys (hashed)"
    show(answer, as_json, lambda _: holds)


app.command()(chat)
app.command()(doctor)
app.command("run")(run_model)
app.command("ps")(list_running)
app.command("login")(log_in)
app.command("pull")(pull_files)
app.command("rm")(remove_model)
app.command("mirror")(mirror_hub)
app.command("top")(show_top)


def main() -> None:
    """The command."""
    app()


if __name__ == "__main__":
    main()
