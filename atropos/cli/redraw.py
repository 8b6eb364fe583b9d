"""Output that follows something: in one place on a terminal, one after the other elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

from rich.console import Console, RenderableType
from rich.live import Live


@contextlib.contextmanager
def redrawn(console: Console, *, screen: bool = False) -> Generator[Callable[[RenderableType], None]]:
    """A function that shows something in the place of what it showed before; in a file or pipe, after it.

    With `screen` it takes the whole terminal.
    """
    if not console.is_terminal:
        yield console.print
        return
    with Live(console=console, auto_refresh=False, screen=screen) as live:
        yield lambda shown: live.update(shown, refresh=True)
