"""What runs in vLLM's worker processes, sent there by `collective_rpc`: the KV cache, what model
runner V1 remembers of requests, repairs of vLLM 0.32, and the process's end.

Each function gets vLLM's worker first. With one worker it is this process's own. All workers
remember the same, since each of them samples.
"""

from __future__ import annotations

import atexit
import copy
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from kvmig.core.errors import KvmigError, UnsupportedLayout
from kvmig.engines.vllm.subblocks import BlockPage, LayerCache, RankCache, merged
from kvmig.kernels import ipc
from kvmig.kernels.driver import CudaDriver


def attempt(worker: Any, function: Callable[..., object], *args: object) -> object:
    """What `function` returns, or the KvmigError that it raises: vLLM brings only the words of what
    another process has raised."""
    try:
        return function(worker, *args)
    except KvmigError as error:
        return error


def ask_for_tiles(worker: Any) -> None:
    """Let this process use AMX where the CPU has it. Attention uses its tiles without asking Linux
    for them, and oneDNN asks at the first large product of matrices; a worker whose first step
    decodes, or embeds a few tokens, would be killed by SIGILL (plain vLLM's are)."""
    torch.cpu._init_amx()


def compute_on(worker: Any, stream: torch.cuda.Stream) -> None:
    """Let model runner V2 know the stream that its steps are on from now on: it keeps the first,
    copies its outputs once that one is done, and makes it the thread's own afterwards."""
    if hasattr(type(worker.model_runner), "main_stream"):
        worker.model_runner.main_stream = stream


def describe_cache(worker: Any, layer_names: Sequence[str]) -> RankCache:
    """The parts of this worker's KV cache in memory; layers that share memory only once."""
    layers: dict[int, LayerCache] = {}
    for _, layer in _layers(worker, layer_names):
        cache = layer.kv_cache
        if not isinstance(cache, torch.Tensor) or cache.dim() != 4:
            continue
        size = cache.element_size()
        layers.setdefault(
            cache.data_ptr(),
            LayerCache(
                address=cache.data_ptr(),
                shape=tuple(cache.shape),
                strides=tuple(stride * size for stride in cache.stride()),
                itemsize=size,
                dtype=str(cache.dtype),
                attention=str(getattr(layer, "isa", "")),
            ),
        )
    storage = _storage(worker, layer_names)
    pages = _pages(worker.model_runner.kv_cache_config)
    return RankCache(storage.data_ptr(), storage.nbytes(), pages, tuple(layers.values()))


def _pages(config: KVCacheConfig) -> tuple[BlockPage, ...]:
    """The pages of a block of any group. Raises UnsupportedLayout."""
    specs: dict[str, KVCacheSpec] = {}
    for group in config.kv_cache_groups:
        whole = group.kv_cache_spec
        uniform = isinstance(whole, UniformTypeKVCacheSpecs)
        specs |= whole.kv_cache_specs if uniform else dict.fromkeys(group.layer_names, whole)
    pages = []
    for tensor in config.kv_cache_tensors:
        if tensor.host_resident:
            raise UnsupportedLayout("part of the KV cache lies in the host's memory")
        for number, name in enumerate(tensor.layers):
            offset = tensor.offset + number * tensor.layer_stride
            pages.append(BlockPage(offset, tensor.block_stride, specs[name].page_size_bytes))
    return merged(pages, config.num_blocks)


def export_cache(worker: Any, layer_names: Sequence[str]) -> tuple[RankCache, ipc.SharedAllocation]:
    """The place of this worker's KV cache on its GPU, and what another process needs to open it.

    It stays where it is: CUDA graphs hold its address. Raises KernelUnavailable.
    """
    cache, gpu = describe_cache(worker, layer_names), CudaDriver(worker.device.index)
    gpu.settle()  # nobody waits for this process's streams later: what fills the cache is there
    return cache, ipc.export_allocation(gpu, cache.address)


def share_cache(worker: Any, layer_names: Sequence[str], paths: Sequence[str]) -> RankCache:
    """Move this worker's KV cache, still unused, into the file `paths[rank]`; describe it there.

    Raises OSError if there isn't as much memory, and what `move_cache` raises.
    """

    def mapped(nbytes: int) -> torch.UntypedStorage:
        path = paths[worker.rank]
        with Path(path).open("r+b") as file:
            # Takes the memory now: otherwise a lack of it is a SIGBUS in a step.
            os.posix_fallocate(file.fileno(), 0, nbytes)
        new = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
        assert isinstance(new, torch.UntypedStorage)
        return new

    return move_cache(worker, layer_names, mapped)


def move_cache(
    worker: Any, layer_names: Sequence[str], make: Callable[[int], torch.UntypedStorage]
) -> RankCache:
    """Give the cache up and have one of as many bytes in what `make` makes; describe it there.

    Raises UnsupportedLayout if anything else in the worker holds the old one.
    """
    old = _storage(worker, layer_names)
    nbytes = old.nbytes()
    layers, held = _layers(worker, layer_names), worker.model_runner.kv_caches
    caches = [*(layer.kv_cache for _, layer in layers), *held]
    views = {id(view): view for cache in caches for view in _tensors(cache)}
    old.resize_(0)  # first: there may be no room for both
    new = make(nbytes)
    moved = {key: _on(new, view) for key, view in views.items()}
    for _, layer in layers:
        layer.kv_cache = _replaced(layer.kv_cache, moved)
    held[:] = [_replaced(one, moved) for one in held]
    views.clear()
    caches.clear()
    left = sum(
        type(one) is torch.Tensor and one.untyped_storage()._cdata == old._cdata
        for one in gc.get_objects()
    )
    if left:
        raise UnsupportedLayout(f"{left} tensors of the worker still use the KV cache's old memory")
    return describe_cache(worker, layer_names)


def _layers(worker: Any, layer_names: Sequence[str]) -> list[tuple[str, Any]]:
    context = worker.vllm_config.compilation_config.static_forward_context
    return [(name, context[name]) for name in layer_names]


def _storage(worker: Any, layer_names: Sequence[str]) -> torch.UntypedStorage:
    """The one allocation that all layers are views of."""
    storages = [
        view.untyped_storage()
        for _, layer in _layers(worker, layer_names)
        for view in _tensors(layer.kv_cache)
    ]
    if len({storage.data_ptr() for storage in storages}) != 1:
        raise UnsupportedLayout("the KV cache lies in several allocations")
    return storages[0]


def _tensors(cache: Any) -> list[torch.Tensor]:
    """The tensors of one layer: one, or one for each part of a state."""
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def _replaced(cache: Any, by_id: dict[int, torch.Tensor]) -> Any:
    if isinstance(cache, torch.Tensor):
        return by_id[id(cache)]
    return type(cache)(by_id[id(view)] for view in cache)


def _on(storage: torch.UntypedStorage, view: torch.Tensor) -> torch.Tensor:
    """The same view of other memory."""
    whole = torch.empty(0, dtype=view.dtype)
    return whole.set_(storage, view.storage_offset(), view.size(), view.stride())


def generator_state(worker: Any, request_id: str) -> bytes | None:
    """State of the request's seeded generator, None if it has none."""
    state = worker.model_runner.requests.get(request_id)
    if state is None or state.generator is None:
        return None
    return bytes(state.generator.get_state().numpy().tobytes())


def register(worker: Any, request: CachedRequestState, generator: bytes | None) -> None:
    """Know the request as if it had run here all along."""
    runner = worker.model_runner
    # Its row from an earlier stay here would be taken for the current one.
    if request.req_id in runner.input_batch.req_id_to_index:
        with torch.inference_mode():  # as in a step: some of its tensors were made in one
            runner.input_batch.remove_request(request.req_id)
    runner.mamba_state_idx.pop(request.req_id, None)  # the place of its state then
    if runner.uses_mrope:
        runner._init_mrope_positions(request)
    request.generator = _generator(runner.device, request, generator)
    runner.requests[request.req_id] = request


def register_v2(worker: Any, request: NewRequestData) -> None:
    """The same for model runner V2, which takes it with its next step (`take_with_steps`)."""
    worker.kvmig_arrived[request.req_id] = request


def take_with_steps(worker: Any) -> None:
    """Let model runner V2 take requests that come from elsewhere with those of its next step.

    It launches kernels for that, which read from buffers of the host what they are to write. There
    are as many buffers as steps may be on their way, and each time that it takes requests fills the
    next. Between two steps a commit's kernels would wait for the step that runs, and a third commit
    would fill the buffer that the first one's kernels have yet to read (vLLM 0.32): the first
    request would go on from the tokens of the one that had its row before.
    """
    v2: Any = worker.model_runner
    arrived: dict[str, NewRequestData] = {}
    add_requests = v2.add_requests

    def add_all(step: SchedulerOutput) -> None:
        ended = step.finished_req_ids | (step.preempted_req_ids or set())
        came = [one for one in arrived.values() if one.req_id not in ended]
        arrived.clear()
        both = copy.copy(step)
        both.scheduled_new_reqs = [*came, *step.scheduled_new_reqs]
        add_requests(both)

    v2.add_requests = add_all
    worker.kvmig_arrived = arrived


# Repairs of vLLM's own bugs. Each looks first whether it is still needed.


def keep_cpu_generators_from_chunks(worker: Any) -> None:
    """Let a seeded request's prompt be computed in chunks on a CPU.

    After a chunk vLLM throws the sampled token away and winds the generator back by its
    offset, which generators of a CPU don't have: the engine dies of it (0.32). Here such
    rows are sampled without their generator, so that there is nothing to wind back.
    """
    runner = worker.model_runner
    if runner.device.type != "cpu" or has_offset(torch.Generator("cpu")):
        return
    sample_tokens = runner.sample_tokens

    def sample(*args: Any, **options: Any) -> Any:
        batch = runner.input_batch
        thrown_away = numpy.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
        kept = {
            row: batch.generators.pop(row)
            for row in map(int, thrown_away)
            if row in batch.generators
        }
        try:
            return sample_tokens(*args, **options)
        finally:
            batch.generators.update(kept)

    runner.sample_tokens = sample


def has_offset(generator: torch.Generator) -> bool:
    """Whether torch lets a generator's offset be set."""
    try:
        generator.set_offset(generator.get_offset())
    except RuntimeError:
        return False
    return True


def forget_states_of_the_ended(worker: Any) -> None:
    """Let a request's id come again where its request ended, or left, before.

    vLLM (0.32) remembers in which block a request's state is until a later step computes
    something. If the same id comes before that, as of a request that is run again, it takes
    the first one's block for the new one's, and the engine dies of it.
    """
    runner = worker.model_runner
    on_removed = runner._on_request_state_removed
    runner.mamba_state_idx[_PROBE] = 0
    on_removed(_PROBE, None)
    if runner.mamba_state_idx.pop(_PROBE, None) is None:
        return

    def removed(request_id: str, state: CachedRequestState | None) -> None:
        on_removed(request_id, state)
        runner.mamba_state_idx.pop(request_id, None)

    runner._on_request_state_removed = removed


_PROBE = "kvmig-probe"


def _generator(
    device: torch.device, request: CachedRequestState, state: bytes | None
) -> torch.Generator | None:
    params = request.sampling_params
    if params is None or params.seed is None:
        return None
    generator = torch.Generator(device=device)
    generator.manual_seed(params.seed)
    if state is not None:
        generator.set_state(torch.from_numpy(numpy.frombuffer(state, dtype=numpy.uint8).copy()))
    return generator


def repeat_for_drafts(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    _most_tokens: int | None = None,
) -> None:
    """`values` [requests] into `output` [drafts], each as often as its request has drafts.

    cu_num_tokens: drafts up to and with each request [requests]. A value that is `replace_from`
    becomes `replace_to`. Example: [5, 7] and [2, 3] make [5, 5, 7].
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(counts))


def repair_drafts_on_a_cpu(worker: Any) -> None:
    """Let drafts be sampled with their requests' parameters.

    vLLM 0.32's stand-in for the kernel that repeats each request's sampling parameters for its
    drafts writes to a copy of its output, unless that is of 64-bit integers. Temperatures and
    top-k are what the memory held before: requests that sample get other tokens than they should,
    and a top-k that can't be ends the engine.
    """
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.sample import rejection_sampler

    kernel = rejection_sampler.expand_kernel
    on_cpu = worker.model_runner.device.type == "cpu" and isinstance(kernel, KernelOverride)
    if on_cpu and not repeats(kernel[(2,)]):
        kernel._impl = repeat_for_drafts
        constrain = rejection_sampler.apply_sampling_constraints

        def constrain_some(logits: torch.Tensor, *args: Any) -> torch.Tensor:
            # A top-k of no drafts at all ends the engine, too.
            return constrain(logits, *args) if len(logits) else logits

        rejection_sampler.apply_sampling_constraints = constrain_some


def repeats(repeat: Callable[..., object]) -> bool:
    """Whether a stand-in for the kernel does what `repeat_for_drafts` does, on three numbers."""
    output, values = torch.zeros(3), torch.tensor([5.0, 7.0])
    repeat(output, values, torch.tensor([2, 3], dtype=torch.int32), -1, -1, 3)
    return bool(output.tolist() == [5.0, 5.0, 7.0])


def end_at_once(worker: Any) -> None:
    """Once vLLM has shut this worker down, end the process without the interpreter's own end.

    That only tears down torch and Triton, which takes seconds. What it would have removed from
    shared memory is removed by `StepCore.shutdown`.
    """
    atexit.register(os._exit, 0)


def renew_tied_heads(worker: Any) -> None:
    """Let an output head that is tied to the embeddings have what these have loaded in place.

    A CPU computes with a packed copy of its weights, which vLLM's `reload_weights` leaves as it is.
    """
    if not current_platform.is_cpu():
        return
    for layer in worker.model_runner.get_model().modules():
        if isinstance(layer, ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
