"""A model's specification: every mistake is one sentence, before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvmig.fleet.spec import Instances, Spec, fleet_of, spec_of
from kvmig.ground.errors import ConfigError


def given(**more: Any) -> dict[str, Any]:
    return {"name": "qwen", "source": f"path:{Path.cwd()}", **more}


def test_little_is_needed() -> None:
    spec = spec_of(given())
    assert spec == Spec(name="qwen", source=f"path:{Path.cwd()}")
    assert spec.folder == str(Path.cwd())


def test_flags_may_be_one_text() -> None:
    assert spec_of(given(flags="--dtype float32 --seed '1'")).flags == (
        "--dtype", "float32", "--seed", "1",
    )  # fmt: skip


def test_it_is_the_same_after_json() -> None:
    spec = spec_of(given(aliases=["a"], instances={"min": 1, "max": 3}, warm="always"))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=Spec) == spec


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"nmae": 1}, "model qwen: Object contains unknown field `nmae`"),
        ({"name": "../x"}, "name is '../x', must be lower-case"),
        ({"name": "a/../x"}, "name is 'a/../x', must be lower-case"),
        ({"name": "x" * 300}, "name is 'xxx"),
        ({"name": "<script>"}, "name is '<script>', must be"),
        ({"name": "qwеn"}, "must be lower-case"),
        ({"name": 3}, "model ?: Expected `str`, got `int` - at `$.name`"),
        ({"source": "hf:a/b@main"}, "source is 'hf:a/b@main', must be path:FOLDER"),
        ({"source": "path:models"}, "source is 'models', must be a folder's whole path"),
        ({"source": "path:/nowhere/at/all"}, "source is '/nowhere/at/all', which is no folder"),
        ({"engine": "llama"}, "Invalid enum value 'llama' - at `$.engine`"),
        ({"instances": {"max": 0}}, "instances.max is 0, must be 1 to 1000"),
        ({"instances": {"min": 3, "max": 2}}, "instances.max is 2, must be 3 or more"),
        ({"instances": {"target": 0}}, "instances.target is 0, must be more than 0"),
        ({"instances": {"target_kind": "qps"}}, "Invalid enum value 'qps'"),
        ({"instances": {"zero_after_s": -1}}, "instances.zero_after_s is -1, must be 0 to"),
        ({"flags": ["--port=1"]}, "flags has --port: that is of `kvmig up`"),
        ({"flags": "--api-key x"}, "flags has --api-key: that is keys of the fleet"),
        ({"flags": "'"}, 'flags is "\'": No closing quotation'),
        ({"gpus": ["0"]}, "gpus is ['0']: placement on given GPUs comes later"),
        ({"max_held": -1}, "max_held is -1, must be 0 to"),
        ({"aliases": ["A"]}, "name is 'A', must be lower-case"),
        ({"adapters": {"l": "/nowhere"}}, "adapters.l is '/nowhere', which is no folder here"),
        ({"warm": "hot"}, "Invalid enum value 'hot'"),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        spec_of(given(**wrong))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_file_may_name_folders_beside_it(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    listed = {"models": [{"name": "a", "source": "path:weights"}]}
    (spec,) = fleet_of(listed, tmp_path).models
    assert spec.folder == str(tmp_path / "weights")


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ([given(), given()], "model qwen: name is qwen, which is name of model qwen already"),
        ([given(), given(name="b", aliases=["qwen"])], "an alias is qwen, which is name of model"),
        ([given(aliases=["x", "x"])], "an alias is x, which is an alias of model qwen already"),
        (
            [given(aliases=["x"]), given(name="b", adapters={"x": str(Path.cwd())})],
            "model b: an adapter is x, which is an alias of model qwen already",
        ),
    ],
)
def test_no_two_things_have_one_name(models: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fleet_of({"models": models})


@pytest.mark.parametrize("file", [[], {"model": []}, {"models": 3}, {"models": [3]}, "x"])
def test_a_file_of_another_shape_is_refused(file: Any) -> None:
    with pytest.raises(ConfigError, match="must be"):
        fleet_of(file)


def test_instances_have_usual_numbers() -> None:
    assert (Instances().min, Instances().max) == (0, 1)


def test_an_alias_may_stand_for_several_models() -> None:
    aliases = {"canary": {"qwen": 90, "b": 10}}
    assert fleet_of({"models": [given(), given(name="b")], "aliases": aliases}).aliases == aliases


@pytest.mark.parametrize(
    ("aliases", "sentence"),
    [
        ({"qwen": {"qwen": 1}}, "aliases.qwen: that is name of model qwen already"),
        ({"x": {"y": 1}, "y": {"x": 1}}, "aliases.x: 'y' is no model, models: qwen"),
        ({"x": {}}, "aliases.x is empty"),
        ({"x": {"qwen": 0}}, "aliases.x.qwen is 0, must be 1 to"),
        ({"X": {"qwen": 1}}, "name is 'X', must be"),
        ({"x": "qwen"}, "aliases: Expected `object`, got `str`"),
    ],
)
def test_an_alias_stands_for_models_only(aliases: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fleet_of({"models": [given()], "aliases": aliases})
