"""The page of two hundred gateways, one of each trouble: on a desktop, on a phone and on paper, and by keyboard alone.

What it looks like is left in `build/page/`, to be looked at.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from playwright.sync_api import Browser, Page, expect

from spark.cli import main
from spark.desk import tables
from spark.desk.gateway_history import read_history
from spark.desk.nothing import UnknownNameError
from spark.finality.gateway_troubles import OLD_US, UNHEARD
from spark.log.edge_times import Clocks
from spark.page.gateways import CHANGES_MAX, FIRST_MAX, GATEWAYS_MAX, NEXT_MAX, Fleet, fleet, page, verdict
from tests.support import gateway_fleet
from tests.support.desk_server import desk
from tests.support.gateway_fleet import COUNT, EACH, NOON_US, NOTES, ODD, RETIRED
from tests.support.page_weight import CHROMIUM, browser
from tests.support.plain_warehouse import PlainWarehouse
from tests.support.waiting import patience

in_a_browser = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}: apt-get install chromium")
PICTURES = Path("build/page")
A4_PX = 718
NEEDING = len(EACH) - len(NOTES)
OLD = "Nothing was heard of any gateway since 2026-03-14T12:00:00Z: does ingest run?"


def how(warehouse: PlainWarehouse, site: str | None = None, now_us: int = NOON_US) -> Fleet:
    return fleet(tables.open(str(warehouse.path)), now_us, site)


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> PlainWarehouse:
    return gateway_fleet.made(tmp_path_factory.mktemp("fleet") / "warehouse")


def asked_of(warehouse: PlainWarehouse, *options: str) -> Result:
    return CliRunner().invoke(main, ["gateways", "--warehouse", str(warehouse.path), *options])


@pytest.fixture(scope="module")
def written(warehouse: PlainWarehouse, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the command writes at noon."""
    file = tmp_path_factory.mktemp("page") / "fleet.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spark.commands.table_commands.time.time_ns", lambda: NOON_US * 1_000)
        ended = asked_of(warehouse, "--html", str(file))
    assert ended.exit_code == 0, ended.output
    assert f"{NEEDING} of 200 gateways need somebody.\npage written to {file}" in ended.output
    return file


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def opened(chromium: Browser, written: Path) -> Iterator[Page]:
    """The file in a browser, which fails the test on any error, and on anything that the page asks of anybody."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    context.set_default_timeout(patience(20) * 1_000)
    found = context.new_page()
    expect.set_options(timeout=patience(20) * 1_000)
    troubles: list[str] = []
    found.on("pageerror", lambda error: troubles.append(str(error)))
    found.on("request", lambda request: None if request.url.startswith("file:") else troubles.append(request.url))
    try:
        found.goto(written.as_uri())
        yield found
        assert not troubles
    finally:
        context.close()


def test_every_gateway_is_there_once_and_the_worst_is_first(written: Path) -> None:
    text = written.read_text("utf-8")
    assert len(re.findall(r'<details class="gateway"', text)) == COUNT
    assert len(re.findall(r'<a href="#g\d+" title=', text)) == COUNT
    for code in EACH:
        assert f'<span class="quiet">{code}</span>' in text
    assert re.findall(r'<span class="name">([^ ]+)', text)[0] == "gw-000"
    assert RETIRED not in text
    # Names are others' words.
    assert "<b>odd" not in text
    assert "&lt;b&gt;odd" in text
    assert "\u202e" not in text


def test_a_gateways_history_has_its_changes(warehouse: PlainWarehouse) -> None:
    found = how(warehouse)
    by_name = {each.now.gateway: each for each in found.gateways}
    full = by_name[f"gw-{EACH.index('buffer-full'):03}"].history
    assert (full[-1].level, full[-1].conditions) == ("bad", ("buffer-full",))
    assert full[-1].from_us == gateway_fleet.NOON_US - 8 * gateway_fleet.HOUR_US
    # Each of them was without Kafka for five hours, and then well again.
    assert [then.level for then in by_name[ODD].history if then.conditions == ("kafka-unreached",)] == ["warn"]
    assert all(len(each.history) <= CHANGES_MAX for each in found.gateways)


def test_hours_without_a_state_are_in_the_history(tmp_path: Path) -> None:
    warehouse = PlainWarehouse(tmp_path / "warehouse")
    full = gateway_fleet.Told(0, "1.2.0", "buffer-full")
    hours = (30, 29, 20, 19)
    warehouse.take(*gateway_fleet.told_rows("gw-1", [full._replace(hours=each) for each in hours]))
    warehouse.take(*gateway_fleet.told_rows("gw-2", [full]))
    source, folder = tables.open(str(warehouse.path)).source, str(warehouse.folder)
    (found,) = read_history(source, folder, Clocks(), NOON_US, [("plant", "gw-1")]).values()
    ago_h = [(gateway_fleet.NOON_US - then.from_us) / gateway_fleet.HOUR_US for then in found]
    assert [*zip(ago_h, [then.level for then in found], strict=True)] == [(30, "bad"), (27, UNHEARD), (20, "bad")]


def test_a_page_of_one_site_has_its_gateways_only(warehouse: PlainWarehouse) -> None:
    found = how(warehouse, "Jena")
    assert {each.now.site for each in found.gateways} == {"Jena"}
    assert page(found).count('<details class="gateway"') == len(found.gateways)


def test_a_site_that_nobody_knows_is_told(warehouse: PlainWarehouse, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"there is no site .Jnea. here\. Did you mean Jena"):
        how(warehouse, "Jnea")
    for options in (["--html", str(tmp_path / "fleet.html")], ["--trouble"], []):
        ended = asked_of(warehouse, "--site", "Jnea", *options)
        assert ended.exit_code == 2
        assert "Did you mean Jena" in ended.output
    assert not [*tmp_path.iterdir()]


def test_more_gateways_than_a_browser_takes_are_counted(warehouse: PlainWarehouse) -> None:
    found = how(warehouse)
    many = replace(found, gateways=[*found.gateways] * 11)
    text = page(many)
    assert text.count('<details class="gateway"') == GATEWAYS_MAX
    assert f"no room for 200 more gateways. {NEEDING} of these need somebody." in text
    assert f'data-count="{len(many.gateways)}"' in text
    more = 11 * NEEDING - FIRST_MAX - NEXT_MAX
    but = f"except {NEEDING} that the page has no room for"
    assert f"{more} more need somebody. They come next in the list below, {but}." in text
    well = [each for each in found.gateways if not each.now.troubles]
    text = page(replace(found, gateways=well * 20))
    assert f"no room for {20 * len(well) - GATEWAYS_MAX:,} more gateways. None of these needs somebody." in text


def test_a_verdict_says_how_many_are_well(warehouse: PlainWarehouse) -> None:
    found = how(warehouse)
    bad, well = found.gateways[0], [each for each in found.gateways if not each.now.troubles]
    assert verdict(replace(found, gateways=well[:7])) == "All 7 gateways are well."
    assert verdict(replace(found, gateways=well[:1])) == "The only gateway is well."
    assert verdict(replace(found, gateways=[bad])) == "1 of 1 gateway needs somebody."
    assert verdict(replace(found, gateways=[])) == "There is no gateway here that is not retired."


def test_tables_that_end_long_ago_are_told_instead_of_how_the_gateways_are(
    warehouse: PlainWarehouse, tmp_path: Path
) -> None:
    found = how(warehouse, now_us=NOON_US + OLD_US)
    assert verdict(found).endswith(" need somebody.")
    found = how(warehouse, now_us=NOON_US + OLD_US + 1)
    assert verdict(found) == OLD
    well = [each for each in found.gateways if not each.now.troubles]
    assert '<section id="headline" class="bad">' in page(replace(found, gateways=well))
    file = tmp_path / "fleet.html"
    assert OLD in asked_of(warehouse, "--html", str(file)).output
    assert OLD in file.read_text("utf-8")
    assert asked_of(warehouse, "--html", str(file), "--trouble", "--site", "Jena").exit_code == 1


@in_a_browser
def test_it_fits_a_desktop_a_phone_and_paper(opened: Page) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    expect(opened.locator("#headline")).to_contain_text(f"{NEEDING} of 200 gateways need somebody.")
    expect(opened.locator("#first li:visible")).to_have_count(FIRST_MAX)
    for name, width, media, scheme in (
        ("desktop", 1280, "screen", "light"),
        ("dark", 1280, "screen", "dark"),
        ("phone", 390, "screen", "light"),
        ("print", A4_PX, "print", "light"),
    ):
        opened.emulate_media(media=media, color_scheme=scheme)  # type: ignore[arg-type]
        opened.set_viewport_size({"width": width, "height": 844})
        assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        opened.screenshot(path=PICTURES / f"gateways-{name}.png", full_page=True)
        if media == "print":
            expect(opened.locator("#ask")).to_be_hidden()
            expect(opened.locator("details.gateway").last).to_be_visible()
            expect(opened.locator("#first li:visible")).to_have_count(FIRST_MAX)
            opened.pdf(path=PICTURES / "gateways.pdf", prefer_css_page_size=True, print_background=True)
            # What each of them needs is on paper.
            expect(opened.locator("#first li:visible")).to_have_count(NEEDING)


@in_a_browser
def test_filters_leave_what_is_asked_for(opened: Page) -> None:
    shown, marks = opened.locator("details.gateway:visible"), opened.locator("#map a:visible")
    expect(shown).to_have_count(COUNT)
    opened.select_option("[name=version]", "1.1.4")
    count = shown.count()
    assert 0 < count < COUNT
    expect(marks).to_have_count(count)
    expect(opened.locator("#matching")).to_have_text(f"{count} of 200 are shown.")
    opened.select_option("[name=state]", "bad")
    assert shown.count() < count
    opened.get_by_role("button", name="Show all").click()
    expect(shown).to_have_count(COUNT)
    opened.fill("[name=words]", "BUFFER-full")
    expect(shown).to_have_count(1)
    opened.fill("[name=words]", "pump-77")
    expect(shown).to_have_count(1)
    opened.select_option("[name=site]", "without a site")
    expect(shown).to_have_count(0)


@in_a_browser
def test_filters_tell_how_many_there_are_beside_those_on_the_page(
    opened: Page, warehouse: PlainWarehouse, tmp_path: Path
) -> None:
    found, file = how(warehouse), tmp_path / "many.html"
    file.write_text(page(replace(found, gateways=[*found.gateways] * 11)), encoding="utf-8")
    opened.goto(file.as_uri())
    expect(opened.locator("#matching")).to_have_text(f"{GATEWAYS_MAX} of {11 * COUNT} are shown.")
    opened.emulate_media(media="print")
    expect(opened.locator("#headline")).to_contain_text("no room for 200 more gateways")
    opened.emulate_media(media="screen")
    opened.screenshot(path=PICTURES / "gateways-many.png")


@in_a_browser
def test_a_keyboard_alone_opens_a_gateway(opened: Page) -> None:
    opened.locator("#first a").first.focus()
    opened.keyboard.press("Enter")
    expect(opened.locator("#g0 summary")).to_be_focused()
    expect(opened.locator("#g0")).to_contain_text("The last 7 days")
    expect(opened.locator("#g0 svg")).to_be_visible()
    opened.keyboard.press("Tab")
    expect(opened.locator("#g1 summary")).to_be_focused()
    opened.keyboard.press("Enter")
    expect(opened.locator("#g1 .told")).to_be_visible()
    opened.screenshot(path=PICTURES / "gateways-opened.png")
    opened.set_viewport_size({"width": 390, "height": 844})
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    opened.screenshot(path=PICTURES / "gateways-opened-phone.png")


@in_a_browser
def test_the_desk_shows_the_same_page(chromium: Browser, warehouse: PlainWarehouse, tmp_path: Path) -> None:
    with desk(str(warehouse.path), tmp_path) as server:
        answer = server.get("/gateways.html")
        # Its tables end long ago.
        now = how(warehouse, now_us=time.time_ns() // 1_000)
        assert (answer.status, answer.text) == (200, page(now))
        found = chromium.new_page()
        found.goto(server.address)
        # There are no readings, and the page of curves says so.
        expect(found.locator("#headline.bad")).to_be_visible()
        refused: list[str] = []
        found.on("console", lambda told: refused.append(told.text) if told.type == "error" else None)
        found.get_by_role("link", name="All gateways").click()
        # Its script runs under the policy that it comes with.
        expect(found.locator("#matching")).to_have_text("All 200 are shown.")
        expect(found.locator("#ask")).to_be_visible()
        found.close()
        assert not refused
        assert server.get("/gateways.html", {"site": "Jena"}).text.count('<details class="gateway"') < COUNT
        answer = server.get("/gateways.html", {"site": "Jnea"})
        assert (answer.status, "Did you mean Jena" in answer.text) == (404, True)


def test_a_file_that_is_no_page_is_refused(warehouse: PlainWarehouse, tmp_path: Path) -> None:
    asked = ["gateways", "--warehouse", str(warehouse.path), "--html", str(tmp_path / "fleet.txt")]
    ended = CliRunner().invoke(main, asked)
    assert ended.exit_code == 2
    assert "does not end in .html" in ended.output


@pytest.mark.parametrize("options", [("--limit", "5"), ("--json",), ("--csv",), ("--out", "rows.csv")])
def test_a_page_has_no_rows_to_choose(warehouse: PlainWarehouse, tmp_path: Path, options: tuple[str, ...]) -> None:
    file = tmp_path / "fleet.html"
    ended = asked_of(warehouse, "--html", str(file), *options)
    assert ended.exit_code == 2
    assert f"leave out {options[0]}" in ended.output
    assert not file.exists()
    # Beside it, --trouble shows rows.
    assert asked_of(warehouse, "--html", str(file), "--trouble", "--limit", "5").exit_code == 1
    assert file.exists()
