"""What an engine has compiled of a grammar serves requests of its salt only."""

from __future__ import annotations

import copy
import ctypes
import json
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_outlines import OutlinesBackend
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from kvmig.engines.vllm import flags
from kvmig.engines.vllm.config import engine_config
from kvmig.engines.vllm.grammar_caches import SALTS, SaltedGrammars, apart, empty_compiler
from kvmig.engines.vllm.grammars import TimedGrammar
from kvmig.models import BUNDLED
from tests.support.environment import environment
from tests.support.vllm_side import ENVIRONMENT

pytestmark = pytest.mark.engine

SCHEMA = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}})


@pytest.fixture(scope="module")
def grammars() -> SaltedGrammars:
    with environment(ENVIRONMENT):
        flags.set_environment()
        return SaltedGrammars(engine_config(flags.parse([str(BUNDLED), "--enforce-eager"])))


def compile_for(
    grammars: SaltedGrammars, salt: str | None, schema: str = SCHEMA, kind: str = "xgrammar"
) -> Any:
    wanted = StructuredOutputsParams(json=schema)
    wanted._backend = kind
    params = SamplingParams(structured_outputs=wanted)
    request = Request("r", [1], params, None, cache_salt=salt)
    grammars.grammar_init(request)
    guided: Any = request.structured_output_request
    return guided._grammar.result(60)


def begins(grammars: SaltedGrammars) -> list[int]:
    """Tokens that an object begins with."""
    tokens: list[int] = grammars.tokenizer.encode("{", add_special_tokens=False)
    return tokens


def kept(grammars: SaltedGrammars, salt: str | None) -> int:
    """Bytes of a salt's compiled grammars."""
    backend: Any = grammars.backend_of("xgrammar", salt)
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


def test_a_salts_grammars_are_kept_up_to_its_part_of_the_bytes(
    grammars: SaltedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an engine keeps some VLLM_XGRAMMAR_CACHE_MB of all salts, and no more."""
    part = 1 << 19
    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", str(SALTS // 2))
    sizes, before, added = list[int](), 0, 0
    for number in range(60):
        fields = {f"p{number}_{one}": {"type": "string", "maxLength": 9} for one in range(20)}
        compile_for(grammars, "greedy", json.dumps({"type": "object", "properties": fields}))
        sizes.append(size := kept(grammars, "greedy"))
        added, before = added + max(0, size - before), size
    assert max(sizes) <= part + sizes[0]  # xgrammar takes a grammar in before it drops others
    assert added > part


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


@pytest.mark.parametrize("first", ["guidance", "xgrammar"])
def test_each_grammar_is_compiled_by_the_backend_that_it_was_checked_for(first: str) -> None:
    with environment(ENVIRONMENT):
        own = SaltedGrammars(engine_config(flags.parse([str(BUNDLED), "--enforce-eager"])))
    kinds = {"guidance": GuidanceGrammar, "xgrammar": XgrammarGrammar}
    for kind in (first, *kinds):
        assert type(compile_for(own, "anna", kind=kind)) is kinds[kind]
    own.clear_backend()


def test_a_schema_that_llguidance_gives_up_says_why(grammars: SaltedGrammars) -> None:
    """Its parser holds 2000 rules at once. vLLM answers with "Internal server error"."""
    wide = {f"p{one}": {"type": "string"} for one in range(4000)}
    schema = json.dumps({"type": "object", "properties": wide})
    grammar = TimedGrammar(compile_for(grammars, "anna", schema, "guidance"))
    assert grammars.backend is not None
    mask = grammars.backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    assert not grammar.accept_tokens("r", begins(grammars))
    assert "max is 2000" in grammar.failure


def test_a_grammar_of_llguidance_is_compiled_once_and_used_by_each_request_itself(
    grammars: SaltedGrammars,
) -> None:
    one, other = (compile_for(grammars, "anna", SCHEMA, "guidance") for _ in range(2))
    assert one.accept_tokens("r", begins(grammars))
    assert other.accept_tokens("r", begins(grammars))
    own: Any = grammars.backend_of("guidance", "anna")
    assert [key[1] for key in own._grammars].count(SCHEMA) == 1
    other_salts: Any = grammars.backend_of("guidance", "bea")
    assert not other_salts._grammars


class Heap(ctypes.Structure):
    """What glibc's mallinfo2 says."""

    _fields_ = [(one, ctypes.c_size_t) for one in (
        "arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks", "used", "free",
        "keepcost",
    )]  # fmt: skip


def bytes_in_use() -> int:
    """Of the C library's heap, of this process."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Heap
    said = library.mallinfo2()
    return int(said.used + said.mapped)


def test_what_compilers_keep_beyond_their_count_is_bounded_too(
    grammars: SaltedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schemas of a user who always sends another one."""
    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", str(2 * SALTS))
    taken = list[int]()
    for number in range(40):
        fields = {
            f"p{one}": {"type": "number", "minimum": -1234567.123, "maximum": 987654321.321}
            for one in range(50)
        }
        fields[f"own{number}"] = {"type": "string", "maxLength": 5 + number}
        compile_for(grammars, "inventive", json.dumps({"type": "object", "properties": fields}))
        taken.append(bytes_in_use())
    assert max(taken[20:]) - max(taken[:20]) < 2 << 20
