"""The error of a process, or a host, that has no file descriptor free.

It says nothing of the other end, which may be there: what could not be opened is tried again, or
stays as it was known.
"""

from __future__ import annotations

import errno

NO_FILE_S = 0.5
"""Pause before a try again."""


def lacks_descriptor(error: BaseException) -> bool:
    """Whether a call has failed for want of a descriptor, or with an error that follows from one
    that has."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.EMFILE, errno.ENFILE):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
