"""What an adapter says where the package of its host isn't installed."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

PYTHON_312 = frozenset({"harbor", "nemo-gym"})
"""Extras whose hosts need Python 3.12; on older ones they install nothing."""


@contextmanager
def extra(name: str) -> Generator[None]:
    """Around a host's imports: an `ImportError` in them names the extra that brings the host.

    Raises:
        ImportError: The host is missing, older than the extra asks for, or needs a later Python.
    """
    try:
        yield
    except ImportError as error:
        cure = f"the adapter needs the extra `{name}`: pip install 'atropos[{name}]'"
        if name in PYTHON_312 and sys.version_info < (3, 12):
            cure = f"atropos[{name}] needs Python 3.12 or later, this is {sys.version.split()[0]}"
        raise ImportError(f"{cure} ({error})") from error
