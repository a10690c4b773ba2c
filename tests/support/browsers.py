"""Debian's Chromium, driven by Playwright, and people who use a fleet's page with it.

All waits are bounded. A page that the content security policy stops, or whose script fails, fails
its test.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
DOCS = Path(__file__).parents[2] / "docs"
MOST_PICTURE = 200_000
WAIT_MS = 30_000
START_MS = 90_000
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 860}
VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""


def missing() -> str:
    """Why no browser can be had here; empty: one can."""
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed"
    return "" if CHROMIUM.exists() else f"there is no {CHROMIUM} (Debian's package chromium)"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, or the test is skipped."""
    if why := missing():
        pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=FLAGS, timeout=START_MS
        )
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visitor:
    """One person's browser: its tabs share cookies."""

    context: BrowserContext
    url: str
    problems: list[str] = field(default_factory=list)
    """What pages said is wrong: failed scripts, errors on the console."""
    expected: str = "(?!)"
    """A pattern of problems that the test causes."""

    def open_tab(self, path: str = "") -> Page:
        """A new tab. path: below /ui/."""
        page = self.context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        page.on("console", self._take_line)
        page.add_init_script(VIOLATIONS)
        self.visit(page, path)
        return page

    def _take_line(self, said: ConsoleMessage) -> None:
        if said.type == "error":
            self.problems.append(f"console: {said.text}")

    def visit(self, page: Page, path: str) -> None:
        """Go to a page. path: below /ui/."""
        page.goto(f"{self.url}/ui/{path}", wait_until="load")

    def log_in(self, page: Page, key: str) -> None:
        """From the log-in page."""
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_selector("header .who")

    def check(self) -> None:
        """Nothing was wrong."""
        for page in self.context.pages:
            found: list[str] = page.evaluate("window.violations ?? []")
            self.problems += [f"policy: {one}" for one in found]
        wrong = [one for one in self.problems if not re.search(self.expected, one)]
        assert wrong == []


@contextmanager
def visitor(browser: Browser, url: str, **options: Any) -> Iterator[Visitor]:
    """A person with a browser of their own. options: of Playwright's context."""
    options.setdefault("viewport", DESK)
    context = browser.new_context(**options)
    person = Visitor(context, url)
    try:
        yield person
        if options.get("java_script_enabled", True):
            person.check()
    finally:
        context.close()


def slow_down(page: Page) -> None:
    """Let the page's network be a bad phone's."""
    session = page.context.new_cdp_session(page)
    conditions = {"offline": False, "latency": 300, "downloadThroughput": 40_000,
                  "uploadThroughput": 20_000}  # fmt: skip
    session.send("Network.enable")
    session.send("Network.emulateNetworkConditions", conditions)


def serious_faults(page: Page) -> list[str]:
    """What axe-core finds of accessibility that is serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['help']}: {node['html'][:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def is_too_wide(page: Page) -> bool:
    """Whether the page scrolls sideways."""
    wide: bool = page.evaluate(
        "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    )
    return wide


def take_picture(page: Page, name: str, folder: Path) -> None:
    """A screenshot; with KVMIG_PICTURES in the documentation, else in `folder`."""
    where = DOCS if os.environ.get("KVMIG_PICTURES") else folder
    path = where / f"{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size < MOST_PICTURE
