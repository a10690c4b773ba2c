"""Which priority class a call is of, by what it names and what its key allows."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from kvmig.asgi.priority import PRIORITY_FIELD, UnknownPriority, checked_header, number_of
from kvmig.core.priorities import PriorityClass, class_of
from kvmig.proxy.refusals import ProxyRefusal, bad

NORMAL_NUMBER = 0
"""Number of the class that a deployment gives to calls that name none."""


class ChosenPriority(NamedTuple):
    """A call's class."""

    waits_as: int
    """Priority of the wait: smaller ones go on first."""
    runs_as: int | None = None
    """Class that the deployment must use, over the call's own; None: the call's own, or none."""


def choose_class(
    classes: Sequence[PriorityClass],
    of_model: int,
    allowed: Sequence[str] | None,
    header: str | None,
    field: Any,
) -> ChosenPriority:
    """Raises ProxyRefusal for a class that the model doesn't have, or that the key may not use.

    of_model: of calls that name none. allowed: classes that the key may use; None: all.
    header, field: what the call names, the header before the body's field; None: nothing.
    """
    try:
        number = None
        if header is not None:
            number = checked_header(header, classes)
        elif field is not None:
            number = number_of(PRIORITY_FIELD, field, classes)
    except UnknownPriority as error:
        raise bad(str(error), "unknown_priority") from error
    if allowed is None:
        return ChosenPriority(of_model if number is None else number)
    own = [one.priority for one in classes if one.name in allowed]
    if number is None:
        number = max(own, default=NORMAL_NUMBER) if NORMAL_NUMBER not in own else NORMAL_NUMBER
    if number not in own:
        name = class_of(classes, number).name
        sentence = f"the API key may not use the priority class {name}, it may use "
        raise ProxyRefusal(HTTPStatus.FORBIDDEN, sentence + ", ".join(allowed), "class_not_allowed")
    return ChosenPriority(number, number)
