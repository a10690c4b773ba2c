"""What the dashboards show: panels, their units and queries. Pure; `grafana.py` draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scripts.monitoring.rules import TPOT, TTFT, AlertTimes

Kind = Literal["time series", "number", "bars"]
RATE = "$__rate_interval"
QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))


@dataclass(frozen=True)
class PanelQuery:
    """A query, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class PanelSpec:
    """One panel."""

    title: str
    queries: tuple[PanelQuery, ...]
    unit: str = "short"
    """Grafana's name of it."""
    kind: Kind = "time series"
    description: str = ""


@dataclass(frozen=True)
class BoardSpec:
    """One dashboard."""

    uid: str
    title: str
    description: str
    panels: tuple[PanelSpec, ...]
    variables: tuple[str, ...] = ()
    """Labels by which it can be narrowed."""

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.uid}.json"


def one(title: str, expr: str, legend: str = "", unit: str = "short", text: str = "") -> PanelSpec:
    """A panel with one query over time."""
    return PanelSpec(title, (PanelQuery(expr, legend),), unit, description=text)


def number(title: str, expr: str, unit: str = "short") -> PanelSpec:
    """A number as it is now."""
    return PanelSpec(title, (PanelQuery(expr),), unit, "number")


def quantiles(title: str, metric: str, where: str = "", text: str = "") -> PanelSpec:
    """Quantiles of a histogram of seconds. where: matchers."""
    queries = tuple(
        PanelQuery(
            f"histogram_quantile({part}, sum by (le) (rate({metric}_bucket{{{where}}}[{RATE}])))",
            name,
        )
        for name, part in QUANTILES
    )
    return PanelSpec(title, queries, "s", description=text)


def rate(title: str, metric: str, by: str, where: str = "", unit: str = "short") -> PanelSpec:
    """The rate of a counter, summed by a label."""
    expr = f"sum by ({by}) (rate({metric}{{{where}}}[{RATE}]))"
    return one(title, expr, f"{{{{{by}}}}}", unit)


FLEET = BoardSpec(
    "kvmig-fleet",
    "kvmig: the fleet",
    "Models, calls and latencies of the whole fleet.",
    (
        number("Models that serve", 'sum(kvmig_model_state{state="serving"})'),
        number("Instances that serve", 'sum(kvmig_instance_state{state="serving"})'),
        number("Requests running", "sum(kvmig_proxy_running) or vector(0)"),
        number("Requests held for a start", "sum(kvmig_proxy_held) or vector(0)"),
        number("Models without room", "sum(kvmig_model_lacks_room)"),
        number("Ledger behind", "max(kvmig_usage_behind_seconds)", "s"),
        rate("Calls by status", "kvmig_proxy_requests_total", "status", unit="reqps"),
        rate("Output tokens by model", "kvmig_usage_tokens_total", "model", 'kind="output"'),
        rate("Prompt tokens by model", "kvmig_usage_tokens_total", "model", 'kind="prompt"'),
        one("Running requests by model", "sum by (model) (kvmig_proxy_running)", "{{model}}"),
        quantiles("Time to first token", "kvmig_request_ttft_seconds"),
        quantiles("Time per output token", "kvmig_request_tpot_seconds"),
        quantiles(
            "Wait for a start",
            "kvmig_proxy_cold_start_seconds",
            text="Of requests that were held until their model served.",
        ),
        one("Models by state", "sum by (state) (kvmig_model_state)", "{{state}}"),
        one("Host memory by model", "sum by (model) (kvmig_claim_bytes)", "{{model}}", "bytes"),
        one(
            "Changes of the number of instances",
            f"sum by (way) (increase(kvmig_autoscaler_decisions_total[{RATE}])) or vector(0)",
            "{{way}}",
        ),
        one("Free disk", "min by (of) (kvmig_disk_free_bytes)", "{{of}}", "bytes"),
        one(
            "Age of what proxies know",
            "max by (proxy) (kvmig_proxy_snapshot_age_seconds)",
            "proxy {{proxy}}",
            "s",
        ),
    ),
)

OF_MODEL = 'model=~"$model"'
MODEL = BoardSpec(
    "kvmig-model",
    "kvmig: a model",
    "Instances, queues, KV cache and latencies of the models that are chosen above.",
    (
        one(
            "KV cache in use by instance",
            f"kvmig_instance_blocks_used{{{OF_MODEL}}} / kvmig_instance_blocks_total{{{OF_MODEL}}}",
            "{{model}} {{instance}}",
            "percentunit",
        ),
        one(
            "Running requests by instance",
            f"kvmig_instance_running{{{OF_MODEL}}}",
            "{{model}} {{instance}}",
        ),
        one(
            "Queue by instance",
            f"kvmig_instance_waiting{{{OF_MODEL}}}",
            "{{model}} {{instance}}",
        ),
        PanelSpec(
            "Instances",
            (
                PanelQuery(
                    f"sum by (model) (kvmig_model_desired{{{OF_MODEL}}})", "{{model}} desired"
                ),
                PanelQuery(
                    f"sum by (model) (kvmig_model_ready{{{OF_MODEL}}})", "{{model}} serving"
                ),
            ),
        ),
        one(
            "Instances by state",
            f"sum by (state) (kvmig_instance_state{{{OF_MODEL}}})",
            "{{state}}",
        ),
        quantiles("Time to first token", "kvmig_request_ttft_seconds", OF_MODEL),
        quantiles("Time per output token", "kvmig_request_tpot_seconds", OF_MODEL),
        quantiles("Time of a whole request", "kvmig_request_seconds", OF_MODEL),
        PanelSpec(
            "Requests that miss their goal",
            tuple(
                PanelQuery(
                    f"{goal.recorded(AlertTimes().fast[1])}{{{OF_MODEL}}}", f"{{{{model}}}} {name}"
                )
                for goal, name in ((TTFT, "TTFT"), (TPOT, "TPOT"))
            ),
            "percentunit",
            description="TTFT above 2 s, or TPOT above 0.1 s; 1 % may be (kvmig.rules.yml).",
        ),
        rate(
            "Requests by class", "kvmig_request_seconds_count", "priority_class", OF_MODEL, "reqps"
        ),
        rate(
            "Requests refused (429) by class",
            "kvmig_requests_refused_total",
            "priority_class",
            OF_MODEL,
            "reqps",
        ),
        rate("Preemptions by instance", "kvmig_preemptions_total", "instance", OF_MODEL),
        rate("Calls by status", "kvmig_proxy_requests_total", "status", OF_MODEL, "reqps"),
    ),
    ("model",),
)

MIGRATIONS = BoardSpec(
    "kvmig-migrations",
    "kvmig: migrations",
    "Requests that move between instances, and what their clients notice.",
    (
        rate("Migrations by outcome", "kvmig_migrations_total", "outcome", OF_MODEL),
        rate("Migrations by purpose", "kvmig_migrations_total", "why", OF_MODEL),
        one(
            "Aborted by reason",
            "sum by (reason)"
            f' (rate(kvmig_migrations_total{{outcome="aborted", {OF_MODEL}}}[{RATE}]))'
            " or vector(0)",
            "{{reason}}",
        ),
        one(
            "From instance to instance",
            "topk(10, sum by (model, source, destination)"
            f" (rate(kvmig_migrations_total{{{OF_MODEL}}}[{RATE}])))",
            "{{model}} {{source}} → {{destination}}",
        ),
        one(
            "KV cache sent",
            f"sum by (model) (rate(kvmig_migration_bytes_total{{{OF_MODEL}}}[{RATE}]))",
            "{{model}}",
            "Bps",
        ),
        quantiles(
            "Pause",
            "kvmig_migration_downtime_seconds",
            OF_MODEL,
            "From asking for the suspension to the destination's first token.",
        ),
        quantiles(
            "Gap between tokens at the front end",
            "kvmig_client_gap_seconds",
            OF_MODEL,
            "Between the last token of the old instance and the first of the new one.",
        ),
        one(
            "Staging buffers in use",
            f"sum by (model, instance) (kvmig_instance_staging_used{{{OF_MODEL}}})",
            "{{model}} {{instance}}",
        ),
        one(
            "Requests run again",
            f"sum by (model) (rate(kvmig_requests_run_again_total{{{OF_MODEL}}}[{RATE}]))",
            "{{model}}",
            text="Their instance was missing; they were computed again from the tokens known.",
        ),
        one(
            "Instances missing",
            f"sum by (ailment) (increase(kvmig_instances_missing_total{{{OF_MODEL}}}[{RATE}]))"
            " or vector(0)",
            "{{ailment}}",
        ),
    ),
    ("model",),
)

OF_WORKER = 'worker=~"$worker"'
GPU_NAME = "{{worker}} {{gpu}}"
GPUS = BoardSpec(
    "kvmig-gpus",
    "kvmig: GPUs",
    "Memory of each GPU and whose it is, how busy it is, what it draws.",
    (
        PanelSpec(
            "Memory in use",
            (
                PanelQuery(
                    f"sum by (worker, gpu) (kvmig_gpu_memory_used_bytes{{{OF_WORKER}}})"
                    f" / sum by (worker, gpu) (kvmig_gpu_memory_bytes{{{OF_WORKER}}})",
                    GPU_NAME,
                ),
            ),
            "percentunit",
        ),
        one(
            "Memory in use by whose it is",
            f"sum by (whose) (kvmig_gpu_memory_used_bytes{{{OF_WORKER}}})",
            "{{whose}}",
            "bytes",
        ),
        one(
            "Memory claimed by model",
            f"sum by (model) (kvmig_gpu_claimed_bytes{{{OF_WORKER}}})",
            "{{model}}",
            "bytes",
        ),
        one(
            "Claimed memory by GPU and model",
            f"kvmig_gpu_claimed_bytes{{{OF_WORKER}}}",
            "{{worker}} {{gpu}} {{model}}",
            "bytes",
        ),
        one(
            "Utilization",
            f"kvmig_gpu_utilization_ratio{{{OF_WORKER}}}",
            GPU_NAME,
            "percentunit",
            "Part of the driver's last sampling period in which something computed.",
        ),
        one("Power", f"kvmig_gpu_power_watts{{{OF_WORKER}}}", GPU_NAME, "watt"),
    ),
    ("worker",),
)

TENANTS = BoardSpec(
    "kvmig-tenants",
    "kvmig: tenants",
    "Use of tokens by user and model, and quotas.",
    (
        number("Quotas used up", 'sum(kvmig_quotas{state="used_up"})'),
        number("Quotas near their end", 'sum(kvmig_quotas{state="near_end"})'),
        rate("Output tokens by user", "kvmig_user_tokens_total", "user", 'kind="output"'),
        rate("Prompt tokens by user", "kvmig_user_tokens_total", "user", 'kind="prompt"'),
        rate("Calls by user", "kvmig_user_calls_total", "user", unit="reqps"),
        PanelSpec(
            "Tokens of the last day by user",
            (
                PanelQuery(
                    "topk(20, sum by (user) (increase(kvmig_user_tokens_total[24h])))", "{{user}}"
                ),
            ),
            kind="bars",
        ),
        PanelSpec(
            "Smallest part left of quotas",
            (
                PanelQuery(
                    "bottomk(20, kvmig_quota_left_ratio)",
                    "{{kind}} {{name}} {{model}} {{period}}",
                ),
            ),
            "percentunit",
            "bars",
        ),
        rate("Calls by model", "kvmig_usage_calls_total", "model", unit="reqps"),
        one(
            "Calls refused by limits and quotas",
            f'sum by (model) (rate(kvmig_proxy_requests_total{{status="429"}}[{RATE}]))'
            " or vector(0)",
            "{{model}}",
            "reqps",
        ),
    ),
)

BOARDS = (FLEET, MODEL, MIGRATIONS, GPUS, TENANTS)
