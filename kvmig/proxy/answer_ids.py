"""Ids of responses that clients may ask for again (`GET /v1/responses/ID`, ...). Pure.

The proxy chooses the id, not the body, so that any proxy knows whose it is and
which model has it, without keeping anything: the id is a random number and a mark, which only who
has the fleet's pepper can make for a user and a model. Another user's can't be guessed, and of one
that was seen the mark is of the wrong user.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable
from hashlib import blake2b

FORM = re.compile(r"resp_([0-9a-f]{16})([0-9a-f]{32})")
PURPOSE = b"response id"


def new_answer_id(pepper: bytes, user_id: str, model: str) -> str:
    """model: of the catalogue."""
    number = secrets.token_hex(8)
    return f"resp_{number}{_mark(pepper, number, user_id, model)}"


def model_of_answer(
    pepper: bytes, answer_id: str, user_id: str, models: Iterable[str]
) -> str | None:
    """Which of the models has the user's answer; None: there is no such answer of the user's."""
    form = FORM.fullmatch(answer_id)
    if form is None:
        return None
    number, mark = form.groups()
    for model in models:
        if hmac.compare_digest(_mark(pepper, number, user_id, model), mark):
            return model
    return None


def _mark(pepper: bytes, number: str, user_id: str, model: str) -> str:
    text = "\0".join((number, user_id, model)).encode()
    return blake2b(text, key=pepper, digest_size=16, person=PURPOSE).hexdigest()
