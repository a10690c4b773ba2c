"""What an adapter says of its uses of an engine: a TOML file, so the tool serves any engine."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvmig.core.errors import ConfigError
from kvmig_tools.drift.source import Ref


class _File(msgspec.Struct, forbid_unknown_fields=True):
    package: str
    distributions: list[str]
    supported: list[str]
    ours: list[str]
    roots: dict[str, str]
    flags: list[str]
    judged: str
    skipped: dict[str, list[str]] = {}
    client: list[str] = []
    structs: list[str] = []
    relied: list[str] = []
    routes: list[str] = []


@dataclass(frozen=True)
class Contract:
    """package: the engine's import name; distributions: its names in the registry.

    supported: versions that must not drift from their locks. ours: files and folders that use the
    engine. roots: by the name of a variable or attribute, the class of its value; `name[]` is the
    class of its items. skipped: our classes that don't run their base's `__init__`, with methods
    that are called on them. client: (class, its attribute, our class that stands there). structs:
    those whose fields go over a wire. relied: methods, and functions (in a class ""), whose meaning
    counts, though nothing calls them here. flags: classes whose fields are flags; judged: our
    module with ALLOWED, REFUSED, NO_FLAGS. routes: our module with KNOWN_ROUTES, and the folder of
    the engine's package where its server adds some.
    """

    file: Path
    package: str
    distributions: tuple[str, ...]
    supported: tuple[str, ...]
    ours: tuple[Path, ...]
    roots: dict[str, Ref]
    flags: tuple[Ref, ...]
    judged: str
    skipped: dict[str, tuple[str, ...]] = field(default_factory=dict)
    client: tuple[Ref, str, str] | None = None
    structs: tuple[Ref, ...] = ()
    relied: tuple[tuple[Ref, str], ...] = ()
    routes: tuple[str, str] | None = None

    @property
    def locks(self) -> Path:
        """The folder of its lock files."""
        return self.file.parent / "locks"


def ref(text: str) -> Ref:
    """`module:name`."""
    module, _, name = text.partition(":")
    return module, name


def _relied(text: str) -> tuple[Ref, str]:
    """`module:Class.method`, or `module:function` with no class."""
    module, name = ref(text)
    cls, _, method = name.rpartition(".")
    return (module, cls), method


def load(file: Path, root: Path) -> Contract:
    """Read a contract; `ours` counts from `root`. Raises ConfigError that names the field."""
    try:
        read = msgspec.convert(tomllib.loads(file.read_text("utf-8")), _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, OSError) as error:
        raise ConfigError(f"{file}: {error}") from error
    ours: list[Path] = []
    for name in read.ours:
        path = root / name
        if not path.exists():
            raise ConfigError(f"{file}: ours: {name} is not there")
        ours += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    client = None
    if read.client:
        holder, attribute, stand_in = read.client
        client = (ref(holder), attribute, stand_in)
    return Contract(
        file=file,
        package=read.package,
        distributions=tuple(read.distributions),
        supported=tuple(read.supported),
        ours=tuple(ours),
        roots={name: ref(text) for name, text in read.roots.items()},
        flags=tuple(map(ref, read.flags)),
        judged=read.judged,
        skipped={name: tuple(entries) for name, entries in read.skipped.items()},
        client=client,
        structs=tuple(map(ref, read.structs)),
        relied=tuple(map(_relied, read.relied)),
        routes=(read.routes[0], read.routes[1]) if read.routes else None,
    )
