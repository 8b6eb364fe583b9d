"""Chromium as the tests of pages use it: each new context costs half the CPU."""

from __future__ import annotations

import shlex
from pathlib import Path

from atropos.api.external.browser import find_chromium
from atropos.api.settings import BrowserSettings

# Of several --disable-features Chromium takes the last alone, so the names go into Playwright's.
WITHOUT_POPUPS = """#!/bin/sh
for argument; do
  shift
  case $argument in --disable-features=*) argument=$argument,WebUIOmniboxPopup,WebUIOmniboxAimPopup ;; esac
  set -- "$@" "$argument"
done
exec {chromium} "$@"
"""


def without_popups(folder: Path) -> str:
    """A program in `folder`: the machine's Chromium, whose windows have no pages for what pops up under an address bar."""
    program = folder / "chromium"
    program.write_text(WITHOUT_POPUPS.format(chromium=shlex.quote(find_chromium(BrowserSettings()) or "chromium")))
    program.chmod(0o755)
    return str(program)
