"""Routes of vLLM's server that are known, and closed to a fleet's clients. Pure.

`python -m kvmig_tools.drift` reports a route of a new vLLM that is neither in the table of clients'
routes nor here.
"""

from __future__ import annotations

from kvmig.asgi.route_table import CLIENT_ROUTES

_OPERATORS = """
/abort_requests /inference/v1/abort_requests /collective_rpc /pause /resume /sleep /wake_up
/release_kv_cache_memory /reset_encoder_cache /reset_mm_cache /reset_prefix_cache
/v1/load_lora_adapter /v1/unload_lora_adapter /start_profile /stop_profile
/scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply
/init_weight_transfer_engine /shutdown_weight_transfer_engine /start_draft_weight_update
/start_weight_update /update_weights /finish_weight_update /update_weight_version /weight_checker
"""
"""Routes that end, stop or change what belongs to all tenants."""
_PARTS = """
/v1/chat/completions/render /v1/chat/completions/derender /v1/completions/render
/v1/completions/derender /v1/messages/render /v1/responses/render /cohere/v2/chat/render
"""
"""Halves of a call, for servers that render apart from those that compute."""
_READ = """
/docs /static /health /ready /readyz /ping /version /load /server_info /tokenizer_info
/is_paused /is_sleeping /get_world_size /weight_info /kv_event_sources /fault_tolerance/status
/v1/models app.swagger_ui_oauth2_redirect_url
"""
"""Routes of one deployment, or that the proxy itself answers."""
_NOT_YET = "/v1/decisions /ping"
"""Routes of 0.33; and another spelling of /health."""

CLOSED_ROUTES = frozenset(
    {
        *(("POST", path) for path in f"{_OPERATORS} {_PARTS} {_NOT_YET}".split()),
        *(("GET", path) for path in _READ.split()),
        ("ANY", "/static"),
        ("ANY", "route.path"),  # made of other routes, by --enable-scale-out
        ("WEBSOCKET", "/v1/realtime"),
    }
)
KNOWN_ROUTES = CLOSED_ROUTES | {(one.method, one.path) for one in CLIENT_ROUTES}
