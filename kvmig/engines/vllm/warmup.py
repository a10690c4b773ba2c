"""What an engine runs before clients' requests: a probe of its numerics, each sampling path once,
a step of nothing, and measurements of its step times, which are kept for the next start.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles

import msgspec
import torch
from vllm import SamplingParams, __version__
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

from kvmig.engines.base import StepTime
from kvmig.engines.vllm import runner
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.migration import token_request

log = logging.getLogger(__name__)

_SALT = "kvmig-warm-up"
"""A salt of its own: these blocks must serve as no client's prefix."""
_KINDS = (
    SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=1.0, top_p=0.9, top_k=5, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.7, repetition_penalty=1.1, ignore_eos=True),
)


_TOKEN = 1
_DRAFTED = tuple(
    # One token again and again: whatever is looked up is found, and drafts are taken.
    SamplingParams(max_tokens=8, ignore_eos=True, allowed_token_ids=[_TOKEN], **kind)
    for kind in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.0, "logprobs": 1})
)
"""Requests that warm up speculative decoding. The first draft compiles the drafter's and the
rejection sampler's kernels, which takes seconds and holds the interpreter: the instance would seem
to hang."""


PROBE_TOKENS = 48
"""Tokens of the probe's prompt."""
PROBE_ID = "kvmig-probe"


class OutputProbe:
    """Runs one fixed request by itself and notes the bits of its log-probabilities.

    Each is a sum over the whole vocabulary, so it depends on all that a prefill and some decodes
    compute. Engines whose other settings agree and whose probes agree round alike, with any
    version of vLLM drives the kernels. On a CPU, where a step's sums have one order; a GPU's
    kernels are chosen by more than what one probe shows.
    """

    def __init__(self, config: VllmConfig) -> None:
        self._bits = hashlib.blake2b(digest_size=6)
        vocabulary = config.model_config.get_vocab_size()
        length = max(1, min(PROBE_TOKENS, config.model_config.max_model_len // 2))
        # The warm-up's few tokens: any other may stand for an image, which isn't there.
        prompt = [min(1 + place * (place + 1) // 2 % 8, vocabulary - 1) for place in range(length)]
        # It is to compute its prompt, not to load what another engine has saved of it.
        params = SamplingParams(
            max_tokens=4,
            temperature=0.0,
            logprobs=5,
            ignore_eos=True,
            skip_reading_prefix_cache=None if config.kv_transfer_config is None else True,
        )
        self.request = token_request(PROBE_ID, prompt, params, _SALT)

    @staticmethod
    def possible(config: VllmConfig) -> bool:
        """Whether a probe shows how such an engine rounds."""
        return config.device_config.device_type == "cpu" and takes_own_requests(config)

    @staticmethod
    def repeatable(config: VllmConfig) -> bool:
        """Whether a probe may show that this engine still computes the same after a sleep."""
        return config.model_config.enable_sleep_mode and takes_own_requests(config)

    def add_output(self, output: EngineCoreOutput) -> None:
        """Note one step's output."""
        assert output.new_logprobs is not None
        for array in (output.new_logprobs.logprob_token_ids, output.new_logprobs.logprobs):
            self._bits.update(array.tobytes())

    def digest(self) -> str:
        """What was noted, in 12 hexadecimal digits."""
        return self._bits.hexdigest()


def takes_own_requests(config: VllmConfig) -> bool:
    """Whether an engine can run kvmig's own requests, which are tokens alone.

    A model that pools samples none. A decoder that reads what an encoder has made of a recording
    has nothing to read then. With vLLM 0.32 on a CPU what it computes of that also spoils the
    answer of the engine's next request, which is a client's.
    """
    model = config.model_config
    return model.runner_type != "pooling" and not model.is_encoder_decoder


def warm_up_requests(config: VllmConfig) -> list[EngineCoreRequest]:
    """One short request for each kind of sampling; none for a model that takes none."""
    if not takes_own_requests(config):
        return []
    prompt = [min(token, config.model_config.get_vocab_size() - 1) for token in range(1, 9)]
    requests = [
        token_request(f"kvmig-warm-up-{n}", prompt, one, _SALT) for n, one in enumerate(_KINDS)
    ]
    if config.speculative_config is not None:
        requests += [
            token_request(f"kvmig-warm-up-draft-{n}", [_TOKEN] * 16, one, _SALT)
            for n, one in enumerate(_DRAFTED)
        ]
    return requests


class WarmStep:
    """Runs a step of nothing, after which the next real one is as quick as those that follow.

    The first step of an idle engine on a CPU takes longer than the others: its weights' pages and
    its code have left the caches and the TLB while others ran. vLLM has a step of nothing for
    data-parallel engines (`execute_dummy_batch`); it writes no KV. It is for engines whose dummy
    step leaves no trace: with LoRA it would forget adapters, and a drafter's is not tried.
    """

    def __init__(self, core: StepCore) -> None:
        config = core.vllm_config
        self._core = core
        self._possible = (
            config.device_config.device_type == "cpu"
            and takes_own_requests(config)
            and config.lora_config is None
            and config.speculative_config is None
            and not runner.uses_v2(core)
        )

    def run(self) -> None:
        """Make an empty step, on the engine's thread between two steps; none if the engine has
        work."""
        scheduler = self._core.scheduler
        if self._possible and not scheduler.running and not scheduler.has_requests():
            self._core.execute_dummy_batch()


STEPS = 24
"""Steps at each size; the lower quartile counts: others use the machine, too."""
USUAL_TOKENS = 512
GROWTH = 160
"""Tokens that a sequence may grow by while its batch does."""
_ON_AND_ON = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
FILLED = 0.8
"""Share of the KV cache that is filled at most: nothing may be preempted."""


def sizes(capacity: int, most_sequences: int, longest: int) -> tuple[list[int], int]:
    """(sequences in the batch at each size, tokens of each).

    capacity: of the KV cache, in tokens; longest: that a sequence may have.

    Example: 20,000 tokens and at most 16 sequences: 1, 2, 4, 8 and 11 of 1,250 tokens.
    """
    tokens = max(USUAL_TOKENS, capacity // most_sequences)
    tokens = max(min(tokens, longest - 2 * GROWTH, capacity // 4), 1)
    most = max(min(int(capacity * FILLED) // (tokens + GROWTH), most_sequences), 1)
    doubling = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*doubling, most], tokens


class StepTimes:
    """Measures how long a decode step takes, by the tokens in the batch.

    A batch grows, request by request, and runs some steps at each size. Sequences have about 512
    tokens, as real ones do, or more where the batch could not fill the KV cache otherwise.
    `add_output` gets each step's outputs, on the event loop.
    `ended` is set when the largest batch has been measured, or from outside.
    """

    def __init__(
        self, config: VllmConfig, capacity: int, submit: Callable[[EngineCoreRequest], None]
    ) -> None:
        """capacity: of the KV cache, in tokens."""
        self.sizes, self.tokens = sizes(
            capacity, config.scheduler_config.max_num_seqs, config.model_config.max_model_len
        )
        self.started: list[str] = []
        self.found: list[StepTime] = []
        self.ended = asyncio.Event()
        self._vocabulary = config.model_config.get_vocab_size()
        self._submit = submit
        self._random = random.Random(1)  # noqa: S311
        self._outputs: Counter[str] = Counter()
        self._last = 0.0
        self._steps: list[float] = []
        self._grow()

    def add_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take one step's outputs."""
        if self.ended.is_set():
            return
        emitted = [one.request_id for one in outputs.outputs if one.new_token_ids]
        whole = len(emitted) == len(self.started)
        if whole and all(self._outputs[one] for one in emitted) and self._last:
            self._steps.append((outputs.timestamp - self._last) * 1e3)
        self._last = outputs.timestamp if whole else 0.0
        self._outputs.update(emitted)
        if len(self._steps) < STEPS:
            return
        tokens = len(self.started) * self.tokens + self._outputs.total()
        self.found.append(StepTime(tokens, quantiles(self._steps)[0]))
        self._steps.clear()
        self._last = 0.0
        if len(self.started) == self.sizes[-1]:
            self.ended.set()
        else:
            self._grow()

    def _grow(self) -> None:
        wanted = next(size for size in self.sizes if size > len(self.started))
        while len(self.started) < wanted:
            request_id = f"kvmig-step-times-{len(self.started)}"
            self.started.append(request_id)
            prompt = self._random.choices(range(self._vocabulary), k=self.tokens)
            self._submit(token_request(request_id, prompt, _ON_AND_ON, "kvmig-step-times"))


def profile_path(config: VllmConfig, capacity: int) -> Path:
    """The file with the step times of such an engine; `capacity`: of its KV cache, in tokens.

    It is in the user's cache folder (XDG_CACHE_HOME). A file that is removed is measured again.
    """
    what = (
        __version__,
        config.compute_hash(),
        str(Path(config.model_config.model).resolve()),
        current_platform.get_device_name(),
        torch.get_num_threads(),
        config.scheduler_config.max_num_seqs,
        config.model_config.max_model_len,
        capacity,
    )
    digest = hashlib.blake2b(msgspec.json.encode(what), digest_size=8).hexdigest()
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvmig" / "step_times" / f"{digest}.json"


def read_profile(path: Path) -> list[StepTime]:
    """Step times that were measured before; none if there is no file, or none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[StepTime])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("step times are measured again: %s: %s", path, error)
        return []


def write_profile(path: Path, times: Sequence[StepTime]) -> None:
    """Keep step times for the next start; without a writable folder they are measured again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(times))
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("step times can't be kept: %s: %s", path, error)
