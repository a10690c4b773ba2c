"""The vLLM adapter: the only folder that knows vLLM's internals (see `kind.SUPPORTED`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmig.engines.vllm.embedded import EmbeddedVllm

_SMALL = (
    "--enforce-eager", "--block-size=32", "--max-model-len=1216", "--max-num-seqs=8",
    "--max-num-batched-tokens=128", "--num-gpu-blocks-override=64",
    "--kv-cache-memory-bytes=268435456",
)  # fmt: skip


def factory(*flags: str) -> EmbeddedVllm:
    """A new engine in this process; `flags`: MODEL and any of vLLM's, by default the bundled model.

    Raises ConfigError for flags that can't be used, StartupError for a version of vLLM that is
    not supported. vLLM's own errors pass through.
    """
    from kvmig.engines.vllm import flags as vllm_flags
    from kvmig.engines.vllm.kind import check_version

    check_version()
    vllm_flags.set_environment()  # vLLM reads it when it is imported
    from kvmig.engines.vllm.config import engine_config
    from kvmig.engines.vllm.embedded import EmbeddedVllm
    from kvmig.models import BUNDLED

    return EmbeddedVllm(engine_config(vllm_flags.parse(list(flags or (str(BUNDLED), *_SMALL)))))
