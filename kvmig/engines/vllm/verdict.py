"""What becomes of a `vllm serve` command line under kvmig: its requests move, they stay, or it is
refused. It is decided by flags alone.

A server whose requests stay is vLLM's own, as without kvmig.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from kvmig.core.errors import ConfigError
from kvmig.engines.vllm.connectors import NATIVE, is_known
from kvmig.engines.vllm.flags import make_parser, refuse_conflicts, unreadable_told
from kvmig.engines.vllm.kind import lacking_names_told

FILE = "--config"
_SPREAD = (
    ("pipeline_parallel_size", "each stage has a part of a request's KV cache"),
    ("decode_context_parallel_size", "its workers share a block's tokens"),
    ("prefill_context_parallel_size", "its workers share a prompt's tokens"),
)


class ServingVerdict(NamedTuple):
    """what: `moves`, `stays` or `refused`; why: in one line, of the last two."""

    what: Literal["moves", "stays", "refused"]
    why: str = ""


def judge_words(words: Sequence[str], rest: Sequence[str], ranks: int) -> ServingVerdict:
    """Judge a command line. words: MODEL and flags; rest: without those that kvmig reads itself;
    ranks: data parallel ones. Raises ConfigError where vLLM's parser refuses it."""
    with lacking_names_told():
        parser = make_parser()
        with unreadable_told():
            args = parser.parse_args(list(rest))
            verdict = judge_server(args, parser.get_default, ranks)
            if verdict.what != "stays":
                return verdict
            try:
                parser.parse_args(list(words))
            except ConfigError as error:
                why = f"{verdict.why}; vLLM without kvmig refuses the other flags: {error}"
                return ServingVerdict("refused", why)
            return verdict


def judge_server(args: Namespace, default: Callable[[str], object], ranks: int) -> ServingVerdict:
    """Judge parsed flags of vLLM. default: of a flag by its name."""
    if why := why_unmovable(args, ranks):
        return ServingVerdict("stays", why)
    try:
        refuse_conflicts(args, default)
    except ConfigError as error:
        return ServingVerdict("refused", str(error))
    return ServingVerdict("moves")


def why_unmovable(args: Namespace, ranks: int) -> str:
    """Why no request of such a server can move; empty: they can."""
    if args.enable_expert_parallel and ranks > 1:
        return (
            f"--enable-expert-parallel with --data-parallel-size {ranks}: ranks that share experts"
            " step together"
        )
    for name, why in _SPREAD:
        if (count := getattr(args, name)) > 1:
            return f"--{name.replace('_', '-')} {count}: {why}"
    connector = getattr(args.kv_transfer_config, "kv_connector", None)
    if connector not in (None, NATIVE) and not is_known(args.kv_transfer_config):
        return f"--kv-transfer-config with {connector}: {_HELD}"
    if args.kv_offloading_size is not None and args.kv_offloading_backend != "native":
        return f"--kv-offloading-backend {args.kv_offloading_backend}: {_HELD}"
    return ""


_HELD = "a KV connector that can't be informed of requests that move holds their blocks"


def with_file(words: Sequence[str]) -> list[str]:
    """The words with those of the file that --config names in its place, as vLLM reads it: before
    the other flags, which overrule them. Raises ConfigError."""
    if FILE not in words:
        return list(words)
    at = words.index(FILE)
    name = words[at + 1 : at + 2]
    if not name or FILE in words[at + 1 :]:
        raise ConfigError(f"{FILE} is given {words.count(FILE)} times, must name one file, once")
    with lacking_names_told(), unreadable_told():
        filed = make_parser().load_config_file(name[0])
    own = [*words[:at], *words[at + 2 :]]
    model = 0 if not own or own[0].startswith("-") else 1
    return [*own[:model], *filed, *own[model:]]
