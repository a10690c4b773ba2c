"""`python -m kvmig.launcher.quick_check WORDS` checks the words of `kvmig.serve` as far as that is
possible without the engine's libraries, which take seconds to load.

A fleet's supervisor runs it where no fork server has loaded them. What it lets pass may still be
refused when the model starts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvmig.core.errors import KvmigError
from kvmig.engines.registry import kind_of
from kvmig.launcher import flags
from kvmig.launcher.shapes import own_flags, own_units
from kvmig.process.child import leave, say


def main(words: Sequence[str]) -> int:
    """Exit code 0, or 2 after a line with what is wrong."""
    try:
        config, argv, _ = flags.parse(list(words))
        own_units(config.instance_unit, config.instances)
        kind = kind_of(config.engine)
        kind.prepare()
        for more in ((), *own_flags(config.instance_flags, config.instances).values()):
            kind.check_words([*argv, *more])
    except KvmigError as error:
        say(str(error))
        return 2
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
