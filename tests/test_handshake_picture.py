"""The picture of the handshake is the tables'."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from kvmig.kvtransfer import draw
from kvmig.kvtransfer.destination_machine import DestinationMachine
from kvmig.kvtransfer.source_machine import SourceMachine

PICTURE = Path(__file__).parent.parent / "docs" / "handshake.svg"


def test_the_committed_picture_is_current() -> None:
    assert PICTURE.read_text() == draw.svg(), "run: python -m kvmig.kvtransfer.draw"


def test_every_state_and_event_is_in_the_picture() -> None:
    words = " ".join(ElementTree.fromstring(draw.svg()).itertext()).lower()
    for table in (SourceMachine.table, DestinationMachine.table):
        for state, arrows in table.items():
            for name in (state, *arrows):
                assert name.replace("_", " ") in words


def test_no_text_leaves_the_picture() -> None:
    for element in ElementTree.fromstring(draw.svg()).iter("{http://www.w3.org/2000/svg}text"):
        x, width = float(element.attrib["x"]), 6.5 * len(element.text or "")
        left = {"start": 0.0, "middle": width / 2, "end": width}[element.attrib["text-anchor"]]
        assert x - left >= 0
        assert x - left + width <= draw.WIDTH
        assert 0 < float(element.attrib["y"]) < draw.HEIGHT
