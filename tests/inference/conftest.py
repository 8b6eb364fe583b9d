"""Prints how many tokens were compared."""

from __future__ import annotations

from tests.inference.exactness import COUNTS


def pytest_terminal_summary(terminalreporter):
    if COUNTS:
        terminalreporter.section("sampled tokens, of which 0 differ")
        for what, count in [*COUNTS.items(), ("all", sum(COUNTS.values()))]:
            terminalreporter.write_line(f"{count:>9,}  {what}")
