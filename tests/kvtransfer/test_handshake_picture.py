"""The picture of the handshake is the tables'."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from kvmig.kvtransfer.destination_machine import DestinationMachine
from kvmig.kvtransfer.source_machine import SourceMachine
from kvmig_tools import draw_handshake

PICTURE = Path(__file__).parents[2] / "docs" / "handshake.svg"


def test_the_committed_picture_is_current() -> None:
    assert PICTURE.read_text() == draw_handshake.svg(), "run: python -m kvmig_tools.draw_handshake"


def test_every_state_and_event_is_in_the_picture() -> None:
    words = " ".join(ElementTree.fromstring(draw_handshake.svg()).itertext()).lower()
    for table in (SourceMachine.table, DestinationMachine.table):
        for state, arrows in table.items():
            for name in (state, *arrows):
                assert name.replace("_", " ") in words


def test_no_text_leaves_the_picture() -> None:
    for element in ElementTree.fromstring(draw_handshake.svg()).iter(
        "{http://www.w3.org/2000/svg}text"
    ):
        x, width = float(element.attrib["x"]), 6.5 * len(element.text or "")
        left = {"start": 0.0, "middle": width / 2, "end": width}[element.attrib["text-anchor"]]
        assert x - left >= 0
        assert x - left + width <= draw_handshake.WIDTH
        assert 0 < float(element.attrib["y"]) < draw_handshake.HEIGHT
