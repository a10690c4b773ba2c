from __future__ import annotations

import logging
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmig.ground.errors import KernelUnavailable
from kvmig.ground.layout import KVLayout, Region, fused
from kvmig.kernels import build, copy, native, reference
from kvmig.kernels.copy import Backend, address_of, checksum_fused, copy_blocks

POISON = 0xA5
ROOT = Path(__file__).parents[1]


@dataclass
class Cache:
    """An engine's memory: random blocks, and poison between and around them."""

    memory: NDArray[np.uint8]
    layout: KVLayout

    def block(self, number: int) -> bytes:
        """One block, fused."""
        start = self.memory.ctypes.data
        runs = ((r.base - start + number * r.block_stride, r.run) for r in self.layout.regions)
        return b"".join(self.memory[at : at + run].tobytes() for at, run in runs)


def make_cache(seed: int, runs: list[int], gaps: list[int], blocks: int) -> Cache:
    """One region a run; a gap after each block, and before each region."""
    size = sum(gap + blocks * (run + gap) for run, gap in zip(runs, gaps, strict=True))
    memory = np.full(size + 1, POISON, np.uint8)
    random = np.random.default_rng(seed)
    regions: list[Region] = []
    offset = 0
    for run, gap in zip(runs, gaps, strict=True):
        offset += gap
        regions.append(Region(memory.ctypes.data + offset, run + gap, run))
        for _ in range(blocks):
            memory[offset : offset + run] = random.integers(0, 256, run, np.uint8)
            offset += run + gap
    return Cache(memory, KVLayout(tuple(regions), blocks, 16))


@st.composite
def caches(draw: st.DrawFn) -> tuple[Cache, Cache, list[int], list[int]]:
    """Two caches of the same runs, ids in the first, and as many different ones in the second."""
    runs = draw(st.lists(st.integers(1, 70) | st.sampled_from([4096, 8191, 20000]), max_size=4))
    sizes = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    gaps = st.lists(st.integers(0, 17), min_size=len(runs), max_size=len(runs))
    seeds = st.integers(0, 1 << 30)
    source, target = (make_cache(draw(seeds), runs, draw(gaps), size) for size in sizes)
    target_ids = draw(st.lists(st.integers(0, sizes[1] - 1), unique=True))
    source_ids = [draw(st.integers(0, sizes[0] - 1)) for _ in target_ids]
    return source, target, source_ids, target_ids


@pytest.fixture(params=["native", "numpy"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    chosen: Backend = native.load() if request.param == "native" else reference
    monkeypatch.setattr(copy, "backend", lambda: chosen)
    return chosen


@pytest.fixture
def pair() -> tuple[Cache, Cache]:
    return make_cache(1, [24, 8], [0, 8], 4), make_cache(2, [24, 8], [8, 0], 4)


def move(source: Cache, target: Cache, source_ids: list[int], target_ids: list[int]) -> list[int]:
    regions = source.layout.regions, target.layout.regions
    blocks = source.layout.num_blocks, target.layout.num_blocks
    return copy_blocks(*regions, source_ids, target_ids, *blocks)


@given(caches())
def test_gather_then_scatter_is_identity_and_touches_nothing_else(
    case: tuple[Cache, Cache, list[int], list[int]],
) -> None:
    source, target, source_ids, target_ids = case
    source_before, expected = source.memory.copy(), target.memory.copy()
    n = len(source_ids)
    guard = 64
    buffer = bytearray([POISON]) * (n * source.layout.block_bytes + 2 * guard)
    staged = fused(address_of(buffer) + guard, source.layout)

    places = list(range(n))
    gathered = copy_blocks(
        source.layout.regions, staged, source_ids, places, source.layout.num_blocks, n
    )
    inner = bytes(buffer[guard:-guard])
    assert inner == b"".join(source.block(number) for number in source_ids)
    assert buffer[:guard] == buffer[-guard:] == bytearray([POISON]) * guard

    scattered = copy_blocks(
        staged, target.layout.regions, places, target_ids, n, target.layout.num_blocks
    )
    assert scattered == gathered
    start = target.memory.ctypes.data
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        taken = 0
        for region in target.layout.regions:
            at = region.base - start + target_id * region.block_stride
            run = source.block(source_id)[taken : taken + region.run]
            expected[at : at + region.run] = np.frombuffer(run, np.uint8)
            taken += region.run
    assert np.array_equal(target.memory, expected)
    assert np.array_equal(source.memory, source_before)


@given(caches())
def test_native_equals_the_reference_bit_for_bit(
    case: tuple[Cache, Cache, list[int], list[int]],
) -> None:
    source, target, source_ids, target_ids = case
    ids = np.array(source_ids, np.int64), np.array(target_ids, np.int64)
    regions = source.layout.regions, target.layout.regions
    before = target.memory.copy()
    sums = reference.copy(*regions, *ids, checksums=True)
    expected = target.memory.copy()
    target.memory[:] = before
    library = native.load()
    assert library.copy(*regions, *ids, checksums=True) == sums
    assert np.array_equal(target.memory, expected)
    assert library.checksum(regions[0], ids[0]) == sums


@given(st.binary(min_size=1, max_size=200), st.integers(0), st.integers(1, 255))
def test_a_flipped_byte_changes_the_checksum(data: bytes, place: int, flip: int) -> None:
    flipped = bytearray(data)
    flipped[place % len(data)] ^= flip
    assert checksum_fused(flipped, len(data)) != checksum_fused(data, len(data))


def test_words_that_change_places_change_the_checksum() -> None:
    first, second = b"wordone.", b"wordtwo."
    assert checksum_fused(first + second, 16) != checksum_fused(second + first, 16)


def test_the_checksum_is_the_one_of_the_header(backend: Backend) -> None:
    """Worked by hand for the words 1 and 0x0203, so that no other build may differ."""

    def mix64(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    words = ((1 + golden) % 2**64, (0x0203 + 2 * golden) % 2**64)
    data = (1).to_bytes(8, "little") + bytes([3, 2])
    assert checksum_fused(data, 10) == [sum(map(mix64, words)) % 2**64]


def test_checksums_of_a_copy_are_those_of_the_fused_buffer(
    backend: Backend, pair: tuple[Cache, Cache]
) -> None:
    source, target = pair
    sums = move(source, target, [3, 0], [1, 2])
    assert sums == checksum_fused(source.block(3) + source.block(0), 32)
    assert [target.block(1), target.block(2)] == [source.block(3), source.block(0)]


def test_a_copy_without_checksums_returns_none_and_copies(
    backend: Backend, pair: tuple[Cache, Cache]
) -> None:
    source, target = pair
    regions = source.layout.regions, target.layout.regions
    assert copy_blocks(*regions, [2], [0], 4, 4, checksums=False) == []
    assert target.block(0) == source.block(2)


def test_no_blocks_and_no_regions_are_fine(backend: Backend, pair: tuple[Cache, Cache]) -> None:
    assert move(*pair, [], []) == []
    assert copy_blocks([], [], [0, 1], [1, 0], 2, 2) == [0, 0]
    assert checksum_fused(b"", 8) == []


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "message"),
    [
        ([0, 4], [0, 1], r"source block 4 is outside 0..3"),
        ([0, -1], [0, 1], r"source block -1 is outside"),
        ([0, 1], [0, 4], r"destination block 4 is outside 0..3"),
        ([0, 1], [0], r"2 source ids, but 1 destination ids"),
        ([0, 1], [2, 2], r"destination block is named twice"),
    ],
)
def test_ids_that_do_not_fit_are_refused_before_anything_is_written(
    pair: tuple[Cache, Cache], source_ids: list[int], target_ids: list[int], message: str
) -> None:
    source, target = pair
    before = target.memory.copy()
    with pytest.raises(ValueError, match=message):
        move(source, target, source_ids, target_ids)
    assert np.array_equal(target.memory, before)


def test_regions_that_differ_are_refused(pair: tuple[Cache, Cache]) -> None:
    other = make_cache(3, [24, 9], [0, 0], 4)
    for target in (other.layout.regions, pair[1].layout.regions[:1]):
        with pytest.raises(ValueError, match="number or runs"):
            copy_blocks(pair[0].layout.regions, target, [0], [0], 4, 4)


@pytest.mark.parametrize("block_bytes", [0, 7])
def test_a_buffer_of_no_whole_blocks_is_refused(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="no whole number of blocks"):
        checksum_fused(bytes(16), block_bytes)


def test_a_read_only_view_can_be_read() -> None:
    view = memoryview(b"12345678").toreadonly()
    assert checksum_fused(view, 8) == checksum_fused(bytearray(view), 8)


def test_the_library_refuses_runs_that_differ_even_without_our_checks(
    pair: tuple[Cache, Cache],
) -> None:
    source, target = pair[0].layout.regions, pair[1].layout.regions
    zero = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="refused"):
        native.load().copy(source, target[::-1], zero, zero, checksums=True)


# -- building and loading


@pytest.fixture
def uninstalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No packaged library, and an empty cache of this test's own."""
    monkeypatch.setattr(native, "PACKAGED", tmp_path / "none.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy.backend.cache_clear()
    yield tmp_path / "cache" / "kvmig"
    copy.backend.cache_clear()


def test_the_versions_of_header_and_loader_agree() -> None:
    header = (ROOT / "csrc" / "kvmig_copy.h").read_text()
    (version,) = re.findall(r"#define KVMIG_ABI_VERSION (\d+)", header)
    assert int(version) == native.ABI_VERSION


def test_a_missing_library_is_built_once_into_the_users_cache(uninstalled: Path) -> None:
    native.load()
    (library,) = uninstalled.glob("*.so")
    assert stat.S_IMODE(uninstalled.stat().st_mode) == 0o700
    built = library.stat().st_mtime_ns
    native.load()
    assert library.stat().st_mtime_ns == built
    assert {path.name for path in uninstalled.iterdir()} == {library.name, "lock"}


@pytest.mark.parametrize("tool", ["ninja", None])
def test_it_is_built_with_and_without_ninja(
    uninstalled: Path, monkeypatch: pytest.MonkeyPatch, tool: str | None
) -> None:
    found = shutil.which
    if tool and not found(tool):
        pytest.skip("ninja is not installed")
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "ninja" else found(name))
    if tool:
        monkeypatch.setattr(shutil, "which", found)
    native.load()


def test_a_library_of_another_version_is_not_used(
    uninstalled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PACKAGED", build.cached_library())
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    with pytest.raises(KernelUnavailable, match=r"has ABI version 1, not 2"):
        native.load()


def test_a_damaged_library_is_built_anew(
    uninstalled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(native, "PACKAGED", damaged)
    native.load()
    assert list(uninstalled.glob("*.so"))


def test_without_a_compiler_numpy_does_it_and_one_warning_says_so(
    uninstalled: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pair: tuple[Cache, Cache],
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(uninstalled))
    source, target = pair
    for _ in range(2):
        move(source, target, [0], [0])
    assert target.block(0) == source.block(0)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["no C++ compiler" in record.getMessage() for record in warnings] == [True]


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    uninstalled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("#error no luck today\n")
    monkeypatch.setattr(build, "SOURCES", (broken,))
    with pytest.raises(KernelUnavailable, match="no luck today"):
        native.load()
    assert [path.name for path in uninstalled.iterdir()] == ["lock"]


def test_a_build_that_somebody_else_keeps_locked_is_given_up(
    uninstalled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "TIMEOUT_S", 0.1)
    lock = build.cache_folder() / "lock"
    with build.lock(lock), pytest.raises(KernelUnavailable, match="locked by another build"):
        native.load()


def test_a_cache_that_others_may_write_is_refused(uninstalled: Path) -> None:
    uninstalled.mkdir(parents=True)
    uninstalled.chmod(0o777)
    with pytest.raises(KernelUnavailable, match="writable by nobody else"):
        native.load()


def test_the_library_is_clean_under_the_sanitizers(tmp_path: Path) -> None:
    """A small C++ driver: odd sizes at the very ends of heap blocks."""
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    flags = ["-std=c++17", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    empty = tmp_path / "empty.cpp"
    empty.write_text("int main() {}\n")
    probe = ["g++", *flags, str(empty), "-o", str(tmp_path / "probe")]
    if subprocess.run(probe, check=False, capture_output=True, timeout=60).returncode:
        pytest.skip("g++ has no sanitizer runtime here")
    driver = ROOT / "tests" / "native" / "copy_driver.cpp"
    program = str(tmp_path / "driver")
    sources = [str(driver), *map(str, build.SOURCES)]
    subprocess.run(
        ["g++", *flags, f"-I{build.CSRC}", *sources, "-o", program], check=True, timeout=120
    )
    done = subprocess.run([program], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
