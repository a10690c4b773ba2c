"""The sources of one version of an engine, as an index: modules, classes, methods, attributes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Ref = tuple[str, str]
"""(module, name)."""


def flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body and of its `if`, `try`, `with`, `for` blocks; no function's."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.ClassDef | Function):
                yield from flat(getattr(node, part, ()))
        for handler in getattr(node, "handlers", ()):
            yield from flat(handler.body)


def targets(node: ast.AST) -> list[ast.expr]:
    """What an assignment assigns to, tuples taken apart."""
    if isinstance(node, ast.Assign):
        found = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For | ast.AsyncFor):
        found = [node.target]
    elif isinstance(node, ast.With | ast.AsyncWith):
        found = [item.optional_vars for item in node.items if item.optional_vars is not None]
    else:
        return []
    parts = (one.elts if isinstance(one, ast.Tuple | ast.List) else [one] for one in found)
    return [one for some in parts for one in some]


def attributes_set(function: ast.AST) -> set[str]:
    """Names X of `self.X = ...` anywhere in a function."""
    return {
        target.attr
        for node in ast.walk(function)
        for target in targets(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


@dataclass(frozen=True)
class Class:
    """One class of the tree."""

    module: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """Its own name."""
        return self.node.name

    @cached_property
    def methods(self) -> dict[str, Function]:
        """Those that its own body defines."""
        return {one.name: one for one in flat(self.node.body) if isinstance(one, Function)}

    @cached_property
    def fields(self) -> dict[str, ast.AnnAssign]:
        """Annotated names of its own body, in their order."""
        return {
            one.target.id: one
            for one in flat(self.node.body)
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }

    @cached_property
    def names(self) -> set[str]:
        """What its own body binds, and what its methods set on `self`."""
        found = set(self.methods) | set(self.fields)
        for node in flat(self.node.body):
            found |= {one.id for one in targets(node) if isinstance(one, ast.Name)}
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
        return found.union(*(attributes_set(one) for one in self.methods.values()))

    @property
    def is_open(self) -> bool:
        """Whether it makes up attributes."""
        return "__getattr__" in self.methods or "__getattribute__" in self.methods


@dataclass
class Module:
    """What one file binds. imported: name -> (module, name there or "" for the module itself)."""

    name: str
    node: ast.Module
    imported: dict[str, Ref] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    defined: dict[str, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the file's own level."""
        for node in flat(self.node.body):
            if isinstance(node, ast.ImportFrom):
                self._import(node)
            elif isinstance(node, ast.Import):
                for one in node.names:
                    self.imported[one.asname or one.name.split(".")[0]] = (
                        one.name if one.asname else one.name.split(".")[0],
                        "",
                    )
            elif isinstance(node, ast.ClassDef | Function):
                self.defined[node.name] = node
            for target in targets(node):
                if isinstance(target, ast.Name):
                    self.defined.setdefault(target.id, node)

    def _import(self, node: ast.ImportFrom) -> None:
        where = node.module or ""
        if node.level:
            parts = self.name.split(".")
            where = ".".join([*parts[: len(parts) - node.level], *filter(None, [node.module])])
        for one in node.names:
            if one.name == "*":
                self.stars.append(where)
            else:
                self.imported[one.asname or one.name] = (where, one.name)

    @property
    def lazy(self) -> set[str]:
        """Names that a module's `__getattr__` may make: the string keys of its dictionaries."""
        if "__getattr__" not in self.defined:
            return set()
        return {
            key.value
            for node in ast.walk(self.node)
            if isinstance(node, ast.Dict)
            for key in node.keys
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        }


class Tree:
    """The package `package` below `folder`, read as it is asked for."""

    def __init__(self, folder: Path, package: str, version: str = "") -> None:
        self.folder = folder
        self.package = package
        self.version = version
        self._modules: dict[str, Module | None] = {}
        self._lineages: dict[Ref, list[Class]] = {}
        self._classes: dict[Ref, Class | None] = {}

    def path(self, module: str) -> Path | None:
        """The file of a module; None if there is none."""
        base = self.folder.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        return None

    def module(self, name: str) -> Module | None:
        """A module by its dotted name."""
        if name not in self._modules:
            path = self.path(name)
            # Relative imports count from the package, which an __init__.py is itself.
            inside = name if path is None or path.name != "__init__.py" else f"{name}.__init__"
            self._modules[name] = (
                None if path is None else Module(inside, ast.parse(path.read_text("utf-8")))
            )
        return self._modules[name]

    def has(self, module: str, name: str) -> bool:
        """Whether `from module import name` finds something."""
        if self.path(f"{module}.{name}") is not None:
            return True
        return (self.find(module, name) is not None) or self._binds(module, name)

    def _binds(self, module: str, name: str) -> bool:
        found = self.module(module)
        return found is not None and (
            name in found.imported
            or name in found.defined
            or name in found.lazy
            or any(self._binds(star, name) for star in found.stars)
        )

    def find(self, module: str, name: str, depth: int = 10) -> tuple[str, ast.AST] | None:
        """The (module, node) that defines a name, through the imports of it; None if unknown."""
        found = self.module(module)
        if found is None or not depth:
            return None
        if name in found.defined:
            return module, found.defined[name]
        if name in found.imported:
            where, what = found.imported[name]
            return self.find(where, what, depth - 1) if what else None
        for star in found.stars:
            if (there := self.find(star, name, depth - 1)) is not None:
                return there
        return None

    def cls(self, module: str, name: str) -> Class | None:
        """A class by where it can be imported from."""
        if (module, name) not in self._classes:
            found = self.find(module, name)
            if found is None or not isinstance(found[1], ast.ClassDef):
                self._classes[module, name] = None
            elif found[0] == module and found[1].name == name:
                self._classes[module, name] = Class(module, found[1])
            else:
                self._classes[module, name] = self.cls(found[0], found[1].name)
        return self._classes[module, name]

    def bases(self, one: Class) -> list[Class]:
        """Direct bases that are in the tree."""
        found = []
        for base in one.node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name) and (cls := self.cls(one.module, plain.id)):
                found.append(cls)
        return found

    def lineage(self, one: Class) -> list[Class]:
        """The class and all bases in the tree, nearest first, each once."""
        key = (one.module, one.name)
        if key not in self._lineages:
            found = [one]
            for cls in found:
                known = {(each.module, each.name) for each in found}
                found += [base for base in self.bases(cls) if (base.module, base.name) not in known]
            self._lineages[key] = found
        return self._lineages[key]

    def names(self, one: Class) -> set[str]:
        """All attributes that instances are known to have."""
        return set().union(*(cls.names for cls in self.lineage(one)))

    def is_open(self, one: Class) -> bool:
        """Whether the class, or a base, makes up attributes."""
        return any(cls.is_open for cls in self.lineage(one))

    def method(self, one: Class, name: str) -> tuple[Class, Function] | None:
        """A method and the class in the lineage that defines it."""
        for cls in self.lineage(one):
            if name in cls.methods:
                return cls, cls.methods[name]
        return None

    def function(self, where: Ref, name: str) -> Function | None:
        """A method of the class `where`, or, where that names only a module, its function."""
        module, owner = where
        if owner:
            cls = self.cls(module, owner)
            found = None if cls is None else self.method(cls, name)
            return None if found is None else found[1]
        there = self.find(module, name)
        return there[1] if there is not None and isinstance(there[1], Function) else None

    def fields(self, one: Class) -> dict[str, ast.AnnAssign]:
        """Fields of a dataclass or struct, those of its bases first."""
        found: dict[str, ast.AnnAssign] = {}
        for cls in reversed(self.lineage(one)):
            found |= cls.fields
        return found

    def modules_named(self, last: str) -> list[str]:
        """Dotted names of modules whose last part is `last`."""
        root = self.folder / self.package
        paths = [*root.rglob(f"{last}.py"), *root.rglob(f"{last}/__init__.py")]
        return sorted(
            ".".join(path.relative_to(self.folder).with_suffix("").parts).removesuffix(".__init__")
            for path in paths
        )
