"""The C part of the `signal` module, without the enums that the module around it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal as signals
else:
    import _signal as signals

__all__ = ["signals"]
