"""What our sources use of an engine: imported names, attributes, calls, derived classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmig_tools.drift.contract import Contract
from kvmig_tools.drift.source import Class, Function, Ref, targets


@dataclass(frozen=True)
class Place:
    """A line of ours."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Imported:
    """`from module import name`; name "" for the module itself."""

    module: str
    name: str
    place: Place


@dataclass(frozen=True)
class Attribute:
    """`value.name`, where value is of the engine's class `cls`; call: where it is called."""

    cls: Ref
    name: str
    place: Place
    call: ast.Call | None = None
    stored: bool = False


@dataclass(frozen=True)
class Made:
    """A call of something imported from the engine."""

    what: Ref
    call: ast.Call
    place: Place


@dataclass(frozen=True)
class Derived:
    """A class of ours on classes of the engine's."""

    name: str
    bases: tuple[Ref, ...]
    node: ast.ClassDef
    place: Place

    @property
    def cls(self) -> Class:
        """The same, as the tree has its classes."""
        return Class("", self.node)


@dataclass
class Uses:
    """All uses, in the order of the files."""

    imported: list[Imported] = field(default_factory=list)
    attributes: list[Attribute] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    derived: list[Derived] = field(default_factory=list)

    @property
    def called(self) -> set[tuple[Ref, str]]:
        """Methods of the engine's classes that are called."""
        return {(one.cls, one.name) for one in self.attributes if one.call is not None}


def uses(contract: Contract) -> Uses:
    """Read all of our sources."""
    found = Uses()
    for path in contract.ours:
        _File(contract, path, found).read()
    return found


class _File:
    """One source of ours. Types come from annotations, from calls, from the roots' names."""

    def __init__(self, contract: Contract, path: Path, found: Uses) -> None:
        self._contract = contract
        self._path = path
        self._found = found
        self._tree = ast.parse(path.read_text("utf-8"))
        self._names: dict[str, Ref] = {}
        """Of the engine's, bound by imports anywhere in the file."""

    def read(self) -> None:
        """Note all uses."""
        self._imports()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef):
                self._derived(node)
        self._scope(self._tree, {}, None)

    def _imports(self) -> None:
        guarded = {
            inner
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Try) and any(map(_on_import_error, node.handlers))
            for part in (*node.body, *node.handlers)
            for inner in ast.walk(part)
        }
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and self._engines(node.module or ""):
                for one in node.names:
                    self._names[one.asname or one.name] = (node.module or "", one.name)
                    if node not in guarded:
                        self._note_import(node.module or "", one.name, node)
            elif isinstance(node, ast.Import):
                for one in node.names:
                    if self._engines(one.name) and node not in guarded:
                        self._note_import(one.name, "", node)

    def _note_import(self, module: str, name: str, node: ast.stmt) -> None:
        self._found.imported.append(Imported(module, name, self._place(node)))

    def _engines(self, module: str) -> bool:
        return module.split(".")[0] == self._contract.package

    def _place(self, node: ast.stmt | ast.expr) -> Place:
        return Place(self._path, node.lineno)

    def _derived(self, node: ast.ClassDef) -> None:
        bases = [
            self._names[base.id]
            for base in node.bases
            if isinstance(base, ast.Name) and base.id in self._names
        ]
        if bases:
            self._found.derived.append(Derived(node.name, tuple(bases), node, self._place(node)))

    # -- types

    def _scope(self, scope: ast.AST, outer: dict[str, Ref | None], cls: Ref | None) -> None:
        """Walk one module, class or function in the order of its lines."""
        known = dict(outer)
        if isinstance(scope, Function):
            arguments = [*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs]
            for one in arguments:
                known[one.arg] = self._annotated(one.annotation, one.arg)
            if cls is not None and arguments and arguments[0].arg == "self":
                known["self"] = cls
        body: Sequence[ast.AST] = getattr(scope, "body", ())
        for node in body:
            self._statement(node, known, cls)

    def _statement(self, node: ast.AST, known: dict[str, Ref | None], cls: Ref | None) -> None:
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            mine = next((self._names[base] for base in bases if base in self._names), None)
            self._scope(node, known, mine)
            return
        if isinstance(node, Function):
            self._scope(node, known, cls)
            return
        for inner in _own(node):
            if isinstance(inner, ast.comprehension):
                self._bind(inner.target, inner.iter, known, items=True)
        for inner in _own(node):
            if isinstance(inner, ast.expr):
                self._expression(inner, known)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            known[node.target.id] = self._annotated(node.annotation, node.target.id)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._bind(node.targets[0], node.value, known)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._bind(node.target, node.iter, known, items=True)
        for part in ("body", "orelse", "handlers", "finalbody"):
            for inner in getattr(node, part, ()):
                self._statement(inner, known, cls)

    def _bind(
        self, target: ast.expr, value: ast.expr, known: dict[str, Ref | None], items: bool = False
    ) -> None:
        for name in targets(ast.Assign([target], value)):
            if isinstance(name, ast.Name):
                typed = self._items(value) if items else self._type(value, known)
                known[name.id] = typed if isinstance(target, ast.Name) else None

    def _annotated(self, annotation: ast.expr | None, name: str) -> Ref | None:
        """By its annotation; by its name where that says nothing."""
        if annotation is None:
            return self._contract.roots.get(name)
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):  # X | None
            annotation = annotation.left
        if isinstance(annotation, ast.Name):
            if annotation.id == "Any":
                return self._contract.roots.get(name)
            return self._names.get(annotation.id)
        return None

    def _type(self, value: ast.expr, known: dict[str, Ref | None]) -> Ref | None:
        roots = self._contract.roots
        if isinstance(value, ast.Name):
            return known[value.id] if value.id in known else self._names.get(value.id)
        if isinstance(value, ast.Attribute):
            return roots.get(value.attr.lstrip("_"))
        if isinstance(value, ast.Subscript):
            return self._items(value.value)
        if isinstance(value, ast.Call):
            if isinstance(value.func, ast.Name):
                return self._names.get(value.func.id)
            if isinstance(value.func, ast.Attribute) and value.func.attr in ("get", "pop"):
                return self._items(value.func.value)
        return None

    def _items(self, value: ast.expr) -> Ref | None:
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            value = value.func.value  # x.values(), x.copy()
        if isinstance(value, ast.Call) and len(value.args) == 1:
            value = value.args[0]  # list(x), reversed(x)
        name = getattr(value, "attr", getattr(value, "id", "")).lstrip("_")
        of = getattr(value, "value", None)
        holder = getattr(of, "attr", getattr(of, "id", "")).lstrip("_")
        roots = self._contract.roots
        return roots.get(f"{holder}.{name}[]") or roots.get(f"{name}[]")

    # -- uses

    def _expression(self, node: ast.expr, known: dict[str, Ref | None]) -> None:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                self._attribute(node.func, known, node)
            elif isinstance(node.func, ast.Name) and node.func.id in self._names:
                what = self._names[node.func.id]
                self._found.made.append(Made(what, node, self._place(node)))
        elif isinstance(node, ast.Attribute):
            self._attribute(node, known, None)

    def _attribute(
        self, node: ast.Attribute, known: dict[str, Ref | None], call: ast.Call | None
    ) -> None:
        value = node.value
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id == "super"
        ):
            typed = known.get("self")
        else:
            typed = self._type(value, known)
        if typed is None:
            return
        own = isinstance(value, ast.Name) and value.id == "self"
        if own and call is None:
            return  # of our own object: what it lacks is told by the check of skipped __init__s
        stored = isinstance(node.ctx, ast.Store)
        self._found.attributes.append(Attribute(typed, node.attr, self._place(node), call, stored))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a statement: not its inner statements, nor lambdas' parameters."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler):
            continue
        yield child
        yield from _own(child)


def _on_import_error(handler: ast.ExceptHandler) -> bool:
    names = [one.id for one in ast.walk(handler.type or handler) if isinstance(one, ast.Name)]
    return bool({"ImportError", "ModuleNotFoundError"} & set(names))
