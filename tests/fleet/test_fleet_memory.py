"""What a model takes of a host's memory, by its files and flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmig.core.devices import DeviceInventory, DeviceRecord
from kvmig.core.errors import ConfigError
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.device_watch import DeviceWatch
from kvmig.fleet.host_memory import LEAST_REST, MemoryBudget
from kvmig.fleet.model_folders import ModelFolders
from kvmig.fleet.model_shapes import tokenizer_of
from kvmig.fleet.spec import InstanceCounts, ModelSpec
from kvmig.fleet.step_memory import ENTRY, MERGE
from kvmig.launcher.environment import CPU_KV_MOST, INSTANCE_OVERHEAD

WEIGHTS = 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(WEIGHTS))
    return tmp_path


def spec(folder: Path, **more: Any) -> ModelSpec:
    return ModelSpec(name="a", source=f"path:{folder}", **more)


def on_gpu(number: int = 1) -> DeviceBudget:
    """Of a host with so many GPUs, which reach each other."""
    names = [f"GPU-{at}" for at in range(number)]
    gpus = tuple(
        DeviceRecord(
            id=str(at),
            index=at,
            uuid=name,
            name="H100",
            total=80 << 30,
            peers=tuple(other for other in names if other != name),
        )
        for at, name in enumerate(names)
    )
    watch = DeviceWatch(read=lambda: DeviceInventory(devices=gpus))
    watch.read_sample()
    return DeviceBudget(watch)


@pytest.mark.parametrize(
    ("flags", "kv"),
    [
        ((), CPU_KV_MOST),
        (("--kv-cache-memory-bytes=77",), 77),
        (("--kv-cache-memory-bytes", "77"), 77),
        (("--kv-cache-memory-bytes=64M",), 64 << 20),
        (("--kv-cache-memory-bytes",), CPU_KV_MOST),
    ],
)
def test_on_a_cpu_it_is_processes_weights_and_kv_cache(
    folder: Path, flags: tuple[str, ...], kv: int
) -> None:
    model = spec(folder, flags=flags)
    assert MemoryBudget().claim(model) == INSTANCE_OVERHEAD + WEIGHTS + kv
    assert MemoryBudget().parked(model) == INSTANCE_OVERHEAD + WEIGHTS


def test_what_the_first_start_took_counts_for_it_and_for_models_alike(folder: Path) -> None:
    flags = ("--enforce-eager", "--kv-cache-memory-bytes=77")
    model, budget = spec(folder, flags=flags), MemoryBudget()
    assert budget.rest(model) == (INSTANCE_OVERHEAD, "assumed")
    assert budget.measure(model, WEIGHTS + 500, at=0)
    assert not budget.measure(model, WEIGHTS + 400, at=9), "the most counts"
    assert budget.claim(model) == WEIGHTS + 500 + 77
    alike = msgspec.structs.replace(model, name="b", flags=("--kv-cache-memory-bytes=9",))
    assert budget.claim(alike) == WEIGHTS + 500 + 9
    assert budget.rest(alike)[1] == "measured on 1970-01-01 with a"
    three = spec(folder, flags=(*flags, "--tensor-parallel-size=2"))
    assert budget.claim(three) == WEIGHTS + 3 * 500 + 2 * 77


def test_weights_count_as_the_engine_holds_them(folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [250], "data_offsets": [0, WEIGHTS]}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(WEIGHTS)
    (folder / "model.safetensors").write_bytes(data)
    kept = spec(folder, flags=("--dtype=float32",))
    assert MemoryBudget().weights(spec(folder)) == WEIGHTS // 2
    assert MemoryBudget().weights(kept) == WEIGHTS


def test_each_worker_has_its_own_process_and_cache(folder: Path) -> None:
    model = spec(folder, flags=("--tensor-parallel-size=2", "--kv-cache-memory-bytes=77"))
    assert MemoryBudget().claim(model) == 3 * INSTANCE_OVERHEAD + WEIGHTS + 2 * 77


def test_on_a_gpu_only_processes_are_the_hosts(folder: Path) -> None:
    assert MemoryBudget(devices=on_gpu()).claim(spec(folder)) == INSTANCE_OVERHEAD


def test_what_the_specification_says_counts(folder: Path) -> None:
    assert MemoryBudget().claim(spec(folder, memory=5)) == 5
    assert MemoryBudget().parked(spec(folder, memory=5)) == 5
    flags = ("--kv-cache-memory-bytes=2",)
    assert MemoryBudget().parked(spec(folder, memory=5, flags=flags)) == 3


def test_models_may_take_what_was_allowed_and_no_more_than_there_is() -> None:
    total = MemoryBudget().host().total
    assert MemoryBudget(1000).host().total == 1000
    assert MemoryBudget(2 * total).host().total == total
    assert 0 < MemoryBudget().host().available <= total


def test_one_whose_least_number_can_never_fit_is_refused_by_its_missing_bytes(
    folder: Path,
) -> None:
    MemoryBudget(10).check(spec(folder, memory=5, instances=InstanceCounts(min=2, max=2)))
    with pytest.raises(ConfigError, match="needs 12 bytes of memory, 2 more than the 10 that all"):
        MemoryBudget(10).check(spec(folder, memory=6, instances=InstanceCounts(min=2, max=2)))


def test_parked_on_a_gpu_its_weights_are_in_the_hosts_memory(folder: Path) -> None:
    budget, model = MemoryBudget(devices=on_gpu()), spec(folder, warm="parked")
    budget.check(model)
    assert budget.parked(model) == INSTANCE_OVERHEAD + WEIGHTS
    assert budget.parked(spec(folder, memory=5)) == 5 + WEIGHTS


def test_what_can_not_be_parked_on_a_gpu_is_refused_at_the_door(folder: Path) -> None:
    several = spec(folder, warm="parked", flags=("--tensor-parallel-size=2",), gpu_memory=1)
    budget = MemoryBudget(devices=on_gpu(2))
    with pytest.raises(ConfigError, match="none or always with 2 GPUs for an instance"):
        budget.check(several)
    little = MemoryBudget(INSTANCE_OVERHEAD + WEIGHTS - 1, on_gpu())
    little.check(spec(folder))
    with pytest.raises(
        ConfigError, match=r"keeps its weights in the host's memory, .* 1 more than"
    ):
        little.check(spec(folder, warm="parked"))


# -- the largest step

LLAMA = {"vocab_size": 2048, "hidden_size": 256, "num_attention_heads": 8, "architectures": ["L"]}
EAGER = ("--enforce-eager", "--kv-cache-memory-bytes=77")


@pytest.fixture
def llama(folder: Path) -> Path:
    """The same folder with a configuration."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_the_largest_step_is_added_by_the_configuration_and_flags(llama: Path) -> None:
    budget = MemoryBudget()
    small, large = (
        spec(llama, flags=(*EAGER, f"--max-num-batched-tokens={tokens}")) for tokens in (512, 4096)
    )
    assert 0 < budget.step(small) < budget.step(large)
    assert budget.rest(small) == (LEAST_REST, "assumed")
    assert budget.claim(large) == LEAST_REST + WEIGHTS + 77 + budget.step(large)
    assert budget.rest_of_worker(large)[0] == LEAST_REST + budget.step(large)


def test_what_was_measured_is_taken_without_the_step_and_never_as_less_than_any_takes(
    llama: Path,
) -> None:
    budget, model = MemoryBudget(), spec(llama, flags=EAGER)
    step = budget.step(model)
    assert budget.measure(model, WEIGHTS + 500, at=0), "it has computed no large step yet"
    assert budget.claim(model) == LEAST_REST + WEIGHTS + 77 + step
    assert budget.measure(model, WEIGHTS + step + LEAST_REST + 5, at=0)
    assert budget.claim(model) == LEAST_REST + 5 + WEIGHTS + 77 + step
    more = spec(llama, flags=(*EAGER, "--max-num-batched-tokens=4096"))
    assert budget.claim(more) == LEAST_REST + 5 + WEIGHTS + 77 + budget.step(more)


def test_compiled_models_are_assumed_to_take_more(llama: Path) -> None:
    budget = MemoryBudget()
    assert budget.rest(spec(llama, flags=EAGER[1:])) == (INSTANCE_OVERHEAD, "assumed")


def test_encoders_of_media_are_assumed_to_take_more_unless_no_media_are_taken(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"text_config": LLAMA, "vision_config": {}}))
    none = '--limit-mm-per-prompt={"image": 0, "video":0}'
    for flags, rest in ((EAGER, INSTANCE_OVERHEAD), ((*EAGER, none), LEAST_REST)):
        assert MemoryBudget().rest(spec(folder, flags=flags)) == (rest, "assumed")


def test_a_specification_with_its_own_memory_and_other_engines_have_no_step(llama: Path) -> None:
    budget = MemoryBudget()
    assert budget.step(spec(llama, memory=1 << 30)) == 0
    assert budget.step(spec(llama, engine="transformers")) == 0


def test_a_tokenizer_counts_by_its_entries_and_merges_once_for_all_workers(llama: Path) -> None:
    budget, flags = MemoryBudget(), (*EAGER, "--tensor-parallel-size=2")
    without = budget.claim(spec(llama, flags=flags))
    assert budget.tokenizer(spec(llama, flags=flags)) == 0
    other = llama / "other"
    other.mkdir()
    for one in ("config.json", "model.safetensors"):
        (other / one).write_bytes((llama / one).read_bytes())
    words = {"vocab": {str(one): one for one in range(1000)}, "merges": [["a", "b"]] * 10}
    (other / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": words}))
    model = spec(other, flags=flags)
    assert budget.claim(model) - without == 1000 * ENTRY + 10 * MERGE
    assert budget.measure(model, without + budget.tokenizer(model) - 2 * 77, at=0)
    assert budget.claim(model) - without == 1000 * ENTRY + 10 * MERGE


@pytest.mark.parametrize("text", ["", "{}", '{"model": 1}', '{"model": {"vocab": 1}}', "\xff"])
def test_a_tokenizer_that_cannot_be_read_counts_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text.encode("latin-1"))
    assert tokenizer_of(ModelFolders().read_folder(str(tmp_path))) == 0


def test_a_file_that_was_half_written_or_is_replaced_counts_as_it_is_now(llama: Path) -> None:
    """Reads are remembered by what changes of a file with its content; failures never are."""
    config, tokenizer = llama / "config.json", llama / "tokenizer.json"
    whole, budget, model = config.read_text(), MemoryBudget(), spec(llama, flags=EAGER)
    config.write_text(whole[:20])
    tokenizer.write_text('{"model": {"vocab": {"a"')
    assert (budget.step(model), budget.tokenizer(model)) == (0, 0)
    config.write_text(whole)
    tokenizer.write_text('{"model": {"vocab": {"a": 0}}}')
    step = budget.step(model)
    assert step > 0
    assert budget.tokenizer(model) == ENTRY
    config.write_text(json.dumps({**LLAMA, "vocab_size": 4096}))
    tokenizer.write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    assert budget.step(model) > step
    assert budget.tokenizer(model) == 2 * ENTRY
    config.unlink()
    assert budget.step(model) == 0
