"""vLLM's own flags: parsed by vLLM's parser, refused where they can't hold with kvmig."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import NoReturn

from kvmig.engines.api_keys import api_keys
from kvmig.engines.offline import check_model, set_offline
from kvmig.ground.errors import ConfigError


def set_environment() -> None:
    """Set what must be set before vLLM is imported; what the user has set stays."""
    set_offline()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The engine runs in the llumlet's own process: vLLM must not start another for it.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def parse(argv: list[str]) -> Namespace:
    """Parse `MODEL [any flag of vllm serve]`. Raises ConfigError with one sentence."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="kvmig.serve", add_help=False))

    def refuse(message: str) -> NoReturn:
        raise ConfigError(message)

    parser.error = refuse
    try:
        args = parser.parse_args(argv)
    except ConfigError:
        raise
    except Exception as error:  # of a file that --config names: missing, no YAML, no mapping
        raise ConfigError(f"vLLM's flags can't be read: {' '.join(str(error).split())}") from error
    if args.model_tag is not None:
        args.model = args.model_tag
    elif not any(word.split("=")[0] in ("--model", "--config") for word in argv):
        raise ConfigError("MODEL is missing, must be a folder with a config.json")
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    refuse_conflicts(args)
    check_model(args.model)
    args.api_key = api_keys(args.api_key)
    return args


def refuse_conflicts(args: Namespace) -> None:
    """Refuse, with what to use instead, flags that mean another owner of the engines."""
    parallel = args.data_parallel_size
    conflicts: tuple[tuple[bool, str], ...] = (
        (
            (parallel or 1) > 1
            or args.data_parallel_rank is not None
            or args.data_parallel_start_rank is not None
            or bool(args.data_parallel_external_lb)
            or bool(args.data_parallel_hybrid_lb),
            "data-parallel flags can't be used: kvmig runs whole instances, use --instances N",
        ),
        (
            args.scheduler_cls is not None,
            "--scheduler-cls can't be used: kvmig drives vLLM's own scheduler, leave it out",
        ),
        (
            args.kv_transfer_config is not None,
            "--kv-transfer-config can't be used: kvmig moves KV blocks itself, use --transport",
        ),
        (
            args.pipeline_parallel_size > 1,
            f"--pipeline-parallel-size {args.pipeline_parallel_size} can't be used:"
            " use --tensor-parallel-size",
        ),
        (
            max(args.decode_context_parallel_size, args.prefill_context_parallel_size) > 1,
            "context parallelism can't be used: it spreads a block's tokens over workers",
        ),
        (args.nnodes > 1, f"--nnodes {args.nnodes} can't be used: an instance runs on one host"),
        (
            args.distributed_executor_backend not in (None, "uni", "mp"),
            f"--distributed-executor-backend {args.distributed_executor_backend} can't be used:"
            " an instance runs on its llumlet's host, leave it out",
        ),
        (
            (args.api_server_count or 1) > 1,
            "--api-server-count can't be used: kvmig has one front end, leave it out",
        ),
        (bool(args.headless), "--headless can't be used: kvmig starts front end and instances"),
        (bool(args.grpc), "--grpc can't be used: kvmig serves the OpenAI HTTP API"),
        (
            bool(getattr(args, "enable_elastic_ep", False)),
            "--enable-elastic-ep can't be used: use --instances N",
        ),
    )
    for applies, sentence in conflicts:
        if applies:
            raise ConfigError(sentence)


def print_help() -> None:
    """vLLM's own flags, all groups."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_arg_parser(FlexibleArgumentParser(prog="kvmig.serve", add_help=False)).print_help()
