"""docs/dashboard.png from the page of a demo: `make demo`, then `python scripts/picture.py runs/demo/groups.html`."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from atropos.api.external.browser import find_chromium
from atropos.api.settings import BrowserSettings

PICTURE = Path(__file__).parents[1] / "docs" / "dashboard.png"
SIZE = {"width": 1100, "height": 1100}


def main() -> None:
    """Take a picture of the page's top, with the first group and its first passed trajectory open."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(BrowserSettings()), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.goto(Path(sys.argv[1]).resolve().as_uri())
        group = page.locator("main > details", has=page.locator("> details")).first
        group.locator("> summary").click()
        group.locator("> details", has=page.locator("> summary > .good")).first.locator("> summary").click()
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
