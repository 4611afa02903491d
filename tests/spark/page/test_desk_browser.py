"""The desk in a real browser: on a desktop, on a phone and on paper, with a mouse and with a keyboard alone.

What it looks like is left in `build/page/`, to be looked at.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from tests.support.desk_scene import BOILER, HALL
from tests.support.desk_server import Desk, desk
from tests.support.page_weight import CHROMIUM, browser
from tests.support.waiting import patience

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}: apt-get install chromium"),
]
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 390, "height": 844}
PICTURES = Path("build/page")
TRACKED = re.compile(r"//127\.0\.0\.1:|^data:|^blob:")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def server(scene_warehouse: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with desk(scene_warehouse, tmp_path_factory.mktemp("desk")) as found:
        yield found


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A desktop, which fails the test on any error of ours, and on anything that the page asks of anybody else."""
    context = chromium.new_context(viewport=DESKTOP, color_scheme="light", timezone_id="Asia/Tokyo")
    context.set_default_timeout(patience(20) * 1_000)
    found = context.new_page()
    expect.set_options(timeout=patience(20) * 1_000)
    troubles: list[str] = []
    found.on("pageerror", lambda error: troubles.append(str(error)))
    found.on("console", lambda told: troubles.append(told.text) if told.type == "error" else None)
    found.on("request", lambda request: None if TRACKED.search(request.url) else troubles.append(request.url))
    try:
        yield found
        assert not troubles
    finally:
        context.close()


def picture(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for medium, size in (("desktop", DESKTOP), ("phone", PHONE)):
        page.set_viewport_size(size)
        page.wait_for_timeout(300)
        # Nothing may stand out to the right: nobody scrolls sideways on a phone.
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, medium)
        page.screenshot(path=PICTURES / f"{name}-{medium}.png", full_page=True)
    page.set_viewport_size(DESKTOP)


def shown(page: Page, server: Desk, query: str = "") -> None:
    page.goto(f"{server.address}{query}")
    expect(page.locator("#headline")).to_have_class(re.compile(r"^(well|warn)$"))


def test_a_first_visit_shows_a_curve_and_what_is_missing(page: Page, server: Desk) -> None:
    shown(page, server)
    assert "token" not in page.url
    page.select_option("#device", BOILER)
    page.select_option("#metric", label="celsius")
    headline = page.locator("#headline")
    expect(headline).to_contain_text(
        "115 windows of 1 min: 4 windows still provisional, 2 with a loss, 2 late or changed."
    )
    expect(headline).to_contain_text("1 span of readings missing without a reason, 1 loss with a reason")
    expect(page.locator("#legend")).to_contain_text("final, but readings were lost")
    expect(page.locator("#missing li")).to_have_count(2)
    expect(page.locator("#missing")).to_contain_text("Readings 200 to 211 of boot 7-1a2b are missing.")
    picture(page, "desk")
    page.emulate_media(color_scheme="dark")
    picture(page, "desk-dark")
    page.emulate_media(media="print")
    expect(page.locator("#ask")).to_be_hidden()
    page.screenshot(path=PICTURES / "desk-print.png", full_page=True)


def test_a_click_explains_a_window_and_dragging_zooms_in(page: Page, server: Desk) -> None:
    shown(page, server, f"&device={BOILER}&metric=celsius")
    over = page.locator("#chart .u-over")
    box = over.bounding_box()
    assert box is not None
    over.click(position={"x": box["width"] * 50.5 / 120, "y": 40})
    expect(page.locator("#window h2")).to_have_text("The window 2026-03-14 12:50:00 to 12:51:00 UTC")
    expect(page.locator("#window tbody tr")).to_have_count(3)
    expect(page.locator("#window")).to_contain_text("Final, the sensor's own numbers prove it.")
    expect(page.locator("#window")).to_contain_text("3 values")
    expect(page.locator("#window")).to_contain_text("; last heartbeat 2026-03-14 14:05:00")
    picture(page, "desk-explained")
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page.locator("#headline")).to_contain_text(re.compile("^2[678] windows of 1 min"))
    expect(page.locator("#window")).to_be_hidden()
    assert "since=2026-03-14T12" in page.url
    page.reload()
    expect(page.locator("#headline")).to_contain_text(re.compile("^2[678] windows of 1 min"))
    page.get_by_role("button", name="Zoom out").click()
    expect(page.locator("#headline")).to_contain_text(re.compile("^5[4-9] windows of 1 min"))


def test_a_keyboard_alone_goes_from_window_to_window(page: Page, server: Desk) -> None:
    shown(page, server, f"&device={BOILER}&metric=celsius")
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "chart":
            break
    expect(page.locator("#chart")).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#readout")).to_contain_text("2026-03-14 12:01:00 to 12:02:00: mean ")
    page.keyboard.press("Enter")
    expect(page.locator("#window h2")).to_be_focused()
    expect(page.locator("#window h2")).to_contain_text("12:01:00 to 12:02:00")
    page.locator("[data-sql=windows]").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#sql pre")).to_contain_text("FROM windows\nWHERE device = 'boiler-3'")
    page.keyboard.press("Escape")
    expect(page.locator("#sql")).to_be_hidden()
    page.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#table tbody tr")).to_have_count(115)


def test_what_is_shown_can_be_downloaded(page: Page, server: Desk) -> None:
    shown(page, server, f"&device={HALL}&size=600")
    with page.expect_download() as begun:
        page.locator("#windows-csv").click()
    lines = begun.value.path().read_text().splitlines()
    assert (begun.value.suggested_filename, len(lines)) == ("windows.csv", 10)
    picture(page, "desk-hall")


def test_an_empty_span_leads_to_the_nearest_data(page: Page, server: Desk) -> None:
    shown(page, server, f"&device={HALL}&since=2026-03-14T12:41:00Z&until=2026-03-14T12:49:00Z")
    expect(page.locator("#headline")).to_contain_text(
        "nothing in this span: the last before it is of 2026-03-14T12:39:00Z"
    )
    picture(page, "desk-nothing")
    page.get_by_role("button", name="Show 2026-03-14 12:39:00").click()
    expect(page.locator("#headline")).to_contain_text("windows of 1 min")


def test_a_mistake_is_told_where_it_is_read(chromium: Browser, server: Desk) -> None:
    page = chromium.new_page(viewport=DESKTOP)
    page.goto(f"{server.address}&device=boiler-4")
    expect(page.locator("#headline.bad")).to_have_text("there is no device 'boiler-4' here. Did you mean boiler-3?")
    # It would turn the words behind it round.
    page.goto(f"{server.address}&device=boiler%E2%80%AE-4")
    expect(page.locator("#headline.bad")).to_contain_text(r"there is no device 'boiler\u{202e}-4' here.")
    page.close()
