"""A check of a body that breaks down is the client's mistake, and its field is named if known.

vLLM's checks of a whole body look into fields before anything has seen to their types. What Python
raises there only means that the body isn't as they expect it.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, SchemaValidator
from vllm.exceptions import VLLMError

BREAKDOWNS = (AttributeError, TypeError, LookupError, ArithmeticError, RecursionError)


class CarefulValidator:
    """Checks a body as `validator` does, and raises ValidationError for all that is wrong with
    it."""

    def __init__(self, validator: SchemaValidator) -> None:
        self._validator = validator

    def validate_python(self, body: Any, **options: Any) -> Any:
        try:
            return self._validator.validate_python(body, **options)
        except BREAKDOWNS as error:
            raise _refuse(self._find_field(body, options), body, error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._validator, name)

    def _find_field(self, body: Any, options: dict[str, Any]) -> str | None:
        """The field that breaks the check by itself. All of them take as long as two checks."""
        if isinstance(body, dict):
            for name, value in body.items():
                if self._breaks({name: value}, options):
                    return str(name)
        return None

    def _breaks(self, body: dict[Any, Any], options: dict[str, Any]) -> bool:
        try:
            self._validator.validate_python(body, **options)
        except VLLMError as error:
            missing = getattr(error, "parameter", None)
            if missing is None or missing in body:
                return False
            return self._breaks({missing: "x", **body}, options)
        except ValidationError:
            return False  # other fields are missing
        except BREAKDOWNS:
            return True
        return False


def _refuse(field: str | None, body: Any, error: Exception) -> ValidationError:
    where = "the body" if field is None else field
    if isinstance(error, KeyError):
        what = f"{where} lacks {error}, which is needed there"
    else:
        what = f"{where} is, or has in it, a value of a type that is not allowed there"
    details = InitErrorDetails(
        type=PydanticCustomError("wrong_type", "{what}", {"what": what}),
        loc=() if field is None else (field,),
        input=None if field is None else body[field],
    )
    return ValidationError.from_exception_data("body", [details])
