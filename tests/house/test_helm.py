"""The Helm chart, rendered by Helm's own engine, and checked by Kubernetes' schemas."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvmig.cli.app import app
from kvmig.launcher import flags as serve_flags

helm = pytest.importorskip("helm_python", reason="no Helm here: pip install helm-python-sdk")
schemas = pytest.importorskip(
    "kubernetes_validate", reason="no schemas here: pip install kubernetes-validate"
)

ROOT = Path(__file__).resolve().parents[2] / "deploy" / "helm"
CHART = ROOT / "kvmig"
EXAMPLES = ("fleet", "ray", "servers")
OLDEST, NEWEST = "1.27", "1.33"
OTHERS = {"RayCluster", "ServiceMonitor", "InferencePool"}
"""Kinds that are not Kubernetes' own: their schemas are not here."""

Manifest = dict[str, Any]


def values_of(name: str) -> Manifest:
    """One of the example files."""
    found: Manifest = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text())
    return found


def rendered(values: Manifest) -> dict[str, Manifest]:
    """The manifests by kind, of a release `qwen`; raises as Helm does."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="qwen", namespace="prod")
    found = [
        one
        for name, text in files.items()
        if name.endswith(".yaml")
        for one in yaml.safe_load_all(text)
        if one
    ]
    made = {one["kind"]: one for one in found}
    assert len(made) == len(found)
    return made


def pods_of(manifests: dict[str, Manifest]) -> dict[str, Manifest]:
    """Templates of pods, by what they are."""
    found: dict[str, Manifest] = {}
    for kind in ("StatefulSet", "Deployment"):
        if kind in manifests:
            found[kind] = manifests[kind]["spec"]["template"]
    if "RayCluster" in manifests:
        spec = manifests["RayCluster"]["spec"]
        found["head"] = spec["headGroupSpec"]["template"]
        found["instance"] = spec["workerGroupSpecs"][0]["template"]
    return found


def test_helm_finds_nothing_wrong_in_the_chart() -> None:
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_rendered_is_valid_for_kubernetes(name: str, version: str) -> None:
    manifests = rendered(values_of(name))
    for kind, manifest in manifests.items():
        if kind not in OTHERS:
            schemas.validate(manifest, version, strict=True)
    for pod in pods_of(manifests).values():
        whole = {"apiVersion": "v1", "kind": "Pod", **pod}
        schemas.validate(whole, version, strict=True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_pod_is_ready_by_one_path_and_alive_by_another(name: str) -> None:
    for what, pod in pods_of(rendered(values_of(name))).items():
        (container,) = pod["spec"]["containers"]
        if what != "instance":  # Ray's own probes are there
            assert container["readinessProbe"]["httpGet"]["path"] == "/health"
            assert container["livenessProbe"]["httpGet"]["path"] == "/live"
        assert container["lifecycle"]["preStop"]["exec"]["command"]


@pytest.mark.parametrize("name", ["fleet", "ray"])
def test_a_fleets_command_is_one_that_kvmig_knows(name: str) -> None:
    pods = pods_of(rendered(values_of(name)))
    (container,) = (pods.get("StatefulSet") or pods["head"])["spec"]["containers"]
    words = [one for one in container["args"] if one.startswith("--")]
    command = typer.main.get_group(app).commands["up"]
    params = command.make_context("up", words).params
    assert (params["host"], params["port"]) == ("0.0.0.0", 8080)
    assert params["ray"] == ("auto" if name == "ray" else "")
    assert pods_grace(pods) > params["shutdown_timeout"]


def pods_grace(pods: dict[str, Manifest]) -> int:
    """The shortest time in which a pod must end."""
    return min(int(one["spec"]["terminationGracePeriodSeconds"]) for one in pods.values())


def test_a_servers_flags_are_ones_that_kvmig_knows() -> None:
    (container,) = pods_of(rendered(values_of("servers")))["Deployment"]["spec"]["containers"]
    config, rest, _ = serve_flags.parse(container["args"])
    assert (config.instances, config.lifecycle.front_ends) == (1, 1)
    assert rest[0] == "Qwen/Qwen3-8B"


def test_a_pod_with_an_instance_may_take_as_long_to_leave_as_its_drain_is_forecast_to() -> None:
    values = values_of("ray")
    values["drain"] = {"forecastSeconds": 40, "startSeconds": 100}
    pod = pods_of(rendered(values))["instance"]["spec"]
    (container,) = pod["containers"]
    drain = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert 'kvmig worker drain "$POD_NAME" --deadline 80 --wait 180' in drain
    assert pod["terminationGracePeriodSeconds"] == 210
    name = next(one for one in container["env"] if one["name"] == "KVMIG_URL")["value"]
    assert name == "http://qwen-kvmig:8080"


def test_an_admins_key_reaches_drains_and_prometheus_from_a_secret_only() -> None:
    for name in EXAMPLES:
        manifests = rendered(values_of(name))
        text = yaml.safe_dump_all(manifests.values())
        assert "change-me" not in yaml.safe_dump_all(
            one for kind, one in manifests.items() if kind != "Secret"
        )
        assert "kvmig-admin" in text or name == "fleet"


@pytest.mark.parametrize(("name", "pod"), [("ray", "instance"), ("servers", "Deployment")])
def test_pods_with_instances_are_disrupted_one_at_a_time(name: str, pod: str) -> None:
    manifests = rendered(values_of(name))
    budget = manifests["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 1
    every = pods_of(manifests)
    chosen = budget["selector"]["matchLabels"].items()
    assert [one for one in every if chosen <= every[one]["metadata"]["labels"].items()] == [pod]


def test_the_only_pod_of_a_fleet_keeps_no_node_from_being_drained() -> None:
    assert "PodDisruptionBudget" not in rendered(values_of("fleet"))


@pytest.mark.parametrize(("name", "key"), [("fleet", "kvmig-admin"), ("servers", None)])
def test_prometheus_scrapes_the_service_of_the_release(name: str, key: str | None) -> None:
    manifests = rendered(values_of(name))
    monitor, service = manifests["ServiceMonitor"]["spec"], manifests["Service"]
    labels = service["metadata"]["labels"].items()
    assert monitor["selector"]["matchLabels"].items() <= labels
    (end,) = monitor["endpoints"]
    assert (end["path"], end["honorLabels"]) == ("/metrics", True)
    assert end["port"] in [one["name"] for one in service["spec"]["ports"]]
    assert end.get("authorization", {}).get("credentials", {}).get("name") == key


def test_models_processes_inherit_neither_the_admins_key_nor_the_databases_password() -> None:
    pods = pods_of(rendered(values_of("ray")))
    for what, secret in (("instance", "KVMIG_KEY"), ("head", "KVMIG_DATABASE")):
        (container,) = pods[what]["spec"]["containers"]
        assert secret in [one["name"] for one in container["env"]]
        started = {
            "KUBERAY_GEN_RAY_START_CMD": f"bash -c 'echo given=${{{secret}-}}'",
            secret: "secret",
            "PATH": os.environ["PATH"],
        }
        words = [*container["command"], container["args"][0].replace("exec kvmig", ": kvmig")]
        said = subprocess.run(words, env=started, capture_output=True, text=True, check=True)
        assert said.stdout == "given=\n"


def test_calls_come_from_named_namespaces_only_and_ray_from_its_own_pods() -> None:
    fleet = rendered(values_of("fleet"))["NetworkPolicy"]["spec"]["ingress"]
    names = [one["namespaceSelector"]["matchLabels"] for one in fleet[0]["from"]]
    assert [list(one.values()) for one in names] == [["chat"], ["monitoring"]]
    assert len(fleet) == 1
    ray = rendered(values_of("ray"))["NetworkPolicy"]["spec"]["ingress"]
    assert "podSelector" in ray[1]["from"][0]
    assert "namespaceSelector" not in ray[1]["from"][0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mode": "servers"}, "server.model must name the model"),
        ({"serviceMonitor": {"enabled": True}}, "need an admin's key"),
        ({"inferencePool": {"enabled": True}}, "needs mode servers"),
        (
            {
                "mode": "servers",
                "server": {"model": "m", "instances": 2},
                "inferencePool": {"enabled": True},
            },
            "needs server.instances of 1",
        ),
        ({"mode": "cluster"}, "mode"),
        ({"service": {"port": 0}}, "port"),
        ({"database": {"url": "mysql://host/kvmig"}}, "url"),
        ({"nodeselector": {}}, "nodeselector"),
    ],
)
def test_values_that_can_not_be_are_refused_with_the_reason(values: Manifest, words: str) -> None:
    with pytest.raises(helm.HelmError, match=words):
        rendered(values)


def test_an_inference_pool_selects_the_pods_of_the_servers() -> None:
    manifests = rendered(values_of("servers"))
    pool = manifests["InferencePool"]["spec"]
    pod = manifests["Deployment"]["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert pool["targetPorts"] == [{"number": container["ports"][0]["containerPort"]}]


def test_keda_scales_the_deployment_that_the_example_makes() -> None:
    target = values_of("keda")["spec"]["scaleTargetRef"]
    made = rendered(values_of("servers"))["Deployment"]
    assert (target["kind"], target["name"]) == (made["kind"], made["metadata"]["name"])
