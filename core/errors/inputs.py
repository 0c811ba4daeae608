"""A run's YAML and data, and where its output goes."""

from __future__ import annotations

import attrs

from packplan.core.errors.base import Fault, UserError
from packplan.core.errors.words import counted


@attrs.define(eq=False)
class ConfigError(UserError):
    """The configuration cannot be used."""

    source: str
    """The YAML, or what else was to be configured."""

    faults: tuple[Fault, ...]

    @classmethod
    def at(cls, path: str, reason: str) -> ConfigError:
        """Return the error of one fault, found after the YAML was read."""
        return cls("the configuration", (Fault(path, reason),))

    def _text(self) -> str:
        count = counted(len(self.faults), "fault")
        return "\n  ".join([f"{self.source} has {count}:", *map(str, self.faults)])


@attrs.define(eq=False)
class RecordError(UserError):
    """One record cannot become a sample."""

    where: str
    """File of the record, and its line or row there: `core.samples.Where` prints it."""

    reason: str

    remedy: str = ""
    """What to set, where the run and not the record is to be changed."""

    @property
    def why(self) -> str:
        """The reason, with the remedy if it has one."""
        return f"{self.reason}: {self.remedy}" if self.remedy else self.reason

    def _text(self) -> str:
        return f"{self.where}: {self.why}"


@attrs.define(eq=False)
class DataSetError(UserError):
    """A data set as a whole cannot be used."""

    reason: str

    def _text(self) -> str:
        return self.reason


@attrs.define(eq=False)
class OutputError(UserError):
    """A file, a folder or a stream cannot be written: no right to, or no room."""

    path: str
    reason: str
    remedy: str = "make room, or choose a training.output_dir that you may write"

    def _text(self) -> str:
        return f"{self.path} cannot be written: {self.reason}; {self.remedy}"
