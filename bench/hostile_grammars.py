"""Bodies that are made to hurt by their grammar or tools: `bench.hostile_bodies` has the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple


class HostileGrammar(NamedTuple):
    """A schema, or a grammar of another form, for as many parts as `count`."""

    name: str
    fits: int
    """The largest that a front end lets through."""
    text: str
    """Of the schema, with `#` where the parts are."""
    part: str
    """With `#` where its number is."""

    def of(self, count: int) -> str:
        """As JSON."""
        parts = ",".join(self.part.replace("#", str(one)) for one in range(count))
        return self.text.replace("#", parts)


_PROPERTIES = '{"type":"object","properties":{#}}'
SCHEMAS = (
    HostileGrammar(
        "number ranges", 250, _PROPERTIES,
        '"p#":{"type":"number","minimum":-1234567.123,"maximum":987654321.321}',
    ),
    HostileGrammar(
        "whole numbers' ranges", 250, _PROPERTIES,
        '"p#":{"type":"integer","minimum":-12345678901,"maximum":98765432109}',
    ),
    HostileGrammar("multiples", 500, _PROPERTIES, '"p#":{"type":"integer","multipleOf":7}'),
    HostileGrammar(
        "formats", 2400, _PROPERTIES, '"p#":{"type":"string","format":"date-time"}'
    ),
    HostileGrammar(
        "patterns", 2400, _PROPERTIES, '"p#":{"type":"string","pattern":"^(a|b){1,99}$"}'
    ),
    HostileGrammar("values", 15_000, '{"enum":[#]}', '"w#"'),
    HostileGrammar("alternatives", 141, '{"anyOf":[#]}', '{"type":"array","minItems":#}'),
    HostileGrammar(
        "references", 2000,
        '{"$ref":"#/$defs/d0","$defs":{%}}'.replace("#", "\\u0023").replace("%", "#"),
        '"d#":{"type":"object","properties":{"a":{"$ref":"\\u0023/$defs/d0"}}}',
    ),
)  # fmt: skip
"""By what they have too many of."""


def structured(name: str, prompts: int) -> Iterator[tuple[str, int, Any]]:
    """Kind, largest count and maker of completions with each schema. name: a body's beginning."""
    asks = json.dumps(["a"] * prompts)
    for one in SCHEMAS:
        yield (
            f"schema, {one.name}, {prompts} prompts", one.fits,
            lambda count, one=one: (
                f'{{{name}, "prompt": {asks},'
                f' "structured_outputs": {{"json": {one.of(count)}}}}}'
            ).encode(),
        )  # fmt: skip
