"""Forms of calls (multipart/form-data): parsed once, and written again for the deployment. Pure.

What goes on is made of what was read here, with a content type of the proxy's own: however the
client spelt it, the check of the key and the engine see the same form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from kvmig.asgi.problems import shorten_value
from kvmig.proxy.refusals import bad

KIND = "multipart/form-data"
CONTENT_TYPE = re.compile(
    KIND
    + r'\s*;\s*boundary=(?P<quote>"?)(?P<boundary>[0-9A-Za-z\'()+_,\-./:=?]{1,70})(?P=quote)\s*',
    re.IGNORECASE,
)
MOST_PARTS = 1000
HEAD_BYTES = 1 << 14
"""Most bytes of a part's headers."""


@dataclass
class FormPart:
    """One field, or one file."""

    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    data: bytes = b""
    name: bytes = b""
    is_file: bool = False


class MultipartForm:
    """The parts, as they came."""

    def __init__(self, parts: Sequence[FormPart], boundary: bytes) -> None:
        self._parts = parts
        self._boundary = boundary

    def text(self, name: str) -> str | None:
        """The text of a field; None: there is none. Raises ProxyRefusal if it comes twice."""
        found = [one for one in self._parts if one.name == name.encode()]
        if not found:
            return None
        if len(found) > 1:
            raise bad(f"the form has {name} twice")
        if found[0].is_file:
            raise bad(f"the form's {name} is a file, must be plain text")
        try:
            return found[0].data.decode()
        except UnicodeDecodeError as error:
            raise bad(f"{name} is no UTF-8") from error

    def files(self) -> list[bytes]:
        """Return the contents of all files in it."""
        return [one.data for one in self._parts if one.is_file]

    @property
    def content_type(self) -> bytes:
        """The content type of what `encode` returns."""
        return b'%s; boundary="%s"' % (KIND.encode(), self._boundary)

    def encode(self, model: str) -> bytes:
        """The form, which names this model."""
        named = FormPart(
            [(b"Content-Disposition", b'form-data; name="model"')], model.encode(), b"model"
        )
        pieces: list[bytes] = []
        for part in (named, *(one for one in self._parts if one.name != b"model")):
            pieces.append(b"--%s\r\n" % self._boundary)
            pieces += [b"%s: %s\r\n" % one for one in part.headers]
            pieces += [b"\r\n", part.data, b"\r\n"]
        return b"".join([*pieces, b"--%s--\r\n" % self._boundary])


def form_of(content: bytes, kind: str) -> MultipartForm:
    """kind: the call's content type. Raises ProxyRefusal."""
    declared = CONTENT_TYPE.fullmatch(kind)
    if declared is None:
        allowed = f"must be {KIND} with one boundary, and nothing else"
        raise bad(f"content-type is {shorten_value(kind)}, {allowed}")
    boundary = declared["boundary"].encode()
    reader = _Reader()
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": reader.begin,
            "on_header_field": reader.take_name,
            "on_header_value": reader.take_value,
            "on_header_end": reader.end_header,
            "on_headers_finished": reader.end_headers,
            "on_part_data": reader.take_data,
            "on_part_end": reader.end,
        },
    )
    try:
        parser.write(content)
        parser.finalize()
    except FormParserError as error:
        raise bad(f"the form can't be read: {str(error)[:200]}") from error
    return MultipartForm(reader.parts, boundary)


class _Reader:
    """Takes what the parser finds."""

    def __init__(self) -> None:
        self.parts: list[FormPart] = []
        self._part = FormPart()
        self._pieces: list[bytes] = []
        self._name = self._value = b""
        self._head = 0

    def begin(self) -> None:
        if len(self.parts) >= MOST_PARTS:
            raise bad(f"the form has more than {MOST_PARTS} parts")
        self._part = FormPart()
        self._pieces = []
        self._head = 0

    def take_name(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._name += data[start:end]

    def take_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def end_header(self) -> None:
        self._part.headers.append((self._name, self._value))
        if self._name.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            if b"name" not in options:
                raise bad("the form has a part without a name")
            self._part.name = options[b"name"]
            self._part.is_file = b"filename" in options
        self._name = self._value = b""

    def end_headers(self) -> None:
        named = [name for name, _ in self._part.headers if name.lower() == b"content-disposition"]
        if len(named) != 1:
            raise bad("the form has a part with no, or more than one, content-disposition")

    def take_data(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(data[start:end])

    def end(self) -> None:
        self._part.data = b"".join(self._pieces)
        self.parts.append(self._part)

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > HEAD_BYTES:
            raise bad(f"the form has a part with more than {HEAD_BYTES} bytes of headers")
