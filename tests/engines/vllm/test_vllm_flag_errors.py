"""A value that one of vLLM's flags can't have: one line with field, value and what is allowed."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvmig.core.errors import ConfigError
from kvmig.engines.vllm import flags
from kvmig.engines.vllm.config import engine_config
from kvmig.engines.vllm.flags import make_parser
from kvmig.engines.vllm.verdict import judge_words
from kvmig.models import BUNDLED
from tests.support.environment import environment
from tests.support.vllm_side import ENVIRONMENT

pytestmark = pytest.mark.engine


def refusal(*given: str) -> str:
    """What is said of these flags."""
    with environment(ENVIRONMENT):
        flags.set_environment()
        try:
            engine_config(flags.parse([str(BUNDLED), *given]))
        except ConfigError as error:
            return str(error)
    raise AssertionError(f"{given} is taken")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ("--compilation-config", "{bad"),
            "--compilation-config is '{bad', must be JSON: key must be a string at .*",
        ),
        (
            ("--hf-overrides", "{bad}"),
            "--hf-overrides is '{bad}', must be JSON: Expecting property name .*",
        ),
        (
            ("--default-chat-template-kwargs", "{x\ny"),
            r"--default-chat-template-kwargs is '{x\\ny', must be JSON: .*",
        ),
        (
            ("--compilation-config.mode", "x"),
            "--compilation-config.mode is 'x': Invalid compilation mode: x. Valid modes are: .*",
        ),
        (
            ("--structured-outputs-config", '{"backend": "no"}'),
            "--structured-outputs-config.backend is 'no', must be 'auto', 'xgrammar', .*",
        ),
        (
            ("--eplb-config", '{"x": 1, "step_interval": "y"}'),
            "--eplb-config.step_interval is 'y', must be a valid integer, .*"
            "; --eplb-config.x is 1, must be a field of vLLM's EPLBConfig: .*, window_size",
        ),
        (("--pooler-config", "[1]"), "--pooler-config is .1., must be an object"),
        (
            ("--compilation-config", '{"cudagraph_mode": "no"}'),
            """--compilation-config is '{"cudagraph_mode": "no"}': KeyError 'NO'""",
        ),
        (("--max-model-len", "abc"), "--max-model-len is 'abc', must be a whole number"),
        (("--gpu-memory-utilization", "x"), "--gpu-memory-utilization is 'x', must be a number"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_in_one_line(
    given: tuple[str, ...], sentence: str
) -> None:
    assert re.fullmatch(sentence.replace("{", r"\{").replace("}", r"\}"), refusal(*given))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ("--speculative-config", '{"method": "no"}'),
            "--speculative-config.method is 'no', must be 'ngram', .*",
        ),
        (
            ("--diffusion-config", '{"x": 1}'),
            "--diffusion-config.x is 1, must be a field of vLLM's DiffusionConfig: .*",
        ),
        (
            ("--watermark-config", "{}"),
            "--watermark-config.key is missing, must be given",
        ),
        (("--block-size", "-3"), "--block-size is -3, must be greater than 0"),
    ],
)
def test_one_that_vllm_refuses_for_its_engine_is_refused_so_too(
    given: tuple[str, ...], sentence: str
) -> None:
    assert re.fullmatch(sentence.replace("{", r"\{").replace("}", r"\}"), refusal(*given))


def test_a_server_whose_requests_would_stay_has_its_flags_refused_so_too() -> None:
    words = (str(BUNDLED), "--kv-transfer-config", '{"kv_role": "no"}')
    with pytest.raises(ConfigError, match=r"^--kv-transfer-config\.kv_role is 'no', must be 'kv_"):
        judge_words(words, words, 1)


JSON_FLAGS = (
    "--additional-config", "--allowed-headers", "--allowed-methods", "--allowed-origins",
    "--default-chat-template-kwargs", "--default-mm-loras", "--diffusion-config", "--hf-overrides",
    "--limit-mm-per-prompt", "--lora-modules", "--media-io-kwargs", "--mm-processor-kwargs",
    "--model-loader-extra-config", "--override-generation-config", "--pt-load-map-location",
    "--speculative-config", "--watermark-config",
)  # fmt: skip
"""Flags whose JSON vLLM doesn't check while it parses."""


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    with environment(ENVIRONMENT):
        flags.set_environment()
        return make_parser()


def read_or_refused(parser: FlexibleArgumentParser, flag: str, given: str) -> Namespace | str:
    """The flags that are read, or the sentence that refuses them."""
    try:
        args: Namespace = parser.parse_args([str(BUNDLED), flag, given])
    except ConfigError as error:
        return str(error)
    return args


@pytest.mark.parametrize("given", ["[1]", "{bad", "{x\ny", "3", '"x"', ""])
@pytest.mark.parametrize("flag", JSON_FLAGS)
def test_a_flag_that_takes_json_refuses_all_else_in_one_line(
    parser: FlexibleArgumentParser, flag: str, given: str
) -> None:
    said = read_or_refused(parser, flag, given)
    assert isinstance(said, str)
    assert re.fullmatch(re.escape(f"{flag} is {given!r}, must be ") + ".+", said)


@pytest.mark.parametrize("flag", JSON_FLAGS)
def test_null_is_refused_so_or_stands_for_a_flag_that_is_not_given(
    parser: FlexibleArgumentParser, flag: str
) -> None:
    found = read_or_refused(parser, flag, "null")
    if isinstance(found, str):
        assert re.fullmatch(re.escape(f"{flag} is 'null', must be ") + ".+", found)
    else:
        dest = flag.removeprefix("--").replace("-", "_")
        assert getattr(found, dest) is None is parser.get_default(dest)


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("--lora-modules", "one=/folder"),
        ("--lora-modules", json.dumps({"name": "one", "path": "/folder"})),
        ("--allowed-origins", '["https://one.example"]'),
        ("--pt-load-map-location", "cpu"),
        ("--pt-load-map-location", '{"cuda:1": "cuda:0"}'),
        ("--speculative-config", '{"method": "ngram"}'),
        ("--hf-overrides", "{}"),
        ("--limit-mm-per-prompt", '{"image": 2}'),
    ],
)
def test_a_flag_that_takes_json_takes_what_vllm_does(
    parser: FlexibleArgumentParser, flag: str, given: str
) -> None:
    parser.parse_args([str(BUNDLED), flag, given])
