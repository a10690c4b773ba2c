"""vLLM's own flags: parsed by vLLM's parser, refused where they can't hold with kvmig."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from kvmig.core.errors import ConfigError
from kvmig.engines.kind import api_keys, check_model, set_offline
from kvmig.engines.vllm.cache_places import choose_caches
from kvmig.engines.vllm.connectors import KNOWN, is_known
from kvmig.engines.vllm.flag_errors import name_bad_values
from kvmig.engines.vllm.loaders import check_loader, check_loader_words

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

_UNKNOWN = "kvmig doesn't know it, nor what it does to requests that move"


IMAGE_PIXELS = 1 << 24
"""Most pixels of one image: a photo of 16 megapixels; vLLM's own bound is eleven times as much."""
AUDIO_BYTES = 1 << 25
"""Most bytes of one decoded recording: there are up to three times as many meanwhile. Eight
minutes of speech at 16 kHz; vLLM's own bound is eight times as much."""
EMBEDDING_BYTES = 1 << 25
"""Most bytes of one tensor of embeddings in a call, zeros that are left out included; vLLM's own
bound is 64 times as much."""


def set_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what must be set before vLLM is imported; what the user has set stays."""
    set_offline(environment)
    choose_caches(environment)
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The engine runs in the llumlet's own process: vLLM must not start another for it.
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # A library of quantized kernels compiles in the background as soon as it is imported, with a
    # thread that waits for each compiler; now it does so when a model needs it.
    environment.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    environment.setdefault("VLLM_MAX_IMAGE_PIXELS", str(IMAGE_PIXELS))
    environment.setdefault("VLLM_MAX_AUDIO_DECODE_BYTES", str(AUDIO_BYTES))
    environment.setdefault("VLLM_MAX_EMBED_DECODE_BYTES", str(EMBEDDING_BYTES))


def make_parser() -> FlexibleArgumentParser:
    """vLLM's own parser; its mistakes are ConfigErrors of one line."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvmig.engines.vllm.compat import cli_args

    parser: FlexibleArgumentParser = cli_args.make_arg_parser(
        FlexibleArgumentParser(prog="kvmig.serve", add_help=False)
    )

    def refuse(message: str) -> NoReturn:
        raise ConfigError(" ".join(message.split()))

    parser.error = refuse
    name_bad_values(parser)
    return parser


@contextmanager
def unreadable_told() -> Iterator[None]:
    """Raise ConfigError for what vLLM's parser raises of a file that --config names: missing, no
    YAML, no mapping."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"vLLM's flags can't be read: {' '.join(str(error).split())}") from error


def parse(argv: list[str]) -> Namespace:
    """Parse `MODEL [any flag of vllm serve]`. Raises ConfigError."""
    from kvmig.engines.vllm.compat import cli_args

    parser = make_parser()
    with unreadable_told():
        args: Namespace = parser.parse_args(argv)
    if args.model_tag is not None:
        args.model = args.model_tag
    elif not any(word.split("=")[0] in ("--model", "--config") for word in argv):
        raise ConfigError("MODEL is missing, must be a folder with a config.json")
    refuse_conflicts(args, parser.get_default)
    try:
        cli_args.validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    check_model(args.model)
    check_loader(args.load_format)
    args.api_key = api_keys(args.api_key)
    # It keeps a query in one engine's worker, and its documents go to whichever.
    args.enable_flash_late_interaction = False
    return args


def refuse_conflicts(args: Namespace, default: Callable[[str], object]) -> None:
    """Refuse, with what to use instead, flags that have another value than vLLM's default.

    default: of a flag by its name. Raises ConfigError.
    """
    for name, value in vars(args).items():
        if name in ALLOWED or value == default(name) or value in MEANS_NOTHING.get(name, ()):
            continue
        if name == "kv_transfer_config" and is_known(value):
            continue
        flag = f"--{name.replace('_', '-')}"
        plain = isinstance(value, int | float | str) and not isinstance(value, bool)
        given = f" {value}" if plain else ""
        raise ConfigError(f"{flag}{given} can't be used: {REFUSED.get(name, _UNKNOWN)}")


def switches_of(name: str) -> tuple[str, ...]:
    """The flags that a word may set: vLLM has `--no-x` for `--x`, and from 0.33 on `--disable-x`
    for `--enable-x`, and the other way round."""
    plain = name.removeprefix("no_")
    for one, other in (("enable_", "disable_"), ("disable_", "enable_")):
        if plain.startswith(one):
            return plain, other + plain.removeprefix(one)
    return (plain,)


def check_words(argv: list[str]) -> None:
    """Refuse what can be refused without vLLM: no model, unknown flags, and switches that kvmig
    refuses. Raises ConfigError.
    """
    if argv and not argv[0].startswith("-"):
        check_model(argv[0])
    check_loader_words(argv)
    known = ALLOWED | ALIASES | REFUSED.keys()
    for word, value in zip(argv, [*argv[1:], "-"], strict=True):
        name = word.partition("=")[0].partition(".")[0].removeprefix("--").replace("-", "_")
        meant = switches_of(name)
        if not word.startswith("--") or not ALLOWED.isdisjoint(meant):
            continue
        if name in REFUSED and "=" not in word and value.startswith("-"):
            raise ConfigError(f"{word} can't be used: {REFUSED[name]}")
        if not any(one.startswith((name, *meant)) for one in known):
            raise ConfigError(f"{word} can't be used: vLLM has no such flag")


def print_help() -> None:
    """vLLM's own flags, all groups."""
    make_parser().print_help()


# Every flag of vLLM's is judged: it is allowed, or refused with what to use instead. One that
# stands in neither came with a newer vLLM, and is refused where it is given, until somebody has
# looked at what it does to requests that move, and to several engines behind one front end:
# `tests/engines/vllm/test_vllm_flag_list.py` names those.

_DATA_PARALLEL = "kvmig runs whole instances, use --instances N"
_HOSTS = (
    "kvmig runs whole instances, use --instances N on each host, and KVMIG_JOIN to move requests"
    " between hosts (docs/plugin.md)"
)
_CONTEXT_PARALLEL = "it spreads a block's tokens over workers"
_ONE_HOST = "an instance runs on its llumlet's host, leave it out"
_CONNECTORS = (
    "kvmig moves KV blocks itself, use --transport; and --kv-offloading-size for vLLM's own"
    f" offload. Of KV connectors it knows {', '.join(KNOWN)}"
)
_ENCODERS = "kvmig's instances encode what they get themselves, leave it out"
_IN_BAND = "images travel with their requests, leave it out"
_HEADS = "kvmig bounds the heads of calls itself (docs/security.md), leave it out"
_ONE_API = "kvmig serves the OpenAI API on --host and --port, leave it out"

_SLEEP = "kvmig parks idle models by --enable-sleep-mode alone, leave it out"

REFUSED: dict[str, str] = {
    "sleep_mode_backend": _SLEEP,
    "sleep_mode_offload_cudagraph": _SLEEP,
    "sleep_preserve_parameter_names": _SLEEP,
    "data_parallel_address": _HOSTS,
    "data_parallel_backend": _DATA_PARALLEL,
    "data_parallel_external_lb": _HOSTS,
    "data_parallel_hybrid_lb": _HOSTS,
    "data_parallel_multi_port_external_lb": _HOSTS,
    "data_parallel_rank": _HOSTS,
    "data_parallel_rpc_port": _DATA_PARALLEL,
    "data_parallel_size": _DATA_PARALLEL,
    "data_parallel_size_local": _HOSTS,
    "data_parallel_start_rank": _HOSTS,
    "data_parallel_supervisor_port": _DATA_PARALLEL,
    "disable_nccl_for_dp_synchronization": _DATA_PARALLEL,
    "dp_supervisor_probe_failure_threshold": _DATA_PARALLEL,
    "dp_supervisor_probe_interval_s": _DATA_PARALLEL,
    "dp_supervisor_probe_timeout_s": _DATA_PARALLEL,
    "dp_sync_interval": _DATA_PARALLEL,
    "elastic_ep_max_dp_size": _DATA_PARALLEL,
    "enable_elastic_ep": _DATA_PARALLEL,
    "enable_fault_tolerance": "kvmig starts instances again itself (docs/faults.md), leave it out",
    "fault_tolerance_config": "kvmig starts instances again itself (docs/faults.md), leave it out",
    "pipeline_parallel_size": "use --tensor-parallel-size",
    "cp_kv_cache_interleave_size": _CONTEXT_PARALLEL,
    "dcp_comm_backend": _CONTEXT_PARALLEL,
    "dcp_kv_cache_interleave_size": _CONTEXT_PARALLEL,
    "dcp_q_replicate": _CONTEXT_PARALLEL,
    "decode_context_parallel_size": _CONTEXT_PARALLEL,
    "prefill_context_parallel_size": _CONTEXT_PARALLEL,
    "device_ids": "kvmig gives each instance its GPUs, use CUDA_VISIBLE_DEVICES",
    "distributed_executor_backend": _ONE_HOST,
    "master_addr": _ONE_HOST,
    "master_port": _ONE_HOST,
    "nnodes": _ONE_HOST,
    "node_rank": _ONE_HOST,
    "ray_workers_use_nsight": _ONE_HOST,
    "scheduler_cls": "kvmig drives vLLM's own scheduler, leave it out",
    "prefill_schedule_interval": "it is for data parallel engines, leave it out",
    "kv_offloading_backend": "only vLLM's own (native) can learn from kvmig which requests moved",
    "kv_transfer_config": _CONNECTORS,
    "kv_events_config": "all instances would publish on one port, leave it out",
    "ec_manager_config": _ENCODERS,
    "ec_transfer_config": _ENCODERS,
    "mm_encoder_only": _ENCODERS,
    "mm_ipc_gpu_memory_gb": _IN_BAND,
    "mm_tensor_ipc": _IN_BAND,
    "api_server_count": "use --front-ends N",
    "headless": f"kvmig starts front end and instances: {_HOSTS}",
    "grpc": _ONE_API,
    "grpc_port": _ONE_API,
    "uds": _ONE_API,
    "h11_max_header_count": _HEADS,
    "h11_max_incomplete_event_size": _HEADS,
    "shutdown_timeout": "kvmig's own is the whole server's, give it outside --instance-flags",
    "watchdog_config": "kvmig watches its instances itself (docs/faults.md), leave it out",
}
"""Why a flag, by its name in Python, can't have another value than vLLM's default."""

MEANS_NOTHING: dict[str, tuple[object, ...]] = {
    "distributed_executor_backend": ("uni", "mp"),
    "api_server_count": (1,),
}
"""Values of refused flags that kvmig takes: they ask for what is so anyway."""

NO_FLAGS = frozenset(
    {"_api_process_count", "_api_process_rank", "enable_mm_processor_stats", "mamba_config",
     "model_weights"}
)  # fmt: skip
"""Fields of vLLM's arguments that can't be given."""

_ALLOWED = (
    # positional arguments
    """
    model_tag
    """,
    # options
    """
    aggregate_engine_logging config disable_log_stats enable_log_requests
    fail_on_environ_validation gdn_prefill_backend kda_decode_backend kda_prefill_backend
    """,
    # Frontend
    """
    allow_credentials allowed_headers allowed_methods allowed_origins
    anthropic_disabled_thinking_effort api_key chat_template chat_template_content_format
    cohere_format cohere_is_reasoning_model default_chat_template_kwargs
    disable_access_log_for_endpoints disable_fastapi_docs disable_uvicorn_access_log
    enable_auto_tool_choice enable_flash_late_interaction enable_force_include_usage
    enable_log_deltas enable_log_outputs enable_offline_docs enable_per_request_metrics
    enable_prompt_tokens_details enable_request_id_headers enable_scale_out
    enable_server_load_tracking enable_ssl_refresh enable_tokenizer_info_endpoint
    exclude_tools_when_tool_choice_none fingerprint_mode fingerprint_value host log_error_stack
    lora_modules max_log_len middleware port reasoning_effort_map response_role
    return_tokens_as_token_ids root_path
    sse_keep_alive_interval ssl_ca_certs ssl_cert_reqs ssl_certfile ssl_ciphers ssl_keyfile
    tokens_only tool_call_parser tool_parser_plugin tool_server tool_strict_level
    trust_request_chat_template trust_request_mm_kwargs uvicorn_log_level
    """,
    # ModelConfig
    """
    allow_deprecated_quantization allowed_local_media_path allowed_media_domains code_revision
    config_format convert disable_cascade_attn disable_sliding_window dtype
    enable_cumem_allocator enable_nccl_comm_suspend enable_prompt_embeds
    enable_return_routed_experts enable_sleep_mode enable_trace_replay enforce_eager
    generation_config hf_config_path hf_overrides hf_token io_processor_plugin logits_processors
    logprobs_mode max_logprobs max_model_len model model_class_overrides model_impl
    override_generation_config pooler_config quantization quantization_config
    renderer_num_workers return_sampling_mask revision runner seed served_model_name
    skip_tokenizer_init tokenizer tokenizer_mode tokenizer_revision trust_remote_code
    use_fp64_gumbel
    """,
    # LoadConfig
    """
    download_dir ignore_patterns load_format model_loader_extra_config pt_load_map_location
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    use_tqdm_on_load
    """,
    # AttentionConfig
    """
    attention_backend
    """,
    # MambaConfig
    """
    enable_mamba_cache_stochastic_rounding mamba_backend mamba_cache_philox_rounds
    mamba_ssu_algorithm
    """,
    # StructuredOutputsConfig
    """
    reasoning_parser reasoning_parser_plugin
    """,
    # ParallelConfig
    """
    all2all_backend cpu_distributed_timeout_seconds dbo_decode_token_threshold
    dbo_prefill_token_threshold disable_custom_all_reduce distributed_timeout_seconds
    enable_batch_sharded_sampling enable_dbo enable_ep_weight_filter enable_eplb
    enable_expert_parallel enable_hc_sp enable_shm_tensor_arena eplb_config
    expert_placement_strategy max_parallel_loading_workers numa_bind numa_bind_cpus
    numa_bind_nodes tensor_parallel_size ubatch_size worker_cls worker_extension_cls
    """,
    # CacheConfig
    """
    block_size enable_mamba_shared_prefix_checkpoint enable_prefix_caching
    gpu_memory_utilization kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_memory_bytes
    kv_offloading_size kv_sharing_fast_prefill mamba_block_size
    mamba_cache_dtype mamba_cache_mode
    mamba_ssm_cache_dtype num_gpu_blocks_override prefix_cache_retention_interval
    prefix_caching_hash_algo prefix_match_unit replayssm_buffer_len swa_bounded_replay
    use_replayssm
    """,
    # OffloadConfig
    """
    cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group
    offload_params offload_prefetch_step
    """,
    # MultiModalConfig
    """
    enable_mm_embeds interleave_mm_strings language_model_only limit_mm_per_prompt
    media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
    mm_encoder_tp_mode mm_hasher_algorithm mm_processor_cache_gb mm_processor_cache_type
    mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb skip_mm_profiling
    video_pruning_method video_pruning_rate
    """,
    # LoRAConfig
    """
    default_mm_loras enable_lora enable_mixed_moe_lora_format enable_moe_shared_loras
    enable_tower_connector_lora fully_sharded_loras lora_dtype lora_target_modules max_cpu_loras
    max_lora_cls_labels max_lora_rank max_loras specialize_active_lora
    """,
    # LoggingConfig
    """
    log_config_file log_level logging_config
    """,
    # ObservabilityConfig
    """
    collect_detailed_traces cudagraph_metrics custom_histogram_buckets
    enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mfu_metrics
    jit_monitor_mode jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample
    otlp_traces_endpoint per_request_spec_decode_metrics show_hidden_metrics_for_version
    """,
    # SchedulerConfig
    """
    async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager
    enable_chunked_prefill long_prefill_token_threshold long_prefill_token_threshold_adaptive
    max_num_active_seqs max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens
    max_num_scheduled_tokens max_num_seqs scheduler_reserve_full_isl scheduling_policy
    stream_interval watermark
    """,
    # CompilationConfig
    """
    cudagraph_capture_sizes max_cudagraph_capture_size
    """,
    # KernelConfig
    """
    enable_flashinfer_autotune ir_op_priority linear_backend moe_backend monokernel
    sparse_indexer_topk_backend
    """,
    # VllmConfig
    """
    additional_config attention_config aux_output_config compilation_config diffusion_config
    engram_config kernel_config optimization_level performance_mode profiler_config
    reasoning_config spec_method spec_model spec_tokens speculative_config
    structured_outputs_config watermark_config weight_transfer_config
    """,
)
ALLOWED = frozenset(" ".join(_ALLOWED).split())
"""Flags by vLLM's groups."""
ALIASES = frozenset({"device_memory_utilization"})
"""Flags that vLLM has a second spelling for."""
