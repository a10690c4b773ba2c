"""What each instance is started with: vLLM's flags for all of them, some of its own, and which
build of vLLM."""

from __future__ import annotations

import math
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvmig.core.config import instance_name
from kvmig.core.errors import ConfigError

USUAL_BLOCK_TOKENS = 16
"""Divides every block size that vLLM chooses by itself."""
NODE_ID = re.compile(r"[0-9a-f]{56}")
"""Id of a Ray node."""

Parse = Callable[[list[str]], Namespace]
"""MODEL and vLLM's flags to vLLM's arguments; raises ConfigError."""
CheckTree = Callable[[str], str]
"""The version of the engine in a folder; raises ConfigError, see `EngineKind.check_tree`."""


@dataclass(frozen=True, slots=True)
class InstanceShape:
    """One instance's part of what it costs and of how its KV cache is cut."""

    own: tuple[str, ...] = ()
    """Flags that only this instance gets, behind those for all."""
    workers: int = 1
    """Tensor-parallel size."""
    block_tokens: int | None = None
    """Tokens per block; None: as vLLM chooses."""
    tree: str = ""
    """Folder of its build of the engine; empty: the installed one."""


@dataclass(frozen=True, slots=True)
class EngineTrees:
    """Folders of the builds of the engine that instances are; an empty one: the installed one."""

    usual: str = ""
    own: Mapping[str, str] = field(default_factory=dict)
    """Trees of instances with another than the usual one, by name."""

    def tree_of(self, name: str) -> str:
        """The tree of the instance `name`."""
        return self.own.get(name, self.usual)

    def after(self, tree: str, names: Sequence[str]) -> EngineTrees:
        """Once these instances have `tree`; no names: all have it, those too that are to come."""
        if not names:
            return EngineTrees(tree)
        return EngineTrees(self.usual, {**self.own, **dict.fromkeys(names, tree)})


def own_flags(given: Sequence[str], instances: int) -> dict[str, tuple[str, ...]]:
    """Parse "i1: --block-size 64" into that instance's flags. Raises ConfigError."""
    flags: dict[str, tuple[str, ...]] = {}
    for words in given:
        name, rest = _named("--instance-flags", words, instances, "flags of vllm serve")
        try:
            flags[name] = (*flags.get(name, ()), *shlex.split(rest))
        except ValueError as error:
            raise ConfigError(f"--instance-flags is {words!r}: {error}") from error
    return flags


def own_trees(given: Sequence[str], instances: int, check: CheckTree) -> EngineTrees:
    """Parse "i1: FOLDER" into that instance's tree. Raises ConfigError."""
    trees: dict[str, str] = {}
    for words in given:
        name, folder = _named("--instance-vllm", words, instances, "a folder")
        try:
            trees[name] = checked_tree(folder, check)
        except ConfigError as error:
            raise ConfigError(f"--instance-vllm is {words!r}: {error}") from error
    return EngineTrees(own=trees)


def own_units(given: Sequence[str], instances: int) -> dict[str, str]:
    """Parse "i1: NAME" into that instance's place in a placement. Raises ConfigError."""
    units = dict(_named("--instance-unit", words, instances, "a name") for words in given)
    for name, unit in units.items():
        if not 0 < len(unit) <= 200:
            raise ConfigError(
                f"--instance-unit is '{name}: {unit:.100}', its name must have 1 to 200 characters"
            )
    return units


def own_gpus(given: Sequence[str], instances: int) -> dict[str, tuple[str, ...]]:
    """Parse "i1: 0,1" into that instance's GPUs, one per worker. Raises ConfigError."""
    gpus: dict[str, tuple[str, ...]] = {}
    for words in given:
        name, listed = _named("--instance-gpus", words, instances, "ids of GPUs")
        gpus[name] = tuple(one.strip() for one in listed.split(","))
        if not all(gpus[name]) or len(set(gpus[name])) < len(gpus[name]):
            raise ConfigError(
                f"--instance-gpus is {words!r:.200}, must have ids of different GPUs with commas"
                " between them"
            )
    return gpus


def own_nodes(given: Sequence[str], instances: int) -> dict[str, str]:
    """Parse "i1: ID" into that instance's Ray node. Raises ConfigError."""
    nodes = dict(_named("--instance-node", words, instances, "a node's id") for words in given)
    for name, node in nodes.items():
        check_node(f"--instance-node '{name}: ID'", node)
    return nodes


def check_node(where: str, node: str) -> None:
    """Raises ConfigError for what is no id of a Ray node. where: the field, for people."""
    if NODE_ID.fullmatch(node) is None:
        raise ConfigError(f"{where} is {node!r:.100}, must be the 56 hexadecimal digits of a node")


def checked_tree(folder: str, check: CheckTree) -> str:
    """The folder with its whole path; empty stays empty. Raises ConfigError."""
    if not folder:
        return ""
    check(folder)
    return str(Path(folder).absolute())


def _named(flag: str, words: str, instances: int, what: str) -> tuple[str, str]:
    """ "i1: more" to ("i1", "more"). Raises ConfigError."""
    names = [instance_name(number) for number in range(instances)]
    name, colon, rest = words.partition(":")
    if not colon or name.strip() not in names:
        raise ConfigError(
            f"{flag} is {words!r}, must be one of {', '.join(names)}, a colon and {what}"
        )
    return name.strip(), rest.strip()


def shapes_of(
    args: Namespace,
    argv: Sequence[str],
    own: Mapping[str, tuple[str, ...]],
    instances: int,
    parse: Parse,
) -> list[InstanceShape]:
    """The shape of each instance. argv: MODEL and the flags for all; args: parsed. Raises
    ConfigError."""
    alike = _shape(args, ())
    shapes = [alike] * instances
    for number in range(instances):
        if words := own.get(instance_name(number)):
            shapes[number] = _shape(parse([*argv, *words]), words)
    return shapes


def unit_tokens(shapes: Sequence[InstanceShape], mixed: bool = False) -> int:
    """Tokens that instances of these shapes can exchange at a time; 0 if they are all alike.

    mixed: instances of other shapes may come. Example: blocks of 32 and of 48 tokens: 16.
    """
    if not mixed and len({(shape.workers, shape.block_tokens) for shape in shapes}) <= 1:
        return 0
    return math.gcd(*(shape.block_tokens or USUAL_BLOCK_TOKENS for shape in shapes))


class InstanceShapes:
    """The shapes of all instances that may ever be there."""

    def __init__(
        self,
        argv: Sequence[str],
        own: Mapping[str, tuple[str, ...]],
        started: Sequence[InstanceShape],
        unit_tokens: int,
        parse: Parse,
        trees: EngineTrees = EngineTrees(),
        check_tree: CheckTree = str,
    ) -> None:
        """argv: MODEL and the engine's flags for all; own: more flags by name.

        started: of the first instances; unit_tokens: what they exchange.
        """
        self.argv = list(argv)
        self.trees = trees
        self.later = ""
        """Flags that instances get behind all others which start from now on without words."""
        self._check_tree = check_tree
        self._own = dict(own)
        self._parse = parse
        self._units = unit_tokens
        self._started = {instance_name(number): one for number, one in enumerate(started)}

    def shape_of(self, name: str, words: str = "", tree: str | None = None) -> InstanceShape:
        """Return the shape of instance `name`, with more flags in `words`.

        tree: None: as its name has it. Raises ConfigError if vLLM doesn't take the flags, if the
        tree holds no vLLM, or if the instance could exchange nothing with the others.
        """
        tree = self.trees.tree_of(name) if tree is None else checked_tree(tree, self._check_tree)
        return replace(self._of(name, words), tree=tree)

    def tree(self, folder: str) -> str:
        """The folder with its whole path, if it holds a build of the engine. Raises ConfigError."""
        return checked_tree(folder, self._check_tree)

    def _of(self, name: str, words: str) -> InstanceShape:
        if not words and not self.later and name in self._started:
            return self._started[name]
        try:
            own = (*self._own.get(name, ()), *shlex.split(words or self.later))
        except ValueError as error:
            raise ConfigError(f"flags is {words or self.later!r}: {error}") from error
        shape = _shape(self._parse([*self.argv, *own]), own)
        alike = next(iter(self._started.values()))
        if self._units:
            fits = (shape.block_tokens or USUAL_BLOCK_TOKENS) % self._units == 0
            allowed = f"a multiple of {self._units}"
        else:
            fits = replace(shape, own=()) == replace(alike, own=())
            allowed = f"{alike.block_tokens or 'left out'} with {alike.workers} workers"
        if not fits:
            raise ConfigError(
                f"--block-size is {shape.block_tokens} with {shape.workers} workers, must be"
                f" {allowed}, which the instances that run exchange"
            )
        return shape


def _shape(args: Namespace, own: tuple[str, ...]) -> InstanceShape:
    return InstanceShape(own, args.tensor_parallel_size, args.block_size)
