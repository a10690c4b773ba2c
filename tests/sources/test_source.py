"""Sources: what is read of a line, and the one sentence for each mistake."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.sources.source import ModelSource, parse_source


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:Qwen/Qwen3-0.6B", ModelSource("hf", "Qwen/Qwen3-0.6B")),
        ("hf:gpt2", ModelSource("hf", "gpt2")),
        ("hf:a/b@refs/pr/1", ModelSource("hf", "a/b", "refs/pr/1")),
        ("modelscope:a/b@v1", ModelSource("modelscope", "a/b", "v1")),
        ("s3://bucket/models/qwen", ModelSource("s3", "bucket/models/qwen/")),
        ("https://example.com/qwen/", ModelSource("https", "https://example.com/qwen/")),
        ("http://127.0.0.1:9/qwen/", ModelSource("https", "http://127.0.0.1:9/qwen/")),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", ModelSource("hf", "Qwen/Qwen3-0.6B")),
        ("https://hf.co/a/b/tree/v2", ModelSource("hf", "a/b", "v2")),
        ("path:/models/qwen", ModelSource("path", "/models/qwen")),
    ],
)
def test_a_source_is_read_and_printed_as_it_is_meant(text: str, expected: ModelSource) -> None:
    assert parse_source(text) == expected
    assert parse_source(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Qwen/Qwen3-0.6B", "must be hf:ORG/NAME[@REVISION], modelscope:"),
        ("ftp://a/b", "must be hf:ORG/NAME"),
        ("hf:", "must be hf:ORG/NAME or hf:ORG/NAME@REVISION"),
        ("hf:a/b/c", "must be hf:ORG/NAME or hf:ORG/NAME@REVISION"),
        ("hf:../b", "must be hf:ORG/NAME"),
        ("hf:a/b@", "must have a branch, a tag or a commit after @"),
        ("hf:a/b@../c", "must have a branch, a tag or a commit after @"),
        ("modelscope:b", "must be modelscope:ORG/NAME"),
        ("s3:bucket/a", "must be s3://BUCKET/FOLDER/"),
        ("s3://bucket", "must be s3://BUCKET/FOLDER/"),
        ("s3://bucket/../x", "must be s3://BUCKET/FOLDER/"),
        ("https://example.com", "must be https://HOST/FOLDER/"),
        ("https://example.com:x/a", "must be https://HOST/FOLDER/: Port could not be cast"),
        ("http://example.com/a/", "must be https: without TLS a model can be changed on"),
        ("https://hf.co/a/b/blob/main/x", "must be a model's page"),
        ("path:", "must be path:FOLDER"),
    ],
)
def test_a_wrong_source_is_refused_with_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_source(text)
    assert str(refused.value).startswith(f"source is {text!r}, ")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "text", ["https://me:secret@example.com/a/", "https://example.com/a/?signature=secret"]
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="without a user, a password, a query") as refused:
        parse_source(text)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3://key:secret@bucket/folder", "ftp://me:secret@example.com/a/",
        "HTTPS://secret@example.com/a/", "hf:https://me:secret@huggingface.co/a/b",
        "https://me:secret@[::1/a", "git+https://secret@example.com/a?token=secret",
    ],
)  # fmt: skip
def test_what_is_no_source_is_refused_without_the_secret_in_it(text: str) -> None:
    with pytest.raises(ConfigError, match="source is") as refused:
        parse_source(text)
    assert "secret" not in str(refused.value)


@given(st.text(max_size=60) | st.builds("hf:{}".format, st.text(max_size=40)))
def test_whatever_is_given_is_refused_or_prints_as_what_it_is(text: str) -> None:
    try:
        found = parse_source(text)
    except ConfigError:
        return
    assert parse_source(str(found)) == found
