"""Backends of grammars, one for each kind, and what they compile, kept for each salt by itself.

The check of a call's grammar chooses its backend. vLLM's engine makes the one that the first
grammar needs, and gives it all others, too: what was checked for xgrammar may be too much for
llguidance, and xgrammar leaves out what was checked for llguidance. So the first client would
decide for the others.

xgrammar and outlines keep what they have compiled. A large schema that was there before begins
hundreds of times sooner, so its sender would see that another user has sent it: as with the blocks
of a prompt. A request without a salt meets those of all others without one.

A compiler of xgrammar keeps more than it counts, and the more grammars it has compiled, the more:
3.5 MB with each two schemas of 4 and 28 kB. Only its end frees that. So each one ends once it has
compiled as many bytes as may be kept.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from cachetools import LRUCache
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar

if TYPE_CHECKING:
    from xgrammar import GrammarCompiler

SALTS = 32
"""Salts whose grammars are kept at once; they share as much memory as those without a salt."""
THREADS = 8
"""Threads that compile a grammar, as in vLLM."""
MATCHERS = 2
"""Grammars of a salt that are kept for llguidance."""
INDEXES = 8
"""Regular expressions of a salt that outlines keeps."""
UNCOUNTED = 2
"""Bytes that a compiler takes at most for each byte of what it has compiled, roughly."""

SaltKey = tuple[str, str]
"""A kind and a salt."""


@dataclass
class CompiledGrammars:
    """The grammars that one compiler has compiled."""

    seen: set[bytes] = field(default_factory=set)
    """Digests of the grammars, which it compiles once."""
    size: int = 0
    """Bytes, as xgrammar counts them."""

    def add(self, digest: bytes, size: int) -> None:
        """Count a grammar, unless the compiler had it already."""
        if digest not in self.seen:
            self.seen.add(digest)
            self.size += size


class SaltedGrammars(StructuredOutputManager):
    """vLLM's, with a backend for each kind and salt; those of a kind share all but what they have
    compiled."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.backend: StructuredOutputBackend | None
        self._lock = threading.RLock()
        self._kinds: dict[str, StructuredOutputBackend] = {}
        self._backends: OrderedDict[SaltKey, StructuredOutputBackend] = OrderedDict()
        """Compilers by kind and salt, the one that was used last at the end."""
        self._compiled: dict[SaltKey, CompiledGrammars] = {}
        """The grammars that each has compiled."""

    def grammar_init(self, request: Request) -> None:
        if request.structured_output_request is None:
            return
        kind = kind_of(request)
        with self._lock:  # until its backend is noted, it does not compile
            making = copy.copy(self)
            making.backend = self._kinds.get(kind)
            super(SaltedGrammars, making).grammar_init(request)
            if kind not in self._kinds:
                self.backend = self.backend or making.backend
                self._kinds[kind] = fitting(making.backend, self.backend)

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        salted = copy.copy(self)
        salted.backend = self.backend_of(kind_of(request), request.cache_salt)
        grammar: StructuredOutputGrammar = super(SaltedGrammars, salted)._create_grammar(request)
        if isinstance(grammar, XgrammarGrammar):
            self._count_compiled(request, salted.backend, compiled_bytes(grammar))
        return grammar

    def clear_backend(self) -> None:
        super().clear_backend()
        with self._lock:
            self._kinds.clear()
            self._backends.clear()
            self._compiled.clear()

    def backend_of(self, kind: str, salt: str | None) -> StructuredOutputBackend:
        """The backend of a salt's grammars. Of any thread, once there is one of the kind."""
        with self._lock:
            key = (kind, salt or "")
            found = self._backends.pop(key, None) or apart(self._kinds[kind])
            self._backends[key] = found
            if len(self._backends) > SALTS:
                self._drop(next(iter(self._backends)))
        return found

    def _count_compiled(self, request: Request, backend: object, size: int) -> None:
        """End compilers that have compiled too much: the salt's, or those used longest ago."""
        guided = request.structured_output_request
        assert guided is not None
        kind, grammar = guided.structured_output_key
        digest = blake2b(grammar.encode(errors="surrogatepass"), key=kind.name.encode()).digest()
        key, most = (kind_of(request), request.cache_salt or ""), cache_bytes()
        with self._lock:
            if self._backends.get(key) is not backend:
                return  # it has been dropped meanwhile
            compiled = self._compiled.setdefault(key, CompiledGrammars())
            compiled.add(digest, size)
            if compiled.size > most // SALTS:
                self._drop(key)
            while sum(one.size for one in self._compiled.values()) > most // UNCOUNTED:
                self._drop(next(one for one in self._backends if one in self._compiled))

    def _drop(self, key: SaltKey) -> None:
        """Keep nothing of a salt's any more; what is compiled there now goes on."""
        self._backends.pop(key, None)
        self._compiled.pop(key, None)


def kind_of(request: Request) -> str:
    """The name of the backend that the request's grammar was checked for."""
    assert request.sampling_params is not None
    wanted = request.sampling_params.structured_outputs
    assert wanted is not None
    return str(wanted._backend)


def fitting(
    backend: StructuredOutputBackend, first: StructuredOutputBackend
) -> StructuredOutputBackend:
    """The backend, or the first one if its masks are of another width: a step's are of one."""
    widths = {one.allocate_token_bitmask(1).shape[1] for one in (backend, first)}
    return backend if len(widths) == 1 else first


class KeptMatchers(StructuredOutputBackend):
    """llguidance's, which keeps nothing itself: each request gets a copy of what was compiled.

    vLLM's keeps what it compiles in itself while it does: two threads would mix up their grammars.
    """

    def __init__(self, backend: GuidanceBackend) -> None:
        super().__init__(backend.vllm_config, backend.tokenizer, backend.vocab_size)
        self.backend = backend
        self._lock = threading.Lock()
        self._grammars: LRUCache[tuple[StructuredOutputOptions, str], GuidanceGrammar] = LRUCache(
            MATCHERS
        )

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        stop_token_ids: set[int] | None = None,
    ) -> StructuredOutputGrammar:
        key = (request_type, grammar_spec)
        with self._lock:
            known = self._grammars.get(key)
        if known is None:
            known = copy.copy(self.backend).compile_grammar(
                request_type, grammar_spec, stop_token_ids
            )
        with self._lock:
            self._grammars[key] = known
            matcher = known.ll_matcher.deep_copy()
        return GuidanceGrammar(matcher, known.ll_tokenizer, known.vocab_size)

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return self.backend.allocate_token_bitmask(max_num_seqs)

    def destroy(self) -> None:
        self.backend.destroy()


def apart(backend: StructuredOutputBackend) -> StructuredOutputBackend:
    """The backend with nothing compiled yet; itself if it keeps nothing."""
    if isinstance(backend, GuidanceBackend):
        return KeptMatchers(backend)
    if isinstance(backend, XgrammarBackend):
        import xgrammar

        found = copy.copy(backend)
        own: dict[int, xgrammar.GrammarCompiler] = {}
        for name, value in vars(backend).items():  # with 0.33 there are two, or one by two names
            if isinstance(value, xgrammar.GrammarCompiler):
                setattr(found, name, own.setdefault(id(value), empty_compiler(value)))
        return found
    if hasattr(backend, "cache"):  # outlines: of regular expressions, in memory or on a disk
        found = copy.copy(backend)
        found.cache = LRUCache(maxsize=INDEXES)
        return found
    return backend


def empty_compiler(compiler: GrammarCompiler) -> GrammarCompiler:
    """A compiler for the same tokens, with nothing compiled yet."""
    import xgrammar

    return xgrammar.GrammarCompiler(
        compiler.compile_regex("a").tokenizer_info,  # it says it nowhere else
        max_threads=THREADS,
        cache_enabled=True,
        cache_limit_bytes=cache_bytes() // SALTS,
    )


def compiled_bytes(grammar: XgrammarGrammar) -> int:
    """Bytes of what was compiled, as xgrammar counts them."""
    return int(grammar.ctx.memory_size_bytes)


def cache_bytes() -> int:
    """Bytes that compiled grammars may take, of all salts together."""
    return int(envs.VLLM_XGRAMMAR_CACHE_MB) << 20
