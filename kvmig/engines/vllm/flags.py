"""vLLM's own flags: parsed by vLLM's parser, refused where they can't hold with kvmig."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import NoReturn

from kvmig.engines.api_keys import api_keys
from kvmig.engines.offline import check_model, set_offline
from kvmig.engines.vllm.flag_list import ALLOWED, MEANS_NOTHING, REFUSED
from kvmig.ground.errors import ConfigError

_UNKNOWN = "kvmig doesn't know it, nor what it does to requests that move"


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
    refuse_conflicts(args, parser.get_default)
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    check_model(args.model)
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
        flag = f"--{name.replace('_', '-')}"
        plain = isinstance(value, int | float | str) and not isinstance(value, bool)
        given = f" {value}" if plain else ""
        raise ConfigError(f"{flag}{given} can't be used: {REFUSED.get(name, _UNKNOWN)}")


def print_help() -> None:
    """vLLM's own flags, all groups."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    make_arg_parser(FlexibleArgumentParser(prog="kvmig.serve", add_help=False)).print_help()
