"""The JSON text of a record -> its value, with everything refused that would be read otherwise."""

import json
import math
from collections import Counter
from typing import Any

from packplan.core.errors import RecordError


def read_value(text: bytes, where: str) -> Any:
    """Return the JSON value of a record's text; RecordError, at *where*, if there is none."""
    try:
        value = json.loads(
            text.decode("utf-8-sig"),
            parse_constant=_no_constant,
            parse_float=_number,
            object_pairs_hook=_unique,
        )
        # One byte is found much sooner than three are, in images of a megabyte.
        if b"\\" in text and (b"\\ud" in text or b"\\uD" in text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start]).strip("'")
        reason = f"has {half} without its other half, which is no character: write the whole pair, or remove it"
        raise RecordError(where, reason) from None
    except UnicodeDecodeError:
        raise RecordError(where, "is not UTF-8 text") from None
    except ValueError as error:
        raise RecordError(where, f"is no valid JSON: {error}") from None
    except RecursionError:
        raise RecordError(where, "is no usable JSON: it is nested too deeply") from None
    return value


def _number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        message = f"the number {text[:40]} is too large: write it as text, in quotes"
        raise ValueError(message)
    return number


def _no_constant(name: str) -> None:
    message = f"{name} is no JSON number"
    raise ValueError(message)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """
    Return an object's keys and values; ValueError if a key is there twice, of which JSON would keep
    the last.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        # In one pass: counting each name would take hours in a long line.
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        message = f"the key {twice!r} is written twice in one object"
        raise ValueError(message)
    return found


def without_nulls(value: Any) -> Any:
    """Return a value without what columns write for keys that it does not have."""
    if isinstance(value, dict):
        return {key: without_nulls(held) for key, held in value.items() if held is not None}
    if isinstance(value, list):
        return [without_nulls(held) for held in value]
    return value
