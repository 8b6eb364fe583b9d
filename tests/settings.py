"""Which tests show the effect of which setting of an env, so that none is left without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])

SHOWN: set[str] = set()


def shows(*fields: str) -> Callable[[Test], Test]:
    """The decorated test sees what these fields change, beyond their being stored."""
    SHOWN.update(fields)

    def unchanged(test: Test) -> Test:
        return test

    return unchanged
