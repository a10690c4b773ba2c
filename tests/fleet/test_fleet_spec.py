"""A model's specification: every mistake is one sentence, before anything changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.fleet.spec import (
    InstanceCounts,
    ModelSpec,
    changes,
    fleet_of,
    merged,
    read_yaml,
    spec_of,
)


def given(**more: Any) -> dict[str, Any]:
    return {"name": "qwen", "source": f"path:{Path.cwd()}", **more}


def scheduled(**floor: Any) -> dict[str, Any]:
    return {"instances": {"schedule": [{"during": "* * * * *", "min": 1, **floor}]}}


def in_unit(**more: Any) -> dict[str, Any]:
    return {"unit": "u", "unit_memory": 1 << 30, **more}


def test_little_is_needed() -> None:
    spec = spec_of(given())
    assert spec == ModelSpec(name="qwen", source=f"path:{Path.cwd()}")
    assert spec.folder == str(Path.cwd())


def test_flags_may_be_one_text() -> None:
    assert spec_of(given(flags="--dtype float32 --seed '1'")).flags == (
        "--dtype", "float32", "--seed", "1",
    )  # fmt: skip


def test_it_is_the_same_after_json() -> None:
    spec = spec_of(given(aliases=["a"], instances={"min": 1, "max": 3}))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"nmae": 1}, "model qwen: 'nmae' is no field, must be one of name, source, engine"),
        ({"instances": {"mni": 1}}, "instances: 'mni' is no field, must be one of min, max"),
        ({"a\nb": 1}, "'a\\nb' is no field, must be one of"),
        ({"z - at `$.x": 1}, "unknown field"),
        ({3: 4}, "Expected `str` - at `key`"),
        ({"source": None}, "source is None, must be str"),
        ({"name": "../x"}, "name is '../x', must be letters, digits"),
        ({"name": "a/../x"}, "name is 'a/../x', must be letters, digits"),
        ({"name": "x" * 300}, "name is 'xxx"),
        ({"name": "<script>"}, "name is '<script>', must be"),
        ({"name": "qwеn"}, "must be letters, digits"),
        ({"name": 3}, "model ?: name is 3, must be str"),
        ({"source": "hf:a/b/c"}, "source is 'hf:a/b/c', must be hf:ORG/NAME"),
        ({"source": "a/b"}, "source is 'a/b', must be hf:ORG/NAME[@REVISION], modelscope:"),
        ({"source": "path:models"}, "source is 'models', must be a folder's whole path"),
        ({"source": "path:/nowhere/at/all"}, "source is '/nowhere/at/all', which is no folder"),
        ({"engine": "llama"}, "engine is 'llama', must be vllm or transformers or toy"),
        ({"instances": {"max": 0}}, "instances.max is 0, must be 1 to 1000"),
        ({"instances": {"min": 3, "max": 2}}, "instances.max is 2, must be 3 or more"),
        ({"instances": {"target": 0}}, "instances.target is 0, must be more than 0"),
        ({"instances": {"target_kind": "qps"}}, "target_kind is 'qps', must be concurrency or rps"),
        ({"instances": {"target": float("nan")}}, "instances.target is nan, must be"),
        ({"instances": {"min": 1.5}}, "instances.min is 1.5, must be int"),
        ({"instances": {"min": 10**30}}, "instances.min is 1e+30, must be 0 to 1000"),
        ({"instances": []}, "instances is [], must be object"),
        ({"instances": {"schedule": [{"min": 1}]}}, "instances.schedule[0]: during is missing"),
        (scheduled(during=1), "instances.schedule[0].during is 1, must be str"),
        (scheduled(during="* *"), "schedule[0]: during is '* *', must be minute hour day"),
        (scheduled(min=2), "instances.schedule[0].min is 2, must be 1 to 1"),
        (scheduled(timezone="Mars"), "instances.schedule[0]: timezone is 'Mars', must be UTC"),
        (
            {"instances": {**scheduled()["instances"], "target_kind": "freeness"}},
            "instances.target_kind is 'freeness', must be concurrency or rps with a schedule",
        ),
        (scheduled(at=3), "instances.schedule[0]: 'at' is no field, must be one of during"),
        ({"instances": {"zero_after_s": -1}}, "instances.zero_after_s is -1, must be 0 to"),
        ({"flags": ["--port=1"]}, "flags has --port: that is of `kvmig up`"),
        ({"flags": "--api-key x"}, "flags has --api-key: that is keys of the fleet"),
        ({"flags": "'"}, 'flags is "\'": No closing quotation'),
        ({"gpus": ["first"]}, "gpus[0] is 'first', must be an index as nvidia-smi has it, or a"),
        ({"gpus": ["0", "0"]}, "gpus is ['0', '0'], must name each GPU once"),
        ({"gpus": "0"}, "gpus is '0', must be array"),
        ({"gpus": ["0"], "gpus_per_instance": 2}, "gpus has 1, must have 2 or more: an instance"),
        ({"gpus_per_instance": 65}, "gpus_per_instance is 65, must be 0 to 64"),
        ({"tensor_parallel": "some"}, "tensor_parallel is 'some', must be auto"),
        (
            {"tensor_parallel": "auto", "gpus_per_instance": 2},
            "gpus_per_instance is 2, must be left out with tensor_parallel auto",
        ),
        (
            {"tensor_parallel": "auto", "flags": "-tp 2"},
            "--tensor-parallel-size is 2, must be left out with tensor_parallel auto",
        ),
        ({"tensor_parallel": "auto", "warm": "parked"}, "warm is 'parked', must be none or always"),
        (
            {"gpus_per_instance": 2, "flags": "--tensor-parallel-size 4"},
            "gpus_per_instance is 2, must be 4, which --tensor-parallel-size in flags is",
        ),
        ({"gpu_memory": -1}, "gpu_memory is -1, must be 0 to"),
        ({"flags": "--instance-gpus=0"}, "flags has --instance-gpus: that is gpus"),
        ({"unit": "a b", "unit_memory": 1 << 30}, "unit is 'a b', must be letters, digits"),
        ({"unit": "u"}, "unit_memory is 0, must be 1048576 to"),
        ({"unit_memory": 1 << 30}, "unit_memory is 1073741824, must be left out without unit"),
        (in_unit(engine="toy"), "engine is toy, must be vllm in a unit"),
        (in_unit(instances={"max": 2}), "instances.max is 2, must be 1 in a unit"),
        (in_unit(gpus_per_instance=2), "gpus_per_instance is 2, must be 1 in a unit"),
        (in_unit(flags=["--unit=/run/u"]), "flags has --unit: that is unit"),
        ({"worker_selector": {"a b": "c"}}, "worker_selector has 'a b': 'c', must be names and"),
        ({"worker_selector": {"a": ""}}, "worker_selector has 'a': '', must be names and values"),
        ({"worker_selector": "a=b"}, "worker_selector is 'a=b', must be object"),
        ({"placement_strategy": "x"}, "placement_strategy is 'x', must be spread or pack"),
        ({"placement": {}}, "'placement' is no field, must be one of name, source"),
        ({"cpu_offload": 4}, "cpu_offload is 4: weights in the host's memory comes later"),
        ({"share_prefixes": "yes"}, "share_prefixes is 'yes', must be bool"),
        ({"flags": ["--isolate-users"]}, "flags has --isolate-users: that is share_prefixes"),
        ({"max_held": -1}, "max_held is -1, must be 0 to"),
        ({"aliases": ["A b"]}, "name is 'A b', must be letters, digits"),
        ({"name": "a//b"}, "name is 'a//b', must be letters, digits"),
        ({"name": "a/b/"}, "name is 'a/b/', must be letters, digits"),
        ({"name": "a/./b"}, "name is 'a/./b', must be letters, digits"),
        ({"name": "a/v1/models"}, "name is 'a/v1/models', must be letters, digits"),
        ({"name": "org/logs"}, "name is 'org/logs', must not end with any of /logs"),
        ({"adapters": {"l": "/nowhere"}}, "adapters.l is '/nowhere', which is no folder here"),
        ({"adapters": {"l": 3}}, "adapters[...] is {'l': 3}, must be str"),
        ({"flags": ["\0"]}, "flags is '\\x00', must be Unicode text without 0"),
        ({"flags": ["\ud800"]}, "must be Unicode text without 0"),
        ({"flags": ["x" * 70000]}, "at most 65536 bytes"),
        ({"engine": "toy", "source": "path:/\udcff"}, "source has 'path:/\\udcff', must be Uni"),
        ({"priority": 1001}, "priority is 1001, must be -1000 to 1000"),
        ({"warm": "hot"}, "warm is 'hot', must be none or parked or always"),
        ({"engine": "toy", "adapters": {"l": "/"}}, "adapters is given, must be left out: toy has"),
    ],
)
def test_what_is_wrong_is_refused_in_one_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        spec_of({**given(), **wrong})
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
    assert (InstanceCounts().min, InstanceCounts().max) == (0, 1)


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
        ({"X y": {"qwen": 1}}, "name is 'X y', must be"),
        ({"x": "qwen"}, "aliases: Expected `object`, got `str`"),
    ],
)
def test_an_alias_stands_for_models_only(aliases: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        fleet_of({"models": [given()], "aliases": aliases})


# -- any file


SPECS = st.fixed_dictionaries(
    {
        "name": st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True).filter(
            lambda name: ".." not in name
        ),
        "source": st.just(f"path:{Path.cwd()}"),
    },
    optional={
        "engine": st.sampled_from(["vllm", "transformers", "toy"]),
        "flags": st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"))).filter(
            lambda flags: not any(flag.startswith("--") for flag in flags)
        ),
        "instances": st.fixed_dictionaries(
            {"min": st.integers(0, 3), "max": st.integers(3, 1000)},
            optional={
                "target": st.floats(0.1, 1e6),
                "target_kind": st.sampled_from(["concurrency", "rps"]),
                "zero_after_s": st.floats(0, 86400),
                "schedule": st.lists(
                    st.fixed_dictionaries(
                        {"during": st.just("* 8 * * 1"), "min": st.integers(1, 3)}
                    )
                ),
            },
        ),
        "priority": st.integers(-1000, 1000),
        "max_held": st.integers(0, 1000),
        "share_prefixes": st.booleans(),
    },
)


@hypothesis.given(SPECS)
def test_a_good_spec_is_taken_and_survives_the_database(good: dict[str, Any]) -> None:
    spec = spec_of(good)
    assert spec_of(json.loads(json.dumps(msgspec.to_builtins(spec)))) == spec


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
WORDS = st.sampled_from([*ModelSpec.__struct_fields__, *InstanceCounts.__struct_fields__, "models"])
ANYTHING = st.recursive(
    SCALARS, lambda some: st.lists(some) | st.dictionaries(WORDS | st.text(), some), max_leaves=20
)


@hypothesis.given(ANYTHING)
def test_whatever_a_file_holds_is_taken_or_refused_in_one_line(thing: Any) -> None:
    for wrong in (thing, {"models": [thing]}, {"models": [{**given(), "instances": thing}]}):
        try:
            fleet_of(wrong)
        except ConfigError as error:
            said = str(error)
        else:
            continue
        assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("models:\n- name: a\n  name: b", "line 3: 'name' is there twice"),
        ("[", "it is no plain YAML: while parsing"),
        ("a: !!python/object:os.system 1", "could not determine a constructor"),
        ("a: .nan", "it is no plain YAML: Out of range float"),
        ("a: &a [*a]", "it is no plain YAML: Circular reference"),
        ("a: !!binary aaaa", "it is no plain YAML: Object of type bytes"),
        ("a: " + "[" * 5000, "it is no plain YAML: maximum recursion depth"),
    ],
)
def test_a_text_that_is_not_one_thing_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_yaml(text)
    assert sentence in str(refused.value)


def test_a_text_is_read() -> None:
    text = f"models:\n- &a {{name: a, source: 'path:{Path.cwd()}'}}\n- {{<<: *a, name: b}}"
    assert [spec.name for spec in fleet_of(read_yaml(text)).models] == ["a", "b"]


def test_a_date_is_text() -> None:
    assert read_yaml("name: 2026-11-23") == {"name": "2026-11-23"}


# -- what an order changes


def test_changes_lead_from_one_catalogue_to_the_other() -> None:
    old = fleet_of({"models": [given(), given(name="b")], "aliases": {"x": {"b": 1}}})
    new = fleet_of({"models": [given(max_held=3), given(name="c")], "aliases": {"x": {"c": 1}}})
    found = changes(old, new)
    assert [(one.action, one.kind, one.name) for one in found] == [
        ("remove", "model", "b"),
        ("add", "model", "c"),
        ("change", "model", "qwen"),
        ("change", "alias", "x"),
    ]
    assert (found[3].before, found[3].after) == ({"b": 1}, {"c": 1})
    assert changes(new, new) == []


def test_a_merged_catalogue_keeps_what_the_file_does_not_name() -> None:
    old = fleet_of({"models": [given(), given(name="b")], "aliases": {"x": {"b": 1}}})
    both = merged(old, fleet_of({"models": [given(name="b", max_held=3)]}), prune=False)
    assert [spec.max_held for spec in both.models] == [1000, 3]
    assert both.aliases == old.aliases


def test_a_merged_catalogue_has_no_name_twice() -> None:
    old = fleet_of({"models": [given(aliases=["b"])]})
    with pytest.raises(ConfigError, match="name is b, which is an alias of model qwen already"):
        merged(old, fleet_of({"models": [given(name="b")]}), prune=False)


@pytest.mark.parametrize(
    "name", ["org/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "org/Name-1.5B:tag", "GPT-4", "A/b/C"]
)
def test_names_are_taken_as_clients_have_them_in_their_settings(name: str) -> None:
    spec = spec_of({"name": name, "source": "path:/x", "engine": "toy", "aliases": [f"{name}.x"]})
    assert (spec.name, spec.aliases) == (name, (f"{name}.x",))


def test_two_names_that_differ_in_their_letters_case_are_two_names() -> None:
    models = [{"name": name, "source": "path:/x", "engine": "toy"} for name in ("a/B", "a/b")]
    assert [one.name for one in fleet_of({"models": models}).models] == ["a/B", "a/b"]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"load": "fast"}, "load is 'fast', must be auto"),
        ({"load": "auto", "engine": "transformers"}, "load is given, must be left out: engine is"),
        ({"load": "auto", "flags": "--load_format dummy"}, "must be left out: flags has --load"),
        ({"flags": "--load=auto"}, "flags has --load: that is load"),
    ],
)
def test_how_weights_are_read_is_checked(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        spec_of({"name": "a", "source": f"path:{Path.cwd()}", **more})
    assert sentence in str(error.value)
