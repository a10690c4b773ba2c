"""`python -m bench.load.twin DESCRIPTOR COUNT INDEX INPUT OUTPUT MODEL ...`: vLLM's front end.

One of COUNT API servers as vLLM's `--api-server-count` starts them: its own
`run_server_worker` on the listening socket DESCRIPTOR, with its own AsyncLLM and engine-core
client, told by vLLM's own means (`client_config`) that the engine is managed elsewhere. That is
`bench.load.twin_core`.
"""

from __future__ import annotations

import os
import socket
import sys

import uvloop

from kvmig.engines.registry import kind_of


def main(argv: list[str]) -> None:
    descriptor, count, index, to_core, from_core, *rest = argv[1:]
    kind_of("vllm").prepare()
    # The one thing that kvmig sets and that vLLM's server hasn't by itself.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvmig.engines.vllm.compat import cli_args

    args = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(rest)
    args.model = args.model_tag
    cli_args.validate_parsed_serve_args(args)
    sock = socket.socket(fileno=int(descriptor))
    config = {
        "input_address": to_core,
        "output_address": from_core,
        "client_count": int(count),
        "client_index": int(index),
    }
    uvloop.run(run_server_worker("", sock, args, client_config=config))


if __name__ == "__main__":
    main(sys.argv)
