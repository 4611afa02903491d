"""Measures the status page's bytes on the wire, and the time until a browser has painted something of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.waiting import wait_until

CHROMIUM = Path("/usr/bin/chromium")
"""Debian's."""
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
"""Tests run as root, and where nothing is to be asked of the internet."""
HAS_CURVES = "performance.getEntriesByType('resource').some((got) => got.name.includes('/api/curves'))"
"""A browser lists what it has whole."""


class PageWeight(NamedTuple):
    """The first load after a log-in, with nothing cached: page, script, style, and the first figures and curves."""

    kilobytes: float
    """On the wire, headers included."""
    first_paint_ms: float
    """First contentful paint, from when the page was asked for."""
    requests: int


@contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield found
        finally:
            found.close()


def log_in(page: Page, url: str, password: str) -> None:
    """Log in as a person does, and wait for the figures."""
    page.goto(url)
    page.fill("#password", password)
    page.click("button")
    page.wait_for_selector("#cards:not([hidden])")


def page_weight(page: Page, url: str, password: str) -> PageWeight:
    """Log in, forget what was cached, and load the page anew, until the browser has all of its curves."""
    log_in(page, url, password)
    # What the first page still asks must not be counted, nor waited for: the browser drops it without a word.
    page.goto("about:blank")
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.clearBrowserCache")
    sizes: list[int] = []

    def finished(event: dict[str, Any]) -> None:
        sizes.append(int(event["encodedDataLength"]))

    session.on("Network.loadingFinished", finished)
    page.goto(url)
    wait_until(lambda: page.evaluate(HAS_CURVES), words="the curves")
    page.wait_for_selector("#cards:not([hidden])")
    page.wait_for_timeout(300)
    painted: float = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    session.detach()
    return PageWeight(sum(sizes) / 1_000, painted, len(sizes))
