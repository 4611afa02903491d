"""The status page in a real browser, on a phone and on a desktop, before a real daemon with real sensors.

What it looks like is left in `build/page/`, to be looked at.
"""

import re
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from demo.kafka_broker import Broker
from gateway.listener.credentials import add
from tests.support.page_weight import CHROMIUM, browser, log_in, page_weight
from tests.support.status_page_site import PASSWORD, Site, add_sensors, site
from tests.support.waiting import patience, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}: apt-get install chromium"),
]
PHONE: ViewportSize = {"width": 390, "height": 844}
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
PICTURES = Path("build/page")
MISTAKES = re.compile(r"Content Security|TypeError: (?!Failed to fetch)|ReferenceError|SyntaxError|RangeError")
"""Console messages that the network does not cause."""
KILOBYTES_MAX = 60
FIRST_PAINT_MS_MAX = 2_000
"""On an idle machine it takes a tenth."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A phone, which fails the test on any error of ours, and on anything that the page asks of anybody else."""
    context = chromium.new_context(viewport=PHONE, device_scale_factor=2, color_scheme="light")
    context.set_default_timeout(patience(30) * 1_000)
    found = context.new_page()
    expect.set_options(timeout=patience(30) * 1_000)
    troubles: list[str] = []
    found.on("pageerror", lambda error: troubles.append(str(error)))
    found.on("console", lambda told: troubles.append(told.text) if MISTAKES.search(told.text) else None)
    found.on("request", lambda request: None if "//127.0.0.1:" in request.url else troubles.append(request.url))
    try:
        yield found
        assert not [trouble for trouble in troubles if not trouble.startswith("data:")]
    finally:
        context.close()


def picture(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for device, size in (("phone", PHONE), ("desktop", DESKTOP)):
        page.set_viewport_size(size)
        # Nothing may stand out to the right: nobody scrolls sideways on a phone.
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, device)
        page.screenshot(path=PICTURES / f"{name}-{device}.png", full_page=True)
    page.set_viewport_size(PHONE)


def test_a_wrong_password_is_said_to_be_wrong(page: Page, tmp_path: Path) -> None:
    with site(tmp_path) as gateway:
        page.goto(gateway.url)
        expect(page.locator("#password")).to_be_focused()
        page.keyboard.type("nonsense")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("That is not the password of this gateway.")
        picture(page, "refused")
        page.keyboard.type(PASSWORD)
        page.keyboard.press("Enter")
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#gateway")).to_have_text("gw1")
        page.get_by_role("button", name="Log out").click()
        expect(page.locator("#password")).to_be_visible()


@pytest.mark.kafka
def test_all_is_well_and_stays_up_to_date(page: Page, kafka: Broker, tmp_path: Path) -> None:
    with site(tmp_path, kafka.bootstrap) as gateway:
        add_sensors(gateway)
        log_in(page, gateway.url, PASSWORD)
        expect(page.locator("#headline.well .words")).to_contain_text("All is well: 4 devices are heard")
        expect(page.locator("#uplink")).to_have_text("Up")
        expect(page.locator("#disk")).to_contain_text(re.compile(r"The card was spared \d+ readings and events today"))
        row = page.locator("tbody[data-device='thermo-1']")
        expect(row.locator(".reading")).to_contain_text(re.compile(r"celsius\s*\d+"))
        before = row.locator(".reading").inner_text()
        wait_until(lambda: row.locator(".reading").inner_text() != before, words="another value")
        page.fill("#search", "HYGRO")
        expect(page.locator("#table tbody")).to_have_count(1)
        page.fill("#search", "")
        expect(page.locator("#table tbody")).to_have_count(4)
        picture(page, "well")
        page.emulate_media(color_scheme="dark")
        picture(page, "well-dark")


def test_alarms_in_words_and_a_gateway_that_does_not_answer(page: Page, tmp_path: Path) -> None:
    with site(tmp_path) as gateway:
        add_sensors(gateway)
        add(tmp_path / "devices.json", ["attic"], datetime.now(UTC))
        log_in(page, gateway.url, PASSWORD)
        headline = page.locator("#headline.warn")
        expect(headline).to_contain_text("Kafka has not been reached for")
        expect(headline).to_contain_text("safe on this box")
        expect(headline).to_contain_text("sluice check")
        expect(page.locator("#devices-count")).to_have_text(re.compile(r"; not heard yet: attic$"))
        lose_some(gateway)
        expect(page.locator("tbody[data-device='thermo-1'] td.lost")).to_contain_text("≥")
        gateway.process.send_signal(signal.SIGSTOP)
        try:
            expect(page.locator("#link.lost")).to_contain_text("does not answer: last heard")
            picture(page, "lost")
        finally:
            gateway.process.send_signal(signal.SIGCONT)
        expect(page.locator("#link")).to_have_text("live")
        picture(page, "alarms")
        page.emulate_media(color_scheme="dark")
        picture(page, "alarms-dark")


def lose_some(gateway: Site) -> None:
    """Some readings are lost on their way, once the device is known."""
    wait_until(lambda: gateway.log_in() and "thermo-1" in str(gateway.state()["devices"]), words="the device")
    time.sleep(5)
    gateway.sensors[0].skip(20)


def test_names_and_values_that_are_meant_to_harm_are_text(page: Page, tmp_path: Path) -> None:
    with site(tmp_path) as gateway:
        evil = "<img src=x onerror=alert(1)>"
        from tests.support.gateways import publish

        for number in range(3):
            publish(gateway.mqtt_port, "device/42/thermo", f'{{"{evil}": "{evil}", "boot": "b", "seq": {number}}}')
        log_in(page, gateway.url, PASSWORD)
        expect(page.locator("td.reading")).to_contain_text(evil)
        assert page.locator("td.reading img").count() == 0


def test_the_page_is_light(page: Page, tmp_path: Path) -> None:
    with site(tmp_path) as gateway:
        add_sensors(gateway)
        weight = page_weight(page, gateway.url, PASSWORD)
        assert weight.kilobytes < KILOBYTES_MAX
        assert weight.first_paint_ms < patience(FIRST_PAINT_MS_MAX)
        assert weight.requests <= 6
        # Nobody looks: nothing is asked.
        page.evaluate("Object.defineProperty(document, 'hidden', {get: () => true})")
        page.wait_for_timeout(1_000)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(3_000)
        assert asked == []
