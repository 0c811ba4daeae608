"""One writer a folder: a lock that the kernel frees when its holder's process is gone."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from filelock import BaseFileLock, FileLock, Timeout

from packplan.adapters import files
from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.errors import OutputError
from packplan.core.ports import ReportProgress

log = logging.getLogger(__name__)

_POLL_S = 0.5


class FolderLock:
    """A `core.ports.Lock`: `write.lock` in a folder, which says who holds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "write.lock"

    def require_writable(self) -> None:
        """Make the folder, and a file in it that goes at once; see `core.ports.Lock`."""
        with files.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder):
                pass

    @contextmanager
    def held(self, *, timeout_s: float, report: ReportProgress, limit_s: float | None = None) -> Iterator[None]:
        """Hold the lock, and sweep away what a killed holder left; see `core.ports.Lock`."""
        with files.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._path)
        started = time.monotonic()
        with progress(
            desc=f"waiting to write {self.folder}", bar_format="{desc} [{elapsed}]", delay=BRIEF_S, leave=False
        ) as bar:
            while not self._acquired(lock):
                holder = self._path.read_text(encoding="utf-8") or "another job"
                waited = time.monotonic() - started
                if timeout_s and waited > timeout_s:
                    reason = f"{holder} writes it, and this run has waited {limit_s or timeout_s:,g} s in all"
                    raise OutputError(str(self.folder), reason, "locked")
                if waited < 2 * _POLL_S:
                    log.info("waiting for %s, which writes %s", holder, self.folder)
                bar.set_postfix_str(holder, refresh=False)
                bar.update()
                report(f"waiting for {holder}, which writes {self.folder}")
        try:
            with files.writing(self.folder):
                self._path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
                files.sweep(self.folder)
            yield
        finally:
            lock.release()

    def _acquired(self, lock: BaseFileLock) -> bool:
        with files.writing(self.folder):
            try:
                lock.acquire(timeout=_POLL_S, poll_interval=_POLL_S / 5)
            except Timeout:
                return False
            return True
