"""The mirror's folder while other files come."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmig.mirror.blob_folder import BlobFolder


def test_room_is_found_while_another_file_becomes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = BlobFolder(tmp_path, 0, frozenset(), lambda: None)
    folder.open()
    try:
        moved = folder.coming("b" * 40)  # it was there when the folder was listed
        monkeypatch.setattr(Path, "iterdir", lambda _: iter([moved]))
        assert folder.make_room("a" * 40, 10) == ""
    finally:
        folder.close()
