"""Compiled grammars, which are kept for each salt by itself.

xgrammar and outlines keep what they have compiled. A large schema that was there before begins
hundreds of times sooner, so whoever sends it would see that somebody has: as with the blocks of a
prompt. A request without a salt meets those of all others without one.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from cachetools import LRUCache
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

if TYPE_CHECKING:
    from xgrammar import GrammarCompiler

SALTS = 32
"""Whose grammars are kept at once; they share as much memory as those without a salt have."""
THREADS = 8
"""That compile a grammar, as in vLLM."""
INDEXES = 8
"""Regular expressions of a salt that outlines keeps."""


class SaltedGrammars(StructuredOutputManager):
    """vLLM's, with a backend for each salt, that shares all but what was compiled."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._lock = threading.Lock()
        self._backends: OrderedDict[str, StructuredOutputBackend] = OrderedDict()
        """By salt, the one that was used last at the end."""

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        salted = copy.copy(self)
        salted.backend = self.backend_of(request.cache_salt)
        grammar: StructuredOutputGrammar = super(SaltedGrammars, salted)._create_grammar(request)
        return grammar

    def backend_of(self, salt: str | None) -> StructuredOutputBackend:
        """The backend of a salt's grammars. Of any thread, once there is a backend."""
        assert self.backend is not None
        if not salt:
            return self.backend
        with self._lock:
            found = self._backends.pop(salt, None) or apart(self.backend)
            self._backends[salt] = found
            if len(self._backends) > SALTS:
                self._backends.popitem(last=False)
        return found


def apart(backend: StructuredOutputBackend) -> StructuredOutputBackend:
    """The backend with nothing compiled yet; itself if it keeps nothing, as llguidance's does."""
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
        cache_limit_bytes=envs.VLLM_XGRAMMAR_CACHE_MB * 2**20 // SALTS,
    )
