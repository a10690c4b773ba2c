"""`kvmig_tools.drift` finds each kind of change that breaks an adapter, or changes what it relies
on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvmig.core.errors import ConfigError
from kvmig_tools.drift import __main__ as command
from kvmig_tools.drift.checks import BREAKS, READ, Finding, facts, findings
from kvmig_tools.drift.contract import Contract, load
from kvmig_tools.drift.source import Tree
from kvmig_tools.drift.trees import tree
from kvmig_tools.drift.uses import uses

ENGINE = {
    "__init__.py": "from engine.core import Core\n",
    "core.py": '''
import dataclasses


@dataclasses.dataclass
class Wire:
    """Goes over a wire."""

    name: str
    size: int = 0


class Base:
    kind = "base"

    def __init__(self):
        self.queue = []
        self.closed = False

    def step(self, budget, *, eager=False):
        return self.queue[:budget]

    def closing(self):
        return self.closed


class Core(Base):
    def free(self, block):
        """Give a block back."""
        self.queue.append(block)


class Client:
    def send(self, request):
        raise NotImplementedError


class Front:
    def __init__(self, client):
        self.client = client

    def go(self):
        return self.client.send(1)


@dataclasses.dataclass
class Flags:
    model: str = ""
    device: str = "auto"
''',
    "tools.py": "def helper(one, two=2):\n    return one\n",
    "server/api.py": """
@router.post("/known/{name}/end", dependencies=[1])
async def end(name):
    queue.put("/not/a/route")


router.add_api_route("/closed", end, methods=["POST"])
""",
}
ADAPTER = """
from engine.core import Base, Client, Core, Wire
from engine.tools import helper


class Ours(Base):
    def __init__(self):
        self.queue = []

    def step(self, budget, *, eager=False):
        return super().step(budget, eager=eager)


class Routing(Client):
    def send(self, request):
        return request


def use(core: Core):
    core.free(3)
    for block in core.queue:
        core.step(block, eager=True)
    helper(1)
    return Wire(name="x")
"""
CONTRACT = """
package = "engine"
distributions = ["engine"]
supported = ["1.0"]
ours = ["adapter.py"]
judged = "tests.tools.test_drift"
routes = ["tests.tools.test_drift", "server"]
flags = ["engine.core:Flags"]
client = ["engine.core:Front", "client", "Routing"]
structs = ["engine.core:Wire"]
relied = ["engine.core:Base.step", "engine.tools:helper"]
[roots]
core = "engine.core:Core"
[skipped]
Ours = ["step"]
"""
KNOWN_ROUTES = frozenset({("POST", "/known/{id}/end"), ("POST", "/closed")})
ALLOWED, REFUSED, NO_FLAGS = {"model"}, {"device": "no"}, frozenset[str]()


@pytest.fixture
def contract(tmp_path: Path) -> Contract:
    (tmp_path / "adapter.py").write_text(ADAPTER)
    (tmp_path / "drift.toml").write_text(CONTRACT)
    return load(tmp_path / "drift.toml", tmp_path)


def planted(folder: Path, file: str = "core.py", *changes: tuple[str, str]) -> Tree:
    """The engine with so many words changed."""
    package = folder / "engine"
    package.mkdir(parents=True, exist_ok=True)
    for name, text in ENGINE.items():
        changed = text
        for old, new in changes if name == file else ():
            assert old in changed
            changed = changed.replace(old, new)
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(changed)
    return Tree(folder, "engine", "2.0" if changes else "1.0")


Look = Callable[..., list[Finding]]


@pytest.fixture
def look(contract: Contract, tmp_path: Path) -> Look:
    """What is found once `changes` were made to the engine, against the engine without them."""
    used = uses(contract)
    lock = facts(contract, used, planted(tmp_path / "1"))

    def found(*changes: tuple[str, str], file: str = "core.py") -> list[Finding]:
        return findings(contract, used, planted(tmp_path / "2", file, *changes), lock)

    return found


def test_nothing_is_found_where_nothing_changed(look: Look) -> None:
    assert look() == []


@pytest.mark.parametrize(
    ("old", "new", "route"),
    [
        ("/known/{name}/end", "/known/{name}/begin", "POST /known/{id}/begin"),
        ("router.post", "router.delete", "DELETE /known/{id}/end"),
        ('"/closed", end', '"/open", end', "POST /open"),
        ('methods=["POST"]', 'methods=["GET", "POST"]', "GET /closed"),
        ('"/known/{name}/end"', "PREFIX + '/end'", "POST PREFIX + '/end'"),
        ("async def end", '@app.websocket("/live")\nasync def end', "WEBSOCKET /live"),
    ],
)
def test_a_route_that_is_in_no_list_of_ours_is_found(
    look: Look, old: str, new: str, route: str
) -> None:
    found = look((old, new), file="server/api.py")
    assert [(one.how, one.check, one.where) for one in found] == [(BREAKS, "route", route)]


@pytest.mark.parametrize(
    ("check", "says", "changes"),
    [
        ("import", "no Wire in engine.core", [("class Wire", "class Wires")]),
        ("attribute", "Core has no queue", [("self.queue", "self.line")]),
        ("attribute", "Core has no free", [("def free", "def release")]),
        ("call", "Core.step() takes no eager", [("*, eager=False", "*, fast=False")]),
        ("call", "Core.step() needs why", [("budget, *, eager", "budget, why, *, eager")]),
        ("call", "Wire() needs age", [("    name: str\n", "    name: str\n    age: int\n")]),
        ("call", "Wire() takes no name", [("    name: str\n", "    label: str\n")]),
        (
            "skipped",
            "step() reads ready, which only a skipped __init__ sets",
            [("self.closed = False", "self.ready = 1"), ("self.queue[:b", "self.ready and [][:b")],
        ),
        (
            "skipped",
            "closing() reads closed, which only a skipped __init__ sets",
            [("return self.queue[:budget]", "return self.closing()")],
        ),
        (
            "override",
            "Base.step takes more, too",
            [("budget, *, eager", "budget, more=1, *, eager")],
        ),
        ("struct", "needs age: int", [("    name: str\n", "    name: str\n    age: int\n")]),
        ("struct", "lost size: int = 0", [("    size: int = 0\n", "")]),
        (
            "struct",
            "in another order",
            [("    name: str\n", "    tag: str = ''\n    name: str\n")],
        ),
        ("client", "stop is called on it", [("self.client.send(1)", "self.client.stop()")]),
        ("flag", "unjudged", [("    device:", "    threads: int = 1\n    device:")]),
    ],
)
def test_a_planted_break_is_found(
    look: Look, check: str, says: str, changes: list[tuple[str, str]]
) -> None:
    found = [one for one in look(*changes) if one.how == BREAKS and one.check == check]
    assert any(says in one.what for one in found)


def test_a_module_that_moved_is_named_with_what_there_is(look: Look, tmp_path: Path) -> None:
    look()
    package = tmp_path / "2" / "engine"
    (package / "common").mkdir()
    (package / "tools.py").rename(package / "common" / "tools.py")
    contract = load(tmp_path / "drift.toml", tmp_path)
    found = findings(contract, uses(contract), Tree(tmp_path / "2", "engine"), None)
    assert [one.what for one in found] == [
        "no module engine.tools; there is engine.common.tools",
        "no such method or function",
    ]


@pytest.mark.parametrize(
    ("check", "says", "changes"),
    [
        ("body", "read its diff", [("self.queue.append(block)", "self.queue.insert(0, block)")]),
        ("signature", "(self, block, why='') now", [("(self, block)", "(self, block, why='')")]),
        ("struct", "has age: int = 1 now", [("size: int = 0", "size: int = 0\n    age: int = 1")]),
        ("flag", "gone since 1.0", [("    device: str = \"auto\"\n", "")]),
    ],
)  # fmt: skip
def test_a_change_that_may_fit_is_to_be_read(
    look: Look, check: str, says: str, changes: list[tuple[str, str]]
) -> None:
    found = look(*changes)
    assert [one.check for one in found if one.how == BREAKS] == []
    assert any(one.check == check and says in one.what for one in found)


def test_a_method_that_is_used_anew_is_to_be_accepted(
    look: Look, contract: Contract, tmp_path: Path
) -> None:
    look()
    lock = facts(contract, uses(contract), Tree(tmp_path / "1", "engine", "1.0"))
    (tmp_path / "adapter.py").write_text(
        f"{ADAPTER}\n\ndef more(core: Core):\n    core.closing()\n"
    )
    found = findings(contract, uses(contract), Tree(tmp_path / "1", "engine", "1.0"), lock)
    assert [(one.how, one.where) for one in found] == [(READ, "engine.core:Core.closing")]


def test_a_function_that_is_relied_on_is_to_be_read_when_it_changes(look: Look) -> None:
    found = look(("return one", "return two"), file="tools.py")
    assert [(one.check, one.where) for one in found] == [("body", "engine.tools:helper")]


@pytest.mark.parametrize("name", ["engine.tools:missing", "engine.core:Core.missing"])
def test_what_the_contract_relies_on_and_is_not_there_is_found(tmp_path: Path, name: str) -> None:
    (tmp_path / "adapter.py").write_text(ADAPTER)
    (tmp_path / "drift.toml").write_text(CONTRACT.replace("engine.tools:helper", name))
    contract = load(tmp_path / "drift.toml", tmp_path)
    found = findings(contract, uses(contract), planted(tmp_path / "1"), None)
    assert [(one.how, one.where) for one in found] == [(BREAKS, name)]


def test_comments_docstrings_and_layout_are_no_change(look: Look) -> None:
    assert look(('"""Give a block back."""', '"""Take it."""  # really')) == []


def test_what_is_new_on_a_wire_has_its_readers_told(look: Look) -> None:
    found = look(("self.client.send(1)", "self.client.send(1, self.client.wait)"))
    assert ("client", "wait is called on it") in [(one.check, one.what) for one in found]


def test_an_import_that_may_fail_is_no_use(contract: Contract, tmp_path: Path) -> None:
    (tmp_path / "adapter.py").write_text(
        "try:\n    from engine.core import Gone\nexcept ImportError:\n    Gone = None\n"
    )
    found = findings(contract, uses(contract), planted(tmp_path / "1"), None)
    assert [one for one in found if one.check == "import"] == []


def test_accepting_writes_a_lock_that_the_next_look_is_against(
    contract: Contract, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "1"
    planted(folder)
    (folder / "engine-1.0.dist-info").mkdir()
    assert not command.report(contract, str(folder), accept=True)
    planted(folder, "core.py", ("self.queue.append(block)", "self.queue.insert(0, block)"))
    (folder / "engine-1.0.dist-info").rename(folder / "engine-1.1.dist-info")
    assert command.report(contract, str(folder), accept=False)
    said = capsys.readouterr().out
    assert "engine 1.1 against 1.0: 0 break, 1 to read" in said
    assert "engine.core:Core.free: changed since 1.0" in said


def test_a_contract_with_an_unknown_field_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "drift.toml").write_text(CONTRACT.replace("relied", "relied_on"))
    (tmp_path / "adapter.py").write_text("")
    with pytest.raises(ConfigError, match="relied_on"):
        load(tmp_path / "drift.toml", tmp_path)


def test_a_tree_that_is_none_is_refused_with_what_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="has no folder engine"):
        tree(str(tmp_path), "engine", ["engine"])
    assert command.main(["latest"]) == 2
    assert "latest must be a version like 0.32.0, or a folder with vllm/" in capsys.readouterr().err
