"""The metrics that an endpoint picker of Gateway API's extension reads, under its names."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import Served

pytestmark = pytest.mark.server

READ = {
    "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
}  # fmt: skip


async def test_a_server_has_the_gauges_that_an_endpoint_picker_reads(served: Served) -> None:
    async with httpx.AsyncClient(timeout=SERVER_PATIENCE_S, verify=False) as client:
        answer = await client.get(f"{served.url}/metrics")
    families = {one.name: one for one in text_string_to_metric_families(answer.text)}
    found = {name: families[name] for name in READ & families.keys()}
    assert found.keys() == READ
    assert {one.type for one in found.values()} == {"gauge"}
    assert all("engine" in one.samples[0].labels for one in found.values())
