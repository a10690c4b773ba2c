"""Orders of a fleet's servers in their turn: an order of an earlier server is refused. Pure.

Every order has a token. It begins with the term of the server that gives the order, which rises
with each server that leads the fleet, and ends with the number of the server's contact with the one
that carries orders out. A contact begins with its token and then learns what is there. Who carries
out orders remembers the highest token, so an order that was on its way when another server took
over, or when the contact was made again, is either part of what the new contact learns or refused.
So no order is done twice.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

TOKEN_HEADER = "x-kvmig-order-token"
"""Header of orders, and of the requests that begin a contact; without it nothing is fenced."""
_FORM = re.compile(r"(\d{1,18})\.(\d{1,18})", re.ASCII)


class OrderToken(NamedTuple):
    """Orders with lower ones are earlier."""

    term: int = 0
    contact: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` has written. Raises ValueError."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"{TOKEN_HEADER} is {text!a:.60}, must be TERM.CONTACT, two numbers")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.term}.{self.contact}"


NO_TOKEN = OrderToken()
"""The token of orders that people give on a deployment's own API."""
PROGRAM_TOKEN = OrderToken(0, 1)
"""The token of a program's orders, which it decides by what it sees: none is carried out where a
server of a fleet has given one."""


class OrderFence:
    """What one that carries out orders remembers."""

    def __init__(self, highest: OrderToken = NO_TOKEN) -> None:
        """highest: token of the orders before, where a restart would forget it."""
        self.highest = highest

    def refuse(self, token: OrderToken) -> str:
        """Remember the token; return why its order is not carried out, empty if it is.

        An order without a token is always carried out.
        """
        if token == NO_TOKEN:
            return ""
        if token == PROGRAM_TOKEN < self.highest:
            return "a fleet's server gives the orders here, and no other program"
        if token < self.highest:
            return (
                f"the order is of an earlier server of the fleet, or of an earlier connection: its "
                f"token is {token}, must be {self.highest} or higher"
            )
        self.highest = token
        return ""
