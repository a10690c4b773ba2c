"""Ten comparisons of what our sources use with what a tree of the engine has."""

from __future__ import annotations

import ast
import hashlib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from kvmig.core.errors import ConfigError
from kvmig_tools.drift.contract import Contract
from kvmig_tools.drift.routes import unknown_routes
from kvmig_tools.drift.source import Class, Function, Ref, Tree, attributes_set, flat, targets
from kvmig_tools.drift.uses import Derived, Uses

BREAKS, READ = "breaks", "read"


@dataclass(frozen=True)
class Finding:
    """how: BREAKS, or READ for what may still fit; where: a line of ours, or a name of theirs."""

    how: str
    check: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.how:6}  {self.check:10}  {self.where}: {self.what}"


class Facts(msgspec.Struct, frozen=True):
    """What a lock file keeps of a version: by name, as text.

    signatures, bodies: of methods that are called, overridden or relied on; a body's hash leaves
    comments, docstrings and layout out. structs: fields in their order. client: what the engine
    calls on the class that ours stands in for. flags: their names.
    """

    version: str
    signatures: dict[str, str]
    bodies: dict[str, str]
    structs: dict[str, list[str]]
    client: list[str]
    flags: list[str]


def findings(contract: Contract, uses: Uses, tree: Tree, lock: Facts | None) -> list[Finding]:
    """All checks; those against a lock only where there is one."""
    found = [
        *imports(uses, tree),
        *attributes(uses, tree),
        *calls(uses, tree),
        *skipped(contract, uses, tree),
        *overrides(uses, tree),
        *flags(contract, tree),
        *client(contract, uses, tree),
        *unknown(contract, tree),
        *routes(contract, tree),
    ]
    if lock is not None:
        names = {key(where, name) for where, name in relied(contract, uses)}
        found += drifted(lock, facts(contract, uses, tree), names)
    return list(dict.fromkeys(found))


# -- without a lock


def imports(uses: Uses, tree: Tree) -> Iterator[Finding]:
    """Each name that is imported, lazily or not, is where it is looked for."""
    for one in uses.imported:
        if tree.path(one.module) is None:
            there = tree.modules_named(one.module.rpartition(".")[2])
            hint = f"; there is {', '.join(there[:3])}" if there else ""
            yield Finding(BREAKS, "import", str(one.place), f"no module {one.module}{hint}")
        elif one.name and not tree.has(one.module, one.name):
            yield Finding(BREAKS, "import", str(one.place), f"no {one.name} in {one.module}")


def attributes(uses: Uses, tree: Tree) -> Iterator[Finding]:
    """Each attribute of a typed value is one that its class, or a base of it, has."""
    for one in uses.attributes:
        cls = tree.cls(*one.cls)
        if cls is None or one.stored or one.name.startswith("__") or tree.is_open(cls):
            continue
        if one.name not in tree.names(cls) and one.name not in _added(uses, tree, cls):
            yield Finding(BREAKS, "attribute", str(one.place), f"{cls.name} has no {one.name}")


def _added(uses: Uses, tree: Tree, cls: Class) -> set[str]:
    """What our classes add to a class of theirs."""
    found: set[str] = set()
    for one in uses.derived:
        bases = [base for where in one.bases if (base := tree.cls(*where)) is not None]
        if any(cls in tree.lineage(base) for base in bases):
            found |= one.cls.names
    return found


def calls(uses: Uses, tree: Tree) -> Iterator[Finding]:
    """Each call fits the signature of what it calls."""
    for one in uses.attributes:
        cls = tree.cls(*one.cls)
        method = tree.method(cls, one.name) if cls is not None else None
        if one.call is None or cls is None or method is None:
            continue
        bound = not _is_static(method[1])
        if why := misfit(one.call, method[1], bound):
            yield Finding(BREAKS, "call", str(one.place), f"{cls.name}.{one.name}() {why}")
    for made in uses.made:
        found = tree.find(*made.what)
        why = ""
        if found is not None and isinstance(found[1], Function):
            why = misfit(made.call, found[1], bound=False)
        elif found is not None and isinstance(found[1], ast.ClassDef):
            why = _misfit_of_class(made.call, Class(*found), tree)  # type: ignore[arg-type]
        if why:
            yield Finding(BREAKS, "call", str(made.place), f"{made.what[1]}() {why}")


def misfit(call: ast.Call, function: Function, bound: bool) -> str:
    """Why a call's arguments don't fit; "" if they do. bound: the first parameter is given."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args][1 if bound else 0 :]
    required = len(positional) - len(spec.defaults)
    names = {one.arg for one in positional if one not in spec.posonlyargs}
    names |= {one.arg for one in spec.kwonlyargs}
    given = {one.arg for one in call.keywords if one.arg is not None}
    if spec.kwarg is None and given - names:
        return f"takes no {', '.join(sorted(given - names))}"
    if any(isinstance(one, ast.Starred) for one in call.args):
        return ""
    if spec.vararg is None and len(call.args) > len(positional):
        return f"takes {len(positional)} positional arguments, not {len(call.args)}"
    if any(one.arg is None for one in call.keywords):
        return ""
    missing = [one.arg for one in positional[len(call.args) : max(required, 0)]]
    missing += [
        one.arg
        for one, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
        if default is None
    ]
    lacking = [name for name in missing if name not in given]
    return f"needs {', '.join(lacking)}" if lacking else ""


def _is_static(function: Function) -> bool:
    return any(getattr(one, "id", "") == "staticmethod" for one in function.decorator_list)


def _misfit_of_class(call: ast.Call, cls: Class, tree: Tree) -> str:
    init = tree.method(cls, "__init__")
    if init is not None:
        return misfit(call, init[1], bound=True)
    fields = tree.fields(cls)
    given = {one.arg for one in call.keywords if one.arg is not None}
    if not fields or None in {one.arg for one in call.keywords}:
        return ""
    if unknown := given - fields.keys():
        return f"takes no {', '.join(sorted(unknown))}"
    lacking = [
        name
        for name, node in list(fields.items())[len(call.args) :]
        if node.value is None
        and name not in given
        and "ClassVar" not in ast.unparse(node.annotation)
    ]
    return f"needs {', '.join(lacking)}" if lacking else ""


def _of_class(node: ast.AnnAssign) -> bool:
    return "ClassVar" in ast.unparse(node.annotation)


def skipped(contract: Contract, uses: Uses, tree: Tree) -> Iterator[Finding]:
    """Methods that are reached on a class of ours read nothing that only its skipped init sets."""
    for one in uses.derived:
        if one.name not in contract.skipped:
            continue
        bases = [cls for base in one.bases if (cls := tree.cls(*base)) is not None]
        lineage = [cls for base in bases for cls in tree.lineage(base)]
        ours = one.cls.methods
        run = _inits_that_run(one, lineage)
        lost = set().union(*(_only_in_init(cls, run) for cls in lineage))
        lost -= set(ours).union(*(attributes_set(method) for method in ours.values()))
        lost -= set().union(*(_always(cls, run) for cls in lineage))
        called = {name for cls, name in uses.called if tree.cls(*cls) in lineage}
        for reader, name in _reads({*contract.skipped[one.name], *called}, ours, lineage):
            if name in lost:
                what = f"{reader} reads {name}, which only a skipped __init__ sets"
                yield Finding(BREAKS, "skipped", str(one.place), what)


def _inits_that_run(one: Derived, lineage: list[Class]) -> set[str]:
    """Names of the bases whose `__init__` ours calls, by name or by super()."""
    init = one.cls.methods.get("__init__")
    if init is None:
        return {cls.name for cls in lineage}
    called = {
        ast.unparse(node.func.value)
        for node in ast.walk(init)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "__init__"
    }
    if "super()" in called:
        return {cls.name for cls in lineage}
    return {cls.name for cls in lineage if cls.name in called}


def _only_in_init(cls: Class, run: set[str]) -> set[str]:
    """Attributes of a class that its skipped `__init__` sets."""
    init = cls.methods.get("__init__")
    return set() if init is None or cls.name in run else attributes_set(init)


def _always(cls: Class, run: set[str]) -> set[str]:
    """Attributes that a class has whether its skipped `__init__` runs or not."""
    found = set(cls.methods)
    for node in flat(cls.node.body):
        if getattr(node, "value", None) is not None:
            found |= {one.id for one in targets(node) if isinstance(one, ast.Name)}
    if cls.name in run and "__init__" in cls.methods:
        found |= attributes_set(cls.methods["__init__"])
    return found


def _reads(
    entries: Iterable[str], ours: Mapping[str, Function], lineage: list[Class]
) -> Iterator[tuple[str, str]]:
    """(method, attribute) of every read of `self.X` in what the entries reach."""
    waiting: list[tuple[int, str]] = [(-1, name) for name in (*entries, *ours)]
    seen = set(waiting)
    while waiting:
        level, name = waiting.pop()
        found = _at(level, name, ours, lineage)
        if found is None:
            continue
        at, method = found
        for node in ast.walk(method):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield f"{name}()", node.attr
                step = (-1, node.attr)
            elif ast.unparse(node.value) == "super()" and node.attr != "__init__":
                step = (at + 1, node.attr)
            else:
                continue
            if step not in seen and step[1] != "__init__":
                seen.add(step)
                waiting.append(step)


def _at(
    level: int, name: str, ours: Mapping[str, Function], lineage: list[Class]
) -> tuple[int, Function] | None:
    if level < 0 and name in ours:
        return -1, ours[name]
    for at, cls in enumerate(lineage):
        if at >= level and name in cls.methods:
            return at, cls.methods[name]
    return None


def overrides(uses: Uses, tree: Tree) -> Iterator[Finding]:
    """A method of ours takes whatever the one that it stands for takes."""
    for one in uses.derived:
        bases = [cls for base in one.bases if (cls := tree.cls(*base)) is not None]
        for name, ours in one.cls.methods.items():
            theirs = next((found for cls in bases if (found := tree.method(cls, name))), None)
            if theirs is None or name == "__init__" or ours.args.vararg:
                continue
            known = [each.arg for each in (*ours.args.posonlyargs, *ours.args.args)]
            asked = [each.arg for each in (*theirs[1].args.posonlyargs, *theirs[1].args.args)]
            named = {each.arg for each in theirs[1].args.kwonlyargs}
            lacking = asked[len(known) :] + sorted(
                named - set(known) - {each.arg for each in ours.args.kwonlyargs}
            )
            if lacking and not ours.args.kwarg:
                what = f"{theirs[0].name}.{name} takes {', '.join(lacking)}, too"
                yield Finding(BREAKS, "override", f"{one.place.file}:{ours.lineno}", what)


def flags(contract: Contract, tree: Tree) -> Iterator[Finding]:
    """Every flag of the engine is judged."""
    try:
        judged = importlib.import_module(contract.judged)
    except ImportError as error:
        raise ConfigError(f"{contract.file}: judged: {error}") from error
    known = {*judged.ALLOWED, *judged.REFUSED, *judged.NO_FLAGS}
    for name in _flags(contract, tree):
        if name not in known:
            yield Finding(
                BREAKS, "flag", name, f"unjudged: put it into a list of {contract.judged}"
            )


def _flags(contract: Contract, tree: Tree) -> list[str]:
    found = (cls for where in contract.flags if (cls := tree.cls(*where)) is not None)
    return sorted({
        name
        for cls in found
        for name, node in tree.fields(cls).items()
        if not _of_class(node)
    })  # fmt: skip


def client(contract: Contract, uses: Uses, tree: Tree) -> Iterator[Finding]:
    """What the engine calls on the object that ours stands in for, ours or its base has."""
    if contract.client is None:
        return
    ours = next((one for one in uses.derived if one.name == contract.client[2]), None)
    bases = [] if ours is None else [cls for b in ours.bases if (cls := tree.cls(*b)) is not None]
    has = set().union(*(tree.names(cls) for cls in bases), ours.cls.methods if ours else ())
    for name in _client(contract, tree):
        if name not in has:
            yield Finding(BREAKS, "client", contract.client[2], f"{name} is called on it")


def _client(contract: Contract, tree: Tree) -> list[str]:
    """Attributes of `self.ATTRIBUTE` that the holder's methods read."""
    if contract.client is None or (holder := tree.cls(*contract.client[0])) is None:
        return []
    return sorted({
        node.attr
        for node in ast.walk(holder.node)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == contract.client[1]
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    })  # fmt: skip


def unknown(contract: Contract, tree: Tree) -> Iterator[Finding]:
    """What the contract names is there."""
    for where, name in contract.relied:
        if tree.function(where, name) is None:
            yield Finding(BREAKS, "relied", key(where, name), "no such method or function")
    for where in contract.structs:
        if tree.cls(*where) is None:
            yield Finding(BREAKS, "struct", f"{where[0]}:{where[1]}", "no such class")


def routes(contract: Contract, tree: Tree) -> Iterator[Finding]:
    """Each route of the engine's server is open to clients by our table, or closed by name."""
    for file, (method, path) in unknown_routes(contract, tree):
        what = f"{file} has a route that is in no list of ours"
        yield Finding(BREAKS, "route", f"{method} {path}", what)


# -- against a lock


def facts(contract: Contract, uses: Uses, tree: Tree) -> Facts:
    """What is to be kept of this tree."""
    signatures, bodies = {}, {}
    for where, name in sorted(relied(contract, uses)):
        function = tree.function(where, name)
        if function is not None:
            signatures[key(where, name)] = ast.unparse(function.args)
            bodies[key(where, name)] = body_hash(function)
    structs = {
        f"{where[0]}:{where[1]}": [ast.unparse(node) for node in tree.fields(cls).values()]
        for where in contract.structs
        if (cls := tree.cls(*where)) is not None
    }
    return Facts(
        tree.version,
        dict(sorted(signatures.items())),
        dict(sorted(bodies.items())),
        structs,
        _client(contract, tree),
        _flags(contract, tree),
    )


def relied(contract: Contract, uses: Uses) -> set[tuple[Ref, str]]:
    """(class, method) of all that is called, overridden or named by the contract; functions, too,
    whose class is ""."""
    overridden = {
        (base, name) for one in uses.derived for base in one.bases for name in one.cls.methods
    }
    called = {((one.what[0], ""), one.what[1]) for one in uses.made}
    return {*contract.relied, *uses.called, *overridden, *called}


def key(where: Ref, name: str) -> str:
    """A method's in a lock, or a function's."""
    module, cls = where
    return f"{module}:{cls}.{name}" if cls else f"{module}:{name}"


def body_hash(function: Function) -> str:
    """Of what a function does: comments, docstrings and layout don't count."""
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    text = "\n".join(ast.dump(node) for node in body)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def drifted(lock: Facts, now: Facts, names: set[str]) -> Iterator[Finding]:
    """How the tree differs from what was accepted. names: of the methods that still matter."""
    since = f"since {lock.version}"
    for name, was in lock.signatures.items():
        if name not in names:
            continue
        if name not in now.signatures:
            yield Finding(BREAKS, "method", name, f"gone {since}")
        elif now.signatures[name] != was:
            yield Finding(READ, "signature", name, f"({was}) is ({now.signatures[name]}) now")
        if name in now.bodies and now.bodies[name] != lock.bodies[name]:
            yield Finding(READ, "body", name, f"changed {since}: read its diff")
    if lock.version == now.version:
        for name in sorted(now.signatures.keys() - lock.signatures.keys()):
            yield Finding(READ, "method", name, "is used now, and stands in no lock: --accept")
    for name, fields in lock.structs.items():
        yield from _struct(name, fields, now.structs.get(name))
    for name in sorted(set(now.client) - set(lock.client)):
        yield Finding(READ, "client", name, f"called on the engine's client, and was not {since}")
    for name in sorted(set(lock.flags) - set(now.flags)):
        yield Finding(READ, "flag", name, f"gone {since}")


def _struct(name: str, was: list[str], now: list[str] | None) -> Iterator[Finding]:
    if now is None:
        yield Finding(BREAKS, "struct", name, "gone")
        return
    if now[: len(was)] == was and all("=" in one for one in now[len(was) :]):
        for one in now[len(was) :]:
            yield Finding(READ, "struct", name, f"has {one} now")
        return
    lost = [one for one in was if one not in now]
    new = [one for one in now if one not in was]
    needed = [one for one in new if "=" not in one]
    if lost or needed:
        what = "; ".join([*(f"lost {one}" for one in lost), *(f"needs {one}" for one in needed)])
        yield Finding(BREAKS, "struct", name, what)
    else:
        yield Finding(BREAKS, "struct", name, f"its fields are in another order, with {new}")
