"""Answers that are made late: by a thread, where the event loop would make them for too long.

vLLM makes an answer in one method and returns it from another one, to which `made_later` and
`answered_late` are put.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from kvmig.frontend.openai.vllm.spelling import make_beside

Making = Callable[..., Coroutine[Any, Any, Any]]


class LateAnswer(NamedTuple):
    """An answer that isn't made yet."""

    make: Callable[[], Any]


def made_later(make: Callable[..., Any], is_large: Callable[[Any], bool]) -> Any:
    """`make`, which returns a LateAnswer where its first argument is large."""

    @functools.wraps(make)
    def made(self: Any, source: Any, *args: Any, **options: Any) -> Any:
        late = LateAnswer(functools.partial(make, self, source, *args, **options))
        return late if is_large(source) else late.make()

    return made


def answered_late(create: Making, spell: Callable[[Any], Any]) -> Any:
    """`create`, whose LateAnswer a thread makes and turns into JSON with `spell`."""

    @functools.wraps(create)
    async def created(self: Any, *args: Any, **options: Any) -> Any:
        answer = await create(self, *args, **options)
        if not isinstance(answer, LateAnswer):
            return answer
        return await make_beside(lambda: spell(answer.make()))

    return created
