"""Programs that tests need: `make test` installs them; where it hasn't, the tests say so."""

from __future__ import annotations

import os
import shutil

import pytest

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
"""Where an ordinary user may not look, too."""


def missing(*programs: str) -> str:
    """Which of them are not here, as a skip's reason; empty where all are."""
    names = ", ".join(name for name in programs if shutil.which(name, path=PATH) is None)
    return names and f"not installed: {names}"


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skips a test where a program is missing."""
    reason = missing(*programs)
    return pytest.mark.skipif(bool(reason), reason=reason or "all is here")


def require(*programs: str) -> None:
    """Skip the running test, or whatever uses the running fixture, where a program is missing."""
    if reason := missing(*programs):
        pytest.skip(reason)
