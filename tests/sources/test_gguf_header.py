"""Sizes of GGUF models by their headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.fleet.gguf_sizes import gguf_sizes
from kvmig.sources.gguf_header import (
    MOST_BYTES,
    HeaderCut,
    NoHeader,
    parse_header,
    read_header,
    sizes_of,
)
from tests.support.gguf_files import LLAMA, gguf_file


def sizes(values: dict[str, Any], weights: int = 4096) -> Any:
    data = gguf_file(values, weights)
    return sizes_of(parse_header(data, len(data)))


def test_weights_are_the_rest_of_the_file_and_a_token_is_that_of_grouped_heads() -> None:
    found = sizes(LLAMA, 8192)
    assert found.weights == found.files == 8192
    assert found.tokens == 8192
    assert found.token == 16 * 8 * (64 + 64) * 2
    assert found.request == 8192 * found.token


@pytest.mark.parametrize(
    ("more", "token"),
    [
        ({"llama.attention.key_length": 128}, 16 * 8 * (128 + 64) * 2),
        ({"llama.attention.head_count_kv": [8] * 15 + [0]}, 15 * 8 * 128 * 2),
        ({"llama.attention.head_count_kv": [8] * 3}, 0),
        ({"llama.attention.sliding_window": 512}, 0),
        ({"llama.attention.kv_lora_rank": 512}, 0),
        ({"llama.ssm.state_size": 16}, 0),
        ({"general.architecture": "unknown"}, 0),
    ],
)
def test_a_token_is_known_where_it_follows_from_the_header(
    more: dict[str, Any], token: int
) -> None:
    assert sizes({**LLAMA, **more}).token == token


def test_without_grouped_heads_each_head_keeps_its_own() -> None:
    plain = {name: value for name, value in LLAMA.items() if not name.endswith("_kv")}
    assert sizes(plain).token == 16 * 32 * 128 * 2


def test_a_long_header_is_read_as_far_as_it_goes() -> None:
    words = [f"word {at}" for at in range(150_000)]
    data = gguf_file({"tokenizer.ggml.tokens": words, **LLAMA}, 40_000_000)
    asked: list[tuple[int, int]] = []

    def read(begin: int, count: int) -> bytes:
        asked.append((begin, count))
        return data[begin : begin + count]

    header, head = read_header(read, len(data))
    assert header.weights == 40_000_000 // 256 * 256
    assert sum(count for _, count in asked) == len(head) <= 4 << 20
    assert header.number("block_count") == 16


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"PK\3\4" + bytes(100), "it is no GGUF file"),
        (b"GGUF\1\0\0\0" + bytes(100), "it is GGUF of version 1, must be 2 or 3"),
        (b"GGUF\3\0\0\0" + b"\xff" * 100, "its header counts 18446744073709551615 things"),
        (b"GGUF", "its header takes more than 4 bytes"),
        (gguf_file(LLAMA)[:200], "its header takes more than 200 bytes"),
    ],
)
def test_what_is_no_header_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(NoHeader, match=said):
        read_header(lambda begin, count: data[begin : begin + count], len(data))


def test_a_header_that_does_not_end_is_read_to_a_bound() -> None:
    begin = gguf_file({"a": "b"}, tensors=0)[:24] + (1 << 62).to_bytes(8, "little")
    with pytest.raises(NoHeader):
        read_header(lambda at, count: (begin + bytes(count))[:count], MOST_BYTES * 100)


@given(st.binary(max_size=300), st.integers(0, 150))
def test_no_bytes_break_the_reader(data: bytes, at: int) -> None:
    whole = gguf_file(LLAMA, 256)
    for text in (b"GGUF" + data, whole[:at] + data + whole[at + len(data) :]):
        try:
            sizes_of(parse_header(text, len(text)))
        except (HeaderCut, NoHeader):
            continue


def test_a_folder_with_one_gguf_file_is_measured_by_it(tmp_path: Path) -> None:
    assert gguf_sizes(str(tmp_path)) is None
    (tmp_path / "model.gguf").write_bytes(gguf_file(LLAMA, 8192))
    found = gguf_sizes(str(tmp_path))
    assert found is not None
    assert found.weights == 8192
    (tmp_path / "other.gguf").write_bytes(b"")
    assert gguf_sizes(str(tmp_path)) is None
