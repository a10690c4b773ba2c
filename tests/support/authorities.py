"""Which authorities clients in tests and in the processes that tests start trust: one that signs
nothing.

Each client of httpx, and each import of aiohttp, reads all that the machine trusts, which takes
20 to 40 ms of a core; nothing that a test calls has a certificate of theirs. Tests that
speak TLS have an authority of their own (tests/support/certificates.py).
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "SSL_CERT_FILE"
ONE = Path(__file__).with_name("one_authority.pem")
"""Its certificate, which is valid until 2126; its key was never kept."""
MACHINES = os.environ.get(VARIABLE)
"""What the machine's environment says; packages are installed with that."""


def trust_one() -> None:
    """Let this process, and those that it starts from now on, read one certificate."""
    os.environ[VARIABLE] = str(ONE)
