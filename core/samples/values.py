"""Checks and conversions of single values in records of any shape."""

import ast
import json
from collections.abc import Mapping
from typing import Any, NoReturn


class UnusableRecordError(ValueError):
    """
    A record cannot become a sample. The error's text follows the name of the record in a message.
    """

    def __init__(self, reason: str, argument: str = "") -> None:
        super().__init__(reason)
        self.argument = argument
        """Key of `custom` with which the record could be accepted; empty if there is none."""


def fail(reason: str, *, argument: str = "") -> NoReturn:
    """Raise `UnusableRecordError` with a reason."""
    raise UnusableRecordError(reason, argument)


def is_empty(value: object) -> bool:
    """Return whether a value is null or empty, which is how exports write absent values."""
    return value is None or (isinstance(value, (str, list, Mapping)) and not value)


def has(record: Mapping[str, Any], name: str) -> bool:
    """Return whether a record has a non-empty value for the key *name*."""
    return not is_empty(record.get(name))


def parse_literal(value: Any, name: str) -> Any:
    """
    Parse a text as JSON or a Python literal, and return any other value unchanged.

    Any other text raises an `UnusableRecordError`, whose message contains *name*.
    """
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        try:
            found = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            fail(f"has {name} as a text that is neither JSON nor Python: write a list, or an object")
    if "\\" in value:
        require_encodable(found, name)
    return found


def require_encodable(value: Any, name: str) -> None:
    """
    Raise an error if a text in a value contains half of a surrogate pair. The message contains
    *name*.
    """
    try:
        json.dumps(value, ensure_ascii=False, skipkeys=True, default=str).encode()
    except UnicodeEncodeError:
        fail(f"has half of a surrogate pair in {name}: write the whole pair, or remove it")
