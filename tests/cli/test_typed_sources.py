"""What people type for the place of a model's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmig.cli.names import typed_source


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@main", "hf:Qwen/Qwen3-0.6B@main"),
        ("hf:Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"),
        ("here/model", "path:{folder}/here/model"),
        ("path:Qwen/Qwen3-0.6B", "path:{folder}/Qwen/Qwen3-0.6B"),
        ("./Qwen/Qwen3-0.6B", "path:{folder}/Qwen/Qwen3-0.6B"),
        ("/models/qwen", "path:/models/qwen"),
        ("models", "path:{folder}/models"),
        ("a/b/c", "path:{folder}/a/b/c"),
    ],
)
def test_a_repositorys_name_is_one_of_the_hub_unless_a_folder_is_there(
    text: str,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    assert typed_source(text) == source.format(folder=tmp_path)
    is_named = source.startswith("hf:") and not text.startswith("hf:")
    said = f"kvmig: there is no folder {text} here: the source is {source}\n"
    assert capsys.readouterr().err == (said if is_named else "")
