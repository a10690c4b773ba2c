"""What nvcc makes of csrc/*.cu: its targets, machine code, symbols; and when it is asked to."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import shutil
import stat
import sys
from pathlib import Path

import pytest

from kvmig.core.errors import KernelUnavailable
from kvmig.kernels import abi, build, cuda, nvrtc
from tests.support.driver_header import PRINTS, our_numbers
from tests.support.machine_code import Code, code_of, cuobjdump, output, registers_of

KERNELS = sorted([*nvrtc.GEOMETRY, "kvmig_copy_tma_kernel"])
VECTOR_KERNELS = ["kvmig_copy_kernel", "kvmig_copy_sum_kernel"]
TARGETS = pytest.mark.parametrize("target", build.CUDA_TARGETS)


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        build.nvcc()
    except KernelUnavailable as error:
        pytest.skip(str(error))
    return build.cached_library(build.cuda())


@pytest.fixture(scope="module")
def code(library: Path) -> Code:
    return code_of(library)


@TARGETS
def test_every_kernel_is_compiled_for_the_target(code: Code, target: str) -> None:
    assert sorted(name for where, name in code if where == target) == KERNELS


def test_gpus_to_come_get_ptx(library: Path) -> None:
    assert build.CUDA_TARGETS[-1] in output(cuobjdump(), "--list-ptx", str(library))


@TARGETS
def test_no_kernel_spills_registers(code: Code, target: str) -> None:
    local = {name: re.findall(r"\b(?:LDL|STL)\b", code[target, name]) for name in KERNELS}
    assert local == {name: [] for name in KERNELS}


def test_a_copy_fits_beside_an_engines_kernels(library: Path) -> None:
    """Of an SM's 64 K registers a CTA takes 27 K at most, that of the TMA 16 K; of its shared
    memory none, but for the ring of the TMA, which says itself how large it may be."""
    threads = number("copy.cuh", "kCopyThreads")
    most = dict.fromkeys(VECTOR_KERNELS, (27 << 10) // threads)
    most["kvmig_copy_tma_kernel"] = (16 << 10) // (
        32 * (1 + number("copy_tma.cuh", "kSummingWarps"))
    )
    found = registers_of(library)
    assert found.keys() >= most.keys()
    for name, at_most in most.items():
        registers, shared = found[name]
        assert registers <= at_most, name
        assert shared <= 1 << 10, name


def number(header: str, name: str) -> int:
    """A constant of csrc's."""
    found = re.search(rf"{name} = (\d+)", (build.CSRC / header).read_text())
    assert found is not None
    return int(found[1])


@TARGETS
@pytest.mark.parametrize("kernel", VECTOR_KERNELS)
def test_blocks_are_loaded_and_stored_by_128_bits(code: Code, target: str, kernel: str) -> None:
    assert re.search(r"\bLDG\.\S*\b128\b", code[target, kernel])
    assert re.search(r"\bSTG\.\S*\b128\b", code[target, kernel])


@TARGETS
def test_all_loads_of_a_piece_are_under_way_before_its_first_store(code: Code, target: str) -> None:
    text = code[target, "kvmig_copy_kernel"]
    wide = re.findall(r"\b(LDG|STG)\.\S*\b128\b", text)
    assert "LDG" * 8 in "".join(wide)


MOST_PER_VECTOR = {"kvmig_copy_kernel": 8, "kvmig_copy_sum_kernel": 58}
"""Instructions for 16 bytes of a whole piece, of which a lane has eight; docs/data-plane.md has the
figures."""


def instructions(code: str) -> list[tuple[int, str]]:
    """Addresses and instructions."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", code)
    return [(int(address, 16), text) for address, text in found]


@pytest.mark.parametrize("kernel", MOST_PER_VECTOR)
def test_a_whole_piece_takes_few_instructions(code: Code, kernel: str) -> None:
    """Straight ahead, from the first of its eight loads to the last of its eight stores."""
    text = instructions(code["sm_90", kernel])
    loads, stores = (
        [index for index, (_, one) in enumerate(text) if re.search(rf"\b{name}\.\S*128\b", one)]
        for name in ("LDG", "STG")
    )
    whole = text[loads[-8] : stores[-1] + 1]
    assert not [one for _, one in whole if re.search(r"\b(BRA|BSSY|ISETP)\b", one)]
    assert len(whole) / 8 <= MOST_PER_VECTOR[kernel]


def test_a_vector_in_the_ring_is_summed_in_few_instructions(code: Code) -> None:
    """The innermost loop over a stage, four vectors a turn."""
    text = instructions(code["sm_90", "kvmig_copy_tma_kernel"])
    loops = []
    for address, one in text:
        back = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", one)
        if back and int(back[1], 16) < address:
            body = [it for at, it in text if int(back[1], 16) <= at <= address]
            if sum("LDS.128" in it for it in body) == 4:
                loops.append(len(body) / 4)
    assert loops
    assert min(loops) <= 50


@pytest.mark.long
def test_the_ring_that_racecheck_understands_compiles(library: Path) -> None:
    from bench.gpu.sanitizer import plain_library

    assert abi.load(build.cached_library(plain_library()), "cuda").kvmig_backend() == b"cuda"


@pytest.mark.parametrize("target", build.CUDA_TARGETS[1:])
def test_the_tma_moves_by_bulk_copies_in_both_directions(code: Code, target: str) -> None:
    text = code[target, "kvmig_copy_tma_kernel"]
    assert "UBLKCP.S.G" in text
    assert "UBLKCP.G.S" in text


@pytest.mark.parametrize("target", build.CUDA_TARGETS[1:])
def test_what_the_tma_moves_is_evicted_first_from_the_l2(code: Code, target: str) -> None:
    """A13: a move would else push the engine's own data out of it."""
    moves = re.findall(r"UBLKCP\.[SG]\.[SG] .*", code[target, "kvmig_copy_tma_kernel"])
    assert moves
    assert all("desc[" in move for move in moves)


def test_the_library_exports_what_the_header_declares_and_nothing_else(library: Path) -> None:
    if not shutil.which("nm"):
        pytest.skip("nm is not installed")
    header = (build.CSRC / "kvmig.h").read_text()
    declared = set(re.findall(r"^(?:int|const char \*)\s*(kvmig_\w+)\(", header, re.MULTILINE))
    symbols = output("nm", "-D", "--defined-only", str(library)).splitlines()
    exported = {line.split()[2] for line in symbols if not line.split()[2].startswith("_Z")}
    assert exported == declared == {*abi.PROTOTYPES, "kvmig_abi_version", "kvmig_backend"}


def test_the_library_loads_where_no_gpu_is(library: Path) -> None:
    assert abi.load(library, "cuda").kvmig_backend() == b"cuda"


def test_it_is_not_taken_for_the_cpus(library: Path) -> None:
    with pytest.raises(KernelUnavailable, match="is for cuda, not for cpu"):
        abi.load(library, "cpu")


@pytest.fixture
def bare(library: Path, monkeypatch: pytest.MonkeyPatch) -> cuda.CudaLibrary:
    """The library's launches on a machine without a GPU."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    loaded = abi.load(library, "cuda")
    monkeypatch.setattr(cuda, "library", lambda: loaded)
    return cuda.CudaLibrary(loaded)


def test_calls_without_a_gpu_say_so(bare: cuda.CudaLibrary) -> None:
    for call in (bare.copy, bare.copy_tma):
        with pytest.raises(KernelUnavailable, match="no NVIDIA driver"):
            call(8, 8, 1, 8, 8, 1, 0, 0, 0)
    with pytest.raises(KernelUnavailable, match="no NVIDIA driver"):
        bare.checksum(8, 1, 8, 1, 8, 0, 0)


# -- the driver's declarations, which kvmig has written down once more


def test_structures_and_numbers_are_those_of_the_drivers_header(tmp_path: Path) -> None:
    header = Path("/usr/local/cuda/include/cuda.h")
    if not header.exists() or not shutil.which("g++"):
        pytest.skip("CUDA's headers or g++ are not installed")
    (tmp_path / "layout.cpp").write_text(PRINTS)
    command = ["g++", f"-I{header.parent}", str(tmp_path / "layout.cpp"), "-o", str(tmp_path / "a")]
    output(*command)
    assert list(map(int, output(str(tmp_path / "a")).split())) == our_numbers()


# -- when it is built


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)


def test_without_nvcc_the_places_are_named(no_nvcc: None) -> None:
    with pytest.raises(KernelUnavailable, match=r"no nvcc found \(looked in \$CUDA_HOME"):
        build.cuda().compiler()


@pytest.mark.parametrize(("value", "wanted"), [("0", False), ("", False)])
def test_an_installation_without_nvcc_builds_for_the_cpu_only(
    no_nvcc: None, monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool
) -> None:
    monkeypatch.setenv("KVMIG_CUDA", value)
    assert build.wants_cuda() is wanted


def test_an_installation_with_nvcc_builds_for_gpus_whether_one_is_there_or_not(
    old_nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVMIG_CUDA", raising=False)
    assert build.wants_cuda()


def test_an_installation_that_must_have_cuda_fails_without_nvcc(
    no_nvcc: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMIG_CUDA", "1")
    with pytest.raises(KernelUnavailable, match="no nvcc found"):
        build.wants_cuda()


def test_another_word_for_whether_to_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMIG_CUDA", "yes")
    with pytest.raises(KernelUnavailable, match="KVMIG_CUDA=yes is neither 0 nor 1"):
        build.wants_cuda()


@pytest.fixture
def old_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc that knows no target after sm_90."""
    path = tmp_path / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\necho sm_75; echo sm_80; echo sm_90\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return path


def test_an_older_nvcc_compiles_for_the_targets_that_it_knows(old_nvcc: Path) -> None:
    command = build.cuda_compiler()
    assert command[0] == str(old_nvcc)
    assert [word for word in command if "gencode" in word] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]


def test_another_set_of_targets_is_another_library(old_nvcc: Path) -> None:
    recipe = build.cuda()
    command = recipe.compiler()
    assert recipe.fingerprint(command) != recipe.fingerprint(command[:-1])


# -- NVRTC


def test_nvrtc_gets_the_kernels_without_any_other_header() -> None:
    """NVRTC has none of the host's, but for what kvmig.h keeps from it."""
    waiting, seen = list(nvrtc.HEADERS), set[str]()
    while waiting:
        name = waiting.pop()
        text = (build.CSRC / name).read_text()
        if name not in seen and name != "kvmig.h":
            assert "#include <" not in text, name
            waiting += re.findall(r'#include "(.+)"', text)
        seen.add(name)
    defined = "".join((build.CSRC / name).read_text() for name in seen)
    assert [name for name in nvrtc.GEOMETRY if f"{name}(" not in defined] == []


class Nvrtc:
    """NVRTC's own library, where one is installed. CuPy would need a GPU to call it."""

    def __init__(self) -> None:
        folders = [Path(folder, "nvidia") for folder in sys.path if folder]
        packaged = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
        name = str(packaged[0]) if packaged else ctypes.util.find_library("nvrtc")
        if name is None:
            pytest.skip("NVRTC is not installed")
        self._library = ctypes.CDLL(name)

    def compile(self, source: str, options: tuple[str, ...]) -> str:
        """What it says; empty if it compiled without a warning."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        library, words = self._library, [option.encode() for option in options]
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
        )
        library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        library.nvrtcDestroyProgram(ctypes.byref(program))
        return log.value.decode()


@TARGETS
def test_nvrtc_compiles_the_kernels(target: str) -> None:
    options = (*nvrtc.options(), f"--gpu-architecture={target}")
    assert Nvrtc().compile(nvrtc.source(), options) == ""


def test_nvrtc_launches_as_the_library_does() -> None:
    assert {*nvrtc.constants()} == {"CopyThreads", "CopyCtasPerSm"}


def test_a_changed_header_is_another_source_for_cupys_cache() -> None:
    head, *includes = nvrtc.source().splitlines()
    assert re.fullmatch(r"// [0-9a-f]{16}", head)
    assert includes == [f'#include "{name}"' for name in nvrtc.HEADERS]
