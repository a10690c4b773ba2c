"""What an engine has compiled of a grammar serves requests of its salt only."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_outlines import OutlinesBackend

from kvmig.engines.vllm import flags
from kvmig.engines.vllm.config import engine_config
from kvmig.engines.vllm.grammar_caches import SALTS, SaltedGrammars, apart, empty_compiler
from kvmig.models import BUNDLED
from tests.environment import environment
from tests.vllm_side import ENVIRONMENT

pytestmark = pytest.mark.engine

SCHEMA = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}})


@pytest.fixture(scope="module")
def grammars() -> SaltedGrammars:
    with environment(ENVIRONMENT):
        flags.set_environment()
        return SaltedGrammars(engine_config(flags.parse([str(BUNDLED), "--enforce-eager"])))


def compile_for(grammars: SaltedGrammars, salt: str | None, schema: str = SCHEMA) -> None:
    wanted = StructuredOutputsParams(json=schema)
    wanted._backend = "xgrammar"
    params = SamplingParams(structured_outputs=wanted)
    request = Request("r", [1], params, None, cache_salt=salt)
    grammars.grammar_init(request)
    guided: Any = request.structured_output_request
    guided._grammar.result(60)


def kept(grammars: SaltedGrammars, salt: str | None) -> int:
    """Bytes of a salt's compiled grammars."""
    backend: Any = grammars.backend_of(salt)
    size: int = backend.compiler.get_cache_size_bytes()
    return size


def test_a_grammar_is_kept_for_its_salt_only(grammars: SaltedGrammars) -> None:
    compile_for(grammars, "anna")
    before = kept(grammars, "anna")
    assert before > 0
    assert kept(grammars, "bea") == 0
    compile_for(grammars, "anna")
    assert kept(grammars, "anna") == before
    compile_for(grammars, None, '{"type": "integer"}')
    assert kept(grammars, "bea") == 0


def test_grammars_of_the_salt_that_was_used_longest_ago_are_dropped_first(
    grammars: SaltedGrammars,
) -> None:
    for number in range(SALTS):
        compile_for(grammars, f"salt {number}")
    compile_for(grammars, "salt 0")
    compile_for(grammars, "one more")
    assert kept(grammars, "salt 0") > 0
    assert kept(grammars, "salt 1") == 0


def test_regular_expressions_of_outlines_are_kept_by_salt_too() -> None:
    backend: Any = OutlinesBackend.__new__(OutlinesBackend)  # its package isn't here
    backend.cache = {"regex": object()}
    found: Any = apart(backend)
    assert dict(found.cache) == {}
    assert backend.cache


def test_every_compiler_of_a_backend_is_a_salts_own(grammars: SaltedGrammars) -> None:
    """vLLM 0.33 has a second one, for structural tags."""
    compile_for(grammars, "anna")
    shared: Any = copy.copy(grammars.backend)
    shared.full_vocab_compiler = shared.compiler
    shared.other_compiler = empty_compiler(shared.compiler)
    found: Any = apart(shared)
    assert found.compiler is found.full_vocab_compiler
    every = {id(found.compiler), id(found.other_compiler), id(shared.compiler)}
    assert len(every | {id(shared.other_compiler)}) == 4
