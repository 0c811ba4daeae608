"""What all errors of this project are, and what several of them hold."""

from __future__ import annotations

import attrs

from packplan.core.errors.words import shortened


class PackplanError(Exception):
    """
    Base of all errors raised on purpose; its text is bounded, whatever the data or the YAML that it
    quotes.
    """

    def _text(self) -> str:
        """Return what is wrong, and what to do, however long."""
        return super().__str__()

    def __str__(self) -> str:
        return shortened(self._text())


class UserError(PackplanError):
    """The caller can fix it; the text says what is wrong and what to do."""


class ArgumentError(UserError, ValueError):
    """What a library function was given cannot be used: lengths, a batch, the number of ranks."""


class VerificationError(PackplanError):
    """Something stored or shared is not what it claims to be."""


@attrs.frozen
class Fault:
    """One thing wrong with a configuration."""

    path: str
    """Where: `training.packing_min_fill_ratio`."""

    reason: str
    """What is wrong, and the remedy."""

    place: str = ""
    """Where the value stands, if not in the YAML: what the command line says, `training.seed=x`."""

    def __str__(self) -> str:
        place = f" (command line: {self.place})" if self.place else ""
        return f"{self.path}{place}: {self.reason}" if self.path else self.reason


@attrs.frozen
class Difference:
    """One key in which two fingerprints differ."""

    key: str
    stored: object
    current: object

    def __str__(self) -> str:
        return f"{self.key}: stored {self.stored!r}, now {self.current!r}"
