"""`sluice-cloud explain` and `report` on an hour in which much goes wrong: figures counted by hand, without Java."""

import csv
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from spark.cli import FAILED, main
from spark.engine.interpreted_queries import interpreted_if
from tests.support import desk_story as story
from tests.support.page_weight import CHROMIUM, browser

pytestmark = pytest.mark.spark

PICTURES = Path("build/report")
"""Pages as they look, to be looked at."""
A4_PX = 703
"""Width of the paper within its margins."""
SLUICE_CLOUD = str(Path(sys.executable).parent / "sluice-cloud")


@pytest.fixture(scope="module")
def warehouse(spark: SparkSession, empty_warehouse: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(shutil.copytree(empty_warehouse, tmp_path_factory.mktemp("story") / "warehouse"))
    with interpreted_if(spark, small=True):
        return story.make(spark, path)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)


def asked(warehouse: str, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--warehouse", warehouse], catch_exceptions=False)


def explained(warehouse: str, window: str, *words: str, device: str = "42") -> dict[str, Any]:
    shown = asked(warehouse, "explain", "--device", device, "--window", f"2026-03-14T{window}", "--json", *words)
    assert shown.exit_code == 0, shown.output
    told: dict[str, Any] = json.loads(shown.stdout)
    return told


def test_a_window_is_explained_down_to_its_records_in_kafka(warehouse: str) -> None:
    told = explained(warehouse, "12:20:30")
    assert (told["window"]["status"], told["window"]["basis"], told["window"]["n"]) == ("complete", "sequence", 6)
    records = {
        (record.key, round(story._time(record))): record
        for batch in story.batches()
        for record in batch
        if record.topic == "device-thermo"
    }
    wanted = [records[b"42", second] for second in range(1_200, 1_260, 10)]
    assert [(row["topic"], row["partition"], row["offset"]) for row in told["readings"]] == [
        (record.topic, record.partition, record.offset) for record in wanted
    ]
    assert [row["device_sequence"] for row in told["readings"]] == [*range(120, 126)]
    assert {row["kafka_timestamp"][11:19] for row in told["readings"]} == {"12:30:05"}
    assert told["window"]["late"] == 6


def test_a_window_tells_what_it_lacks_and_why(warehouse: str) -> None:
    waits = explained(warehouse, "12:05:00")
    assert waits["window"]["status"] == "provisional"
    assert waits["window"]["why"] == "reading 30 of boot 7-1a2b is missing"
    assert [(row["first"], row["last"], row["explained"]) for row in waits["missing"]] == [(30, 30, False)]
    lost = explained(warehouse, "12:10:00")
    assert lost["window"]["status"] == "complete_with_loss"
    (gap,) = lost["missing"]
    assert (gap["first"], gap["last"], gap["count"], gap["reasons"]) == (60, 62, 3, ["sensor-ring-overflow"])
    unnumbered = explained(warehouse, "12:05:00", device="43")
    assert [(row["first"], row["count"], row["reasons"]) for row in unnumbered["missing"]] == [
        (None, 5, [story.REASON])
    ]


def test_a_revised_window_has_its_history(warehouse: str) -> None:
    told = explained(warehouse, "12:33:00")
    before, after = told["changes"]
    assert [(row["cause"], row["n"], row["n_then"], row["late"]) for row in (before, after)] == [
        ("readings", 5, 5, 0),
        ("readings", 1, 6, 1),
    ]
    assert after["sum_then"] == told["window"]["sum"]


def test_the_gateway_that_is_late_is_named_with_what_it_told_last(warehouse: str) -> None:
    (gateway,) = explained(warehouse, "12:56:00")["gateways"]
    assert gateway["waits"] == ["gateway gw-1 has not acknowledged past it"]
    assert (gateway["heartbeat_time"], gateway["depth_rows"]) == ("2026-03-14T12:55:00.000000Z", 7)
    (gateway,) = explained(warehouse, "12:15:00")["gateways"]
    assert (gateway["waits"], gateway["readings"]) == ([], 6)


def test_a_longer_window_lists_its_places_in_kafka_and_not_all_readings(warehouse: str) -> None:
    told = explained(warehouse, "12:00:00", "--size", "3600", "--limit", "3")
    mine = [second for device, second, _ in story.readings() if device == "42"]
    assert (told["readings_count"], len(told["readings"]), told["window"]["n"]) == (len(mine), 3, len(mine))
    (place,) = told["places"]
    assert (place["topic"], place["partition"], place["readings"]) == ("device-thermo", 0, len(mine))
    assert told["changes"][-1]["n_then"] == len(mine)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--window", "2026-03-14T12:00"], 2, "there is no device '042' here. Did you mean 42?"),
        (["--device", "42", "--window", "2026-03-14T12:00", "--metric", "celcius"], 2, "Did you mean celsius?"),
        (["--device", "42", "--window", "2026-03-14T12:00", "--size", "7"], 2, "windows of 7 s cannot be made"),
        (["--device", "42", "--window", "noon"], 2, "'noon' is no time"),
        (
            ["--device", "43", "--window", "2026-03-14T15:00"],
            FAILED,
            "no such window; the nearest before it begins at 2026-03-14T12:19:00Z",
        ),
        (
            ["--device", "43", "--window", "2026-03-14T09:00", "--zone", "Europe/Berlin"],
            FAILED,
            "no such window; the nearest after it begins at 2026-03-14T13:00:00+01:00",
        ),
    ],
)
def test_what_cannot_be_explained_is_told_in_words(warehouse: str, words: list[str], code: int, told: str) -> None:
    given = words if "--device" in words else ["--device", "042", *words]
    shown = asked(warehouse, "explain", *given)
    assert (shown.exit_code, "Traceback" in shown.output) == (code, False), shown.output
    assert told in " ".join(shown.output.split())


def test_a_hostile_name_changes_nothing_on_a_terminal(warehouse: str) -> None:
    shown = asked(warehouse, "explain", "--device", "44", "--window", "2026-03-14T12:00")
    assert shown.exit_code == 0, shown.output
    assert "<script>alert(1)</script>" in shown.stdout
    assert "\u202e" not in shown.stdout


class _Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.words: list[str] = []
        self.classes: Counter[str] = Counter()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        given = dict(attrs)
        self.classes.update((given.get("class") or "").split())
        self.addresses += [value or "" for name, value in attrs if name in {"href", "src", "onerror", "onload"}]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def report(warehouse: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of the site's hour, made in a process that has no Java, from another folder."""
    folder = tmp_path_factory.mktemp("report")
    words = ["report", "--warehouse", warehouse, "--site", story.SITE, "--out", "north.html"]
    done = subprocess.run(
        [SLUICE_CLOUD, *words, "--since", "2026-03-14T12:00", "--until", "2026-03-14T13:00"],
        cwd=folder,
        env={"PATH": "/nonexistent", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["north-data", "north.html"]
    return folder / "north.html"


def numbers(report: Path, name: str) -> list[dict[str, str]]:
    with (report.parent / "north-data" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def page_of(report: Path) -> _Page:
    found = _Page()
    found.feed(report.read_text("utf-8"))
    return found


def test_the_numbers_of_a_report_are_those_of_the_records(report: Path) -> None:
    readings = story.readings()
    values = Counter((device, second // 60) for device, second, _ in readings)
    windows = numbers(report, "windows")
    assert {(row["device"], int(row["window_start"][14:16])): int(row["n"]) for row in windows} == values
    late = Counter(
        (device, second // 60)
        for device, second, kafka in readings
        if kafka > story.seconds((second // 60 + 1) * 60) + timedelta(minutes=1)
    )
    assert {
        (row["device"], int(row["window_start"][14:16])): int(row["late"]) for row in windows if row["late"] != "0"
    } == late
    assert [(row["device"], row["window_start"][11:16]) for row in windows if row["revised"] == "true"] == [
        ("42", "12:33")
    ]
    counts = Counter(device for device, _, _ in readings)
    devices = {row["device"]: row for row in numbers(report, "devices")}
    assert {name: int(row["readings"]) for name, row in devices.items()} == counts
    assert (devices["42"]["missing"], devices["42"]["explained"]) == ("1", str(len(story.LOST)))
    (gateway,) = numbers(report, "gateways")
    assert (gateway["readings"], gateway["streams"]) == (str(len(readings)), "3")
    assert json.loads(gateway["waits"]) == ["gateway gw-1 has not acknowledged past it"]


def test_a_report_has_the_gap_the_losses_the_outage_and_the_lost_sensor(report: Path) -> None:
    gaps = [(row["first"], row["last"], row["explained"], row["reasons"]) for row in numbers(report, "gaps")]
    assert gaps == [("30", "30", "false", "[]"), ("60", "62", "true", '["sensor-ring-overflow"]')]
    assert [(row["device"], row["reason"], row["count"]) for row in numbers(report, "losses")] == [
        ("43", story.REASON, "5"),
        ("42", "sensor-ring-overflow", "3"),
    ]
    outages = numbers(report, "outages")
    waited = [row for row in outages if row["kind"] == "waited for Kafka"]
    assert [(row["gateway"], row["from_time"][11:19], row["to_time"][11:19]) for row in waited] == [
        ("gw-1", "12:20:00", "12:30:05")
    ]
    # Most readings of its last minute waited for less than a minute.
    assert int(waited[0]["readings"]) == sum(
        second in range(story.OUTAGE_S.start, story.OUTAGE_S.stop - 60) for _, second, _ in story.readings()
    )
    silent = {row["device"]: row for row in outages if row["kind"] == "silence"}
    assert (silent["43"]["from_time"][11:19], silent["43"]["to_time"][11:19]) == ("12:19:50", "13:00:00")
    assert (silent["43"]["status"], silent["43"]["why"]) == ("provisional", "no later reading of it")
    assert "42" not in silent


def test_lateness_and_clock_quality_are_those_of_the_records(report: Path) -> None:
    by_minute: dict[int, list[float]] = {}
    for _, second, kafka in story.readings():
        by_minute.setdefault(second // 60, []).append((kafka - story.seconds(second)).total_seconds())
    assert {int(row["time"][14:16]): float(row["max_s"]) for row in numbers(report, "lateness")} == {
        minute: max(delays) for minute, delays in by_minute.items()
    }
    worst = {row["device"]: int(row["max_error_us"]) for row in numbers(report, "clocks")}
    assert worst == {
        name: max(1_000 + second for device, second, _ in story.readings() if device == name) for name in worst
    }


def test_a_page_is_whole_tells_states_by_shape_and_obeys_no_name(report: Path) -> None:
    page = page_of(report)
    assert (page.elements["script"], page.elements["img"], page.elements["b"], page.elements["link"]) == (0, 0, 0, 0)
    assert all(address.startswith("north-data/") for address in page.addresses), page.addresses
    assert story.SITE in page.text
    assert r"<script>alert(1)</script>\x0a\u202e&" in page.text
    assert "\u202e" not in report.read_text("utf-8")
    assert story.REASON in page.text
    # Beside its key, each state is there as a shape of its own.
    assert all(page.classes[name] > 1 for name in ("s-complete", "s-complete_with_loss", "s-provisional", "s-waited"))
    assert (page.classes["revised"], page.classes["open"] > 1) == (2, True)
    windows = numbers(report, "windows")
    final = sum(row["status"] != "provisional" for row in windows)
    assert f"{final} of the {len(windows)} windows are final" in page.text
    for id_ in re.findall(r"url\(#([\w-]+)\)", report.read_text("utf-8")):
        assert f'id="{id_}"' in report.read_text("utf-8")


@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}: apt-get install chromium")
def test_a_page_fits_a_desktop_a_phone_and_paper_and_asks_nobody(report: Path) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    asked_for: list[str] = []
    with browser() as chromium:
        page = chromium.new_page()
        page.on("request", lambda request: asked_for.append(request.url))
        page.goto(report.as_uri())
        for name, width in (("desktop", 1_280), ("phone", 390), ("print", A4_PX)):
            page.emulate_media(media="print" if name == "print" else "screen")
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
        # On paper nobody scrolls within a table either.
        cut = "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth).length"
        assert page.evaluate(cut) == 0
        page.pdf(path=PICTURES / "report.pdf", prefer_css_page_size=True, print_background=True)
    assert asked_for == [report.as_uri()]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--out", "x.html"], 2, "give --device or --site"),
        (["--out", "x.html", "--device", "42", "--site", "north"], 2, "give --device or --site"),
        (["--out", "x.pdf", "--device", "42"], 2, "x.pdf does not end in .html"),
        (["--out", "x.html", "--device", "042"], 2, "there is no device '042' here. Did you mean 42?"),
        (["--out", "x.html", "--site", "nort"], 2, "there is no site 'nort' here"),
        (["--out", "x.html", "--device", "42", "--size", "7"], 2, "windows of 7 s cannot be made"),
        (["--out", "/nonexistent/x.html", "--device", "42"], FAILED, "/nonexistent/x-data cannot be written: No such"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_what_cannot_be_reported_is_told_in_words(warehouse: str, words: list[str], code: int, told: str) -> None:
    shown = asked(warehouse, "report", *words)
    assert (shown.exit_code, "Traceback" in shown.output) == (code, False), shown.output
    assert told in " ".join(shown.output.split())
    assert not any(Path().iterdir())


def test_of_a_span_without_readings_a_report_tells_the_silence(warehouse: str, tmp_path: Path) -> None:
    span = ["--since", "2026-03-14T14:00", "--until", "2026-03-14T15:00"]
    shown = asked(warehouse, "report", "--device", "43", *span, "--out", str(tmp_path / "still.html"))
    assert shown.exit_code == 0, shown.output
    assert "the last before it is of 2026-03-14T12:19:00Z" in " ".join(shown.stderr.split())
    with (tmp_path / "still-data" / "outages.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["kind"], row["from_time"][11:16], row["to_time"][11:16]) == ("silence", "14:00", "15:00")
