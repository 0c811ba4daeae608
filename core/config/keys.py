"""
Declaration of YAML keys: default, check, and effect on stored lengths and plans.

The docstring below a key is its text in docs/configuration.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args

import attrs

from packplan.core.errors import Fault

T = TypeVar("T")

Check = Callable[[Any], Iterator[str]]
"""
Function that yields a message for each fault of a value. The message is printed after the key's
name.
"""


def _accept_any(_: object) -> Iterator[str]:
    return iter(())


@attrs.frozen(kw_only=True)
class Key:
    """
    Properties of a YAML key, apart from its type, default and reference text.

    Each key of `RunConfig` declares `lengths` or `plan`, or gives in `neither` the reason why it
    enters no fingerprint.
    """

    check: Check = _accept_any
    """Check that runs on a value that is not None. For a mapping, the check runs on each value."""

    lengths: Literal["value", "value if set", "otherwise"] | None = None
    """
    How the key enters the fingerprint of lengths. `value`: with its value. `value if set`: with its
    value, if the key is set. `otherwise`: through a value that is derived from the key, such as a
    digest of the files that the key names.
    """

    plan: bool = False
    """Whether the fingerprint of a plan depends on the key."""

    neither: str = ""
    """Reason why the key enters neither the fingerprint of lengths nor that of a plan."""

    per_rank: str = ""
    """Reason why ranks may have different values. If empty, all ranks need the same value."""

    stream: Literal["refused", "evaluation"] | None = None
    """
    Whether a stream refuses any value but the default. `refused`: every stream refuses such a
    value. `evaluation`: a stream accepts such a value if the run has an evaluation, which is
    planned.
    """

    set_by_command: bool = False
    """Whether the command sets the field. The YAML cannot set it."""


def key_metadata(**facts: Any) -> dict[Any, Any]:
    """Return attrs metadata with a `Key` that has these fields."""
    return {Key: Key(**facts)}


def key(default: T, **facts: Any) -> T:
    """
    Return an attrs field for a YAML key with a default.

    Args:
        default: Value if the YAML does not set the key.
        facts: Fields of `Key`.
    """
    return attrs.field(default=default, metadata=key_metadata(**facts))


def key_facts(field: attrs.Attribute[Any]) -> Key:
    """Return the properties that a YAML key's field declares."""
    known: Key = field.metadata.get(Key, Key())
    return known


def yield_keys(kind: type, prefix: str = "") -> Iterator[tuple[str, attrs.Attribute[Any]]]:
    """
    Yield the dotted path and the attrs field of each YAML key of a class and its subsections.

    The path of a key in a list of sections contains `[]`, as in `models[].name`. Fields that the
    command sets are left out.
    """
    for field in attrs.fields(attrs.resolve_types(kind)):
        path, item = f"{prefix}{field.name}", next(iter(get_args(field.type)), None)
        if attrs.has(field.type):
            yield from yield_keys(field.type, f"{path}.")
        elif not key_facts(field).set_by_command:
            yield path, field
            if isinstance(item, type) and attrs.has(item):
                yield from yield_keys(item, f"{path}[].")


def key_faults(section: Any, prefix: str = "") -> Iterator[Fault]:
    """Yield the faults that each key's own check finds in a section and its subsections."""
    for field in attrs.fields(type(section)):
        path, value = f"{prefix}{field.name}", getattr(section, field.name)
        if attrs.has(type(value)):
            yield from key_faults(value, f"{path}.")
        elif value is not None:
            values = (
                {f"{path}.{name}": one for name, one in value.items()} if isinstance(value, Mapping) else {path: value}
            )
            for where, one in values.items():
                if one is not None:
                    yield from (Fault(where, reason) for reason in key_facts(field).check(one))


def must(holds: Callable[[Any], bool], wanted: str) -> Check:
    """
    Return a check that accepts the values for which *holds* returns true.

    Args:
        holds: Function that returns whether a value is valid.
        wanted: Description of a valid value, used at the end of the message.

    >>> list(must(lambda value: value < 5, "below 5")(7))
    ['is 7, but has to be below 5']
    """

    def check(value: Any) -> Iterator[str]:
        if not holds(value):
            yield f"is {repr(value) if isinstance(value, str) else value}, but has to be {wanted}"

    return check


def at_least(least: int) -> Check:
    """Return a check that accepts numbers of at least *least*."""
    return must(lambda value: value >= least, f"at least {least}")


def one_of(names: Collection[str]) -> Check:
    """Return a check that accepts only these names."""
    return must(lambda value: value in names, f"one of {', '.join(names)}")


above_0 = must(lambda value: value > 0, "above 0")

from_0_to_1 = must(lambda value: 0 <= value <= 1, "from 0 to 1")

from_0_below_1 = must(lambda value: 0 <= value < 1, "from 0 to below 1")

valid_seed = must(lambda value: 0 <= value < 2**32, "from 0 to 2**32 - 1")


def pattern_faults(value: str) -> Iterator[str]:
    """Yield a fault if a text is not a valid regular expression."""
    try:
        re.compile(value)
    except re.error as error:
        yield f"is not a regular expression ({error}): correct it"
