"""The audit log: a JSON object a line, appended to a file that others may rotate."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

from atropos.errors import ConfigError

_log = logging.getLogger(__name__)


class AuditLog:
    """Appends lines to a file, each with one write; opens it anew once it was moved away. `path` None: there is none.

    Raises:
        ConfigError: the file can't be opened.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._fd = -1
        self._failed = False
        if self._path is not None:
            try:
                self._reopen(self._path)
            except OSError as error:
                raise ConfigError(f"audit_file: {path}: {error.strerror}") from None

    def write(self, **what: object) -> None:
        """Append a line, after the time. A file that can't be written is an error in the log, once until it can."""
        if self._path is None:
            return
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **what}) + "\n"
        try:
            self._reopen(self._path)
            os.write(self._fd, line.encode())
        except OSError as error:
            if not self._failed:
                _log.error("the audit log %s can't be written: %s", self._path, error.strerror)
            self._failed = True
        else:
            self._failed = False

    def _reopen(self, path: Path) -> None:
        """Open the file, unless it is the one that is open."""
        # At each line: programs that rotate logs rename the file, and this process waits for no signal of theirs.
        try:
            there = path.stat()
        except FileNotFoundError:
            there = None
        if self._fd >= 0:
            here = os.fstat(self._fd)
            if there is not None and (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                return
            self.close()
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
