"""Lock that lets one process write to a folder; the kernel releases it when the process ends."""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packplan.adapters import files
from packplan.core.errors import OutputError
from packplan.core.ports import ReportProgress

log = logging.getLogger(__name__)


class FolderLock:
    """
    A `core.ports.Lock` that locks the file `write.lock` in a folder.

    The file names the process that has the lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "write.lock"

    @contextmanager
    def hold(self, *, timeout_s: float, report: ReportProgress) -> Iterator[None]:
        """
        Hold the lock, and remove unfinished files that a killed process left in the folder.

        See `core.ports.Lock`.
        """
        files.make_folder(self.folder)
        started = time.monotonic()

        def report_holder() -> str:
            holder = self._path.read_text(encoding="utf-8") or "another job"
            waited = time.monotonic() - started
            if timeout_s and waited > timeout_s:
                reason = f"{holder} is writing to it, and this run has waited for {waited:,.0f} s"
                raise OutputError(str(self.folder), reason, "locked")
            if waited < 2 * files.POLL_S:
                log.info("waiting for %s, which is writing to %s", holder, self.folder)
            report(f"waiting for {holder}, which is writing to {self.folder}")
            return holder

        with files.hold_lock(self._path, f"to write {self.folder}", wait=report_holder):
            with files.wrap_write_errors(self.folder):
                self._path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
                files.remove_unpublished(self.folder)
            yield
