"""The order that starts a model's deployment, and its command line. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from kvmig.command.launch import CommandLaunch, encode_launch
from kvmig.core.config import USUAL_MOST, instance_name
from kvmig.fleet.device_claims import DeviceClaim
from kvmig.fleet.orders import StartDeployment
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import WORKERS, ModelSpec, text_in


def start_order(
    spec: ModelSpec,
    deployment: str,
    settings: FleetSettings,
    note: str,
    units: Sequence[str],
    claim: DeviceClaim | None,
    places: Sequence[Sequence[str]],
    workers: Sequence[str] = (),
) -> StartDeployment:
    """units, claim, places: as in `words` and `gpu_words`. note: comes back with what runs.
    workers: flags that place its instances on these."""
    log = str(settings.log(quote(spec.name, safe="")))
    if spec.engine == "command":
        launch = encode_launch(command_launch(spec, deployment, settings, len(units), places))
        return StartDeployment(deployment, spec.library, (launch,), note, log, "command")
    own = (*words(spec, deployment, settings, units), *gpu_words(spec, claim, places), *workers)
    return StartDeployment(deployment, spec.library, own, note, log)


def command_launch(
    spec: ModelSpec,
    deployment: str,
    settings: FleetSettings,
    placed: int,
    places: Sequence[Sequence[str]],
) -> CommandLaunch:
    """The start document of a deployment that runs a command. placed: instances by a placement; 0:
    none."""
    return CommandLaunch(
        model=spec.name,
        command=spec.command,
        source=spec.folder,
        uds=str(settings.deployment(deployment)),
        spool=str(settings.spools / deployment),
        quotas=str(settings.quotas),
        instances=placed or max(1, spec.least),
        most=_most(spec),
        health=spec.health,
        memory=spec.memory,
        gpu_memory=spec.gpu_memory,
        gpus={instance_name(at): tuple(gpus) for at, gpus in enumerate(places)},
        parallel=spec.parallel,
        pass_environment=spec.pass_environment,
        stream_usage=spec.stream_usage,
        start_timeout_s=spec.instances.start_timeout_s,
        shutdown_timeout_s=settings.shutdown_timeout_s,
        hang_timeout_s=spec.hang_timeout_s,
    )


def _most(spec: ModelSpec) -> int:
    """Instances that a deployment may get by orders, which may be more later.

    One that decides by freeness itself goes so far.
    """
    most = spec.instances.max
    return most if spec.instances.target_kind == "freeness" else max(most, USUAL_MOST)


def words(
    spec: ModelSpec, deployment: str, settings: FleetSettings, units: Sequence[str] = ()
) -> tuple[str, ...]:
    """A deployment's command line behind `kvmig.serve`. units: of its instances, in a placement."""
    instances, first = spec.instances, len(units) or max(1, spec.least)
    own = [
        spec.folder,
        f"--engine={spec.engine}",
        f"--served-model-name={spec.name}",
        f"--uds={settings.deployment(deployment)}",
        f"--usage-spool={settings.spools / deployment}",
        f"--quota-socket={settings.quotas}",
        "--media-urls=named",
        "--end-with-stdin",
        "--front-apart",
        "--front-ends=1",
        f"--instances={first}",
        *(f"--instance-vllm={instance_name(at)}: {spec.vllm}" for at in range(first) if spec.vllm),
        *(f"--instance-unit=i{at}: {unit}" for at, unit in enumerate(units)),
        f"--max-instances={_most(spec)}",
        f"--start-timeout={instances.start_timeout_s:g}",
        f"--shutdown-timeout={settings.shutdown_timeout_s:g}",
    ]
    if instances.target_kind == "freeness":
        least = max(1, spec.least)
        own += [f"--autoscale={instances.target:g},{6 * instances.target:g}"]
        own += [f"--min-instances={least}"]
    if spec.load:
        own.append(f"--load={spec.load}")
    if spec.unit:
        own.append(f"--unit={settings.unit(spec.unit)}")
    if not spec.share_prefixes:
        own.append("--isolate-users")
    if spec.gpus_per_instance and not text_in(spec.flags, *WORKERS):
        own.append(f"--tensor-parallel-size={spec.gpus_per_instance}")
    if spec.adapters:
        own += ["--enable-lora", "--lora-modules"]
        own += [f"{name}={folder}" for name, folder in spec.adapters.items()]
    return (*own, *spec.flags)


def gpu_words(
    spec: ModelSpec, claim: DeviceClaim | None, places: Sequence[Sequence[str]]
) -> list[str]:
    """Flags of a deployment whose instances have these GPUs. claim: None: they use none."""
    if claim is None:
        return []
    own = [f"--instance-gpus=i{at}: {','.join(gpus)}" for at, gpus in enumerate(places)]
    own += [
        f"--instance-flags=i{at}: --tensor-parallel-size={len(gpus)}"
        for at, gpus in enumerate(places)
        if len(gpus) != spec.workers
    ]
    if claim.bounds:
        own.append(f"--instance-gpu-memory={claim.each}")
    if spec.warm == "parked" and spec.engine == "vllm":
        own.append("--enable-sleep-mode")
    return own
