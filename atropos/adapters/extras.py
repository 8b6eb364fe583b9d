"""What an adapter says where the package of its host isn't installed."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

PYTHON_312 = frozenset({"harbor", "nemo-gym"})
"""Extras whose hosts need Python 3.12; on older ones they install nothing."""
NO_EXTRA = {
    "deepagents": "deepagents>=0.7.32",
    "google-adk": "google-adk>=2.13",
    "openai-agents": "openai-agents>=0.24",
    "openhands-sdk": "openhands-sdk>=1.58",
    "pydantic-ai": "pydantic-ai-slim>=2.62",
    "tinker-cookbook": "tinker-cookbook[modal]>=0.6.1",
}
"""What hosts are installed as that no extra brings: whoever has an agent in them has them already."""


@contextmanager
def extra(name: str) -> Generator[None]:
    """Around a host's imports: an `ImportError` in them names the extra, or the package, that brings the host.

    Raises:
        ImportError: The host is missing, older than the extra asks for, or needs a later Python.
    """
    try:
        yield
    except ImportError as error:
        cure = f"the adapter needs the extra `{name}`: pip install 'atropos[{name}]'"
        if name in NO_EXTRA:
            cure = f"the adapter needs the package {name}: pip install '{NO_EXTRA[name]}'"
        if name in PYTHON_312 and sys.version_info < (3, 12):
            cure = f"atropos[{name}] needs Python 3.12 or later, this is {sys.version.split()[0]}"
        raise ImportError(f"{cure} ({error})") from error
