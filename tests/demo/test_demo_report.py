import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from demo.audit import KafkaReading, Ledger, TableReading, audit, shown_sensors
from demo.chart import CHARACTER_PX, NARROW_PX, Label, Marks, Moment, axis, chart, label_places, log_axis, span_axis
from demo.chronicle import Chronicle, Sample
from demo.demo_settings import DemoSettings
from demo.evidence import run_summary
from demo.report import Story, report_page
from demo.time_audit import UNBOUNDED_US, audit_times

NOON_US = 1_750_000_000_000_000
DEVICES = ("board-1", "m001")
SECONDS = 30


def story(*, kill: bool = False, lost: bool = False, fleet_quality: str = "received") -> Story:
    """A run of 30 s with an outage from 10 to 20. Readings of the outage came at 20."""
    ledgers, records, readings = [], [], []
    for device in DEVICES:
        ledgers.append(Ledger(device, "1-aa", SECONDS, ((0, SECONDS - 1),)))
        for second in range(SECONDS):
            event_us = NOON_US + second * 1_000_000
            arrived_us = NOON_US + 20_000_000 if 10 <= second < 20 else event_us + 50_000
            records.append(KafkaReading(f"{device}-{second}", device, "1-aa", second, event_us, arrived_us))
            quality, error_us = ("estimated", 2_000) if device == "board-1" else (fleet_quality, 10_000)
            readings.append(
                TableReading(device, "1-aa", second, "celsius", event_us, 20 + second / 10, error_us, quality)
            )
    if lost:
        readings.pop()
    result = audit(ledgers, records, readings)
    times = audit_times(readings, {reading.identity: reading.event_us - 500 for reading in readings})
    chronicle = Chronicle(
        sampling_from_us=NOON_US,
        sampling_until_us=NOON_US + 30_000_000,
        cut_us=NOON_US + 10_000_000,
        restored_us=NOON_US + 20_000_000,
        killed_us=NOON_US + 13_000_000 if kill else 0,
        restarted_us=NOON_US + 16_000_000 if kill else 0,
        drained_us=NOON_US + 31_000_000,
        samples=[Sample(NOON_US + at * 500_000, max(0, at - 20) if at < 40 else 0, None, None) for at in range(60)],
        written={4711: 2_000_000, 4712: 1_000_000},
    )
    return Story(
        DemoSettings(SECONDS, 10, 1, 1, 0, kill),
        chronicle,
        result,
        times,
        result.findings,
        shown_sensors(result, ["board-1"]),
        {"board-1": "serial line, ATmega328P"},
        records,
        readings,
        run_summary(result, times, chronicle, 61.26),
    )


def places(page: str, name: str) -> list[tuple[float, float]]:
    """Places of the marks of a name, 0 to 1000 from the left and from the top."""
    drawn = re.findall(rf'data-name="{name}" d="([^"]*)"', page)
    return [(float(x), float(y)) for path in drawn for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]


def test_every_reading_of_a_shown_sensor_is_drawn_where_it_was_taken() -> None:
    page = report_page(story())
    for device in DEVICES:
        drawn = sorted(places(page, device))
        assert len(drawn) == SECONDS
        assert [x for x, _ in drawn] == pytest.approx([1000 * second / 31 for second in range(SECONDS)], abs=0.1)
        heights = [y for _, y in drawn]
        assert heights == sorted(heights, reverse=True)  # it grew warmer


def test_readings_that_waited_are_marked_and_lie_above_the_line_of_the_prompt_ones() -> None:
    page = report_page(story())
    waited = places(page, "waited")
    assert len(waited) == len(DEVICES) * 8  # of ten, those that waited more than two seconds
    assert len({y for _, y in waited}) == 1  # all arrived at once


def test_the_buffer_is_drawn_with_the_outage_shaded() -> None:
    page = report_page(story())
    assert len(places(page, "buffer")) == 60
    shaded = f'<rect class="band" x="{10_000 / 31:.1f}" y="0" width="{10_000 / 31:.1f}"'
    assert page.count(shaded) == 3 + len(DEVICES)


def test_a_kill_is_marked_only_where_there_was_one() -> None:
    assert "kill -9" not in report_page(story())
    assert report_page(story(kill=True)).count('<path class="moment"') == 2 * (3 + len(DEVICES))


def test_labels_stand_above_the_plot_where_no_line_or_curve_runs() -> None:
    page = report_page(story(kill=True))
    above = re.findall(r'<div class="notes" style="height:([\d.]+)em">(.*?)</div>', page)
    assert len(above) == 3 + len(DEVICES)
    for height, notes in above:
        assert re.findall(r">([^<]+)</span>", notes) == ["kill -9", "runs again", "outage, 10 s"]
        assert all(float(bottom) + 1.5 <= float(height) for bottom in re.findall(r"bottom:([\d.]+)em", notes))
    assert page.count('<span class="note') == 3 * len(above)


def words_of(page: str, section: str) -> str:
    return page.partition(f"<h2>{section}")[2].partition("</p>")[0]


def test_what_is_said_of_times_follows_from_the_times_that_there_are() -> None:
    arrivals, series = "When readings were taken", "The series as an analyst sees them"
    killed, plain = report_page(story(kill=True)), report_page(story())
    assert "until the sensor was connected again" in words_of(killed, series)
    assert "sends its own clock along" in words_of(killed, series)
    assert "The time of 30 readings is that at which the gateway received them." in words_of(plain, arrivals)
    assert "a hole from the kill" not in words_of(plain, series)
    # Of the times that there are: nothing is said of others.
    clocks = report_page(story(kill=True, fleet_quality="estimated"))
    assert "received them" not in words_of(clocks, arrivals)
    assert "a hole from the kill" not in words_of(clocks, series)
    assert "the time of receipt" not in clocks


def test_bounds_are_drawn_by_quality_above_what_the_times_are_really_off() -> None:
    page = report_page(story())
    assert "of 30 readings whose time tells it, 30 (100.00 %)" in words_of(page, "How far the times")
    (estimated,) = {y for _, y in places(page, "estimated")}
    (received,) = {y for _, y in places(page, "received")}
    (off,) = {y for _, y in places(page, "really off")}
    # From 0.1 to 10 ms: bounds of 2 and 10, half a millisecond off.
    assert (estimated, received, off) == pytest.approx((349.5, 0, 650.5), abs=0.1)
    assert len(places(page, "really off")) == 2 * SECONDS
    row = "<td>estimated</td><td>30</td><td>0</td><td>2.0 ms</td><td>2.0 ms</td><td>0.5 ms</td><td>0.5 ms</td>"
    assert f"{row}<td>30 of 30</td>" in page
    assert (
        "<td>received</td><td>30</td><td>0</td><td>10.0 ms</td><td>10.0 ms</td><td>0.5 ms</td><td>0.5 ms</td><td>-</td>"
        in page
    )


def test_times_that_nothing_bounds_are_said_and_not_drawn() -> None:
    told = story()
    readings = [replace(reading, error_us=UNBOUNDED_US, quality="bounded") for reading in told.readings]
    page = report_page(replace(told, readings=readings, times=audit_times(readings, {})))
    assert "<li>60 readings have no bound (`bounded` in the table below): " in page
    assert places(page, "bounded") == []
    # The legend has no colour that nothing is drawn in.
    assert '<i class="bounded">' not in page
    assert "<td>bounded</td><td>60</td><td>60</td><td>-</td><td>-</td><td>-</td><td>-</td><td>-</td>" in page


def test_times_without_a_bound_are_told_as_times_of_receipt() -> None:
    told = story(kill=True, fleet_quality="estimated")
    readings = [
        replace(reading, error_us=UNBOUNDED_US, quality="bounded") if reading.device == "m001" else reading
        for reading in told.readings
    ]
    page = report_page(replace(told, readings=readings, times=audit_times(readings, {})))
    assert "The time of 30 readings is that at which the gateway received them" in words_of(page, "When readings were")
    assert "a hole from the kill" in words_of(page, "The series as an analyst")
    # After the restart all were known again: there is no stack.
    early = [replace(each, error_us=10_000, quality="estimated") if each.sequence >= 16 else each for each in readings]
    page = report_page(replace(told, readings=early, times=audit_times(early, {})))
    assert "The time of 16 readings is that" in words_of(page, "When readings were")
    assert "a hole from the kill" not in words_of(page, "The series as an analyst")


def test_what_waits_although_the_path_is_open_is_told() -> None:
    told = story()
    words = words_of(report_page(told), "What waited in the gateway")
    assert "for a moment only. While it is cut" in words
    # As a gateway does that has just started, and learns its sensors' clocks first: for the first six seconds.
    records = [replace(record, appended_us=max(record.appended_us, NOON_US + 6_000_000)) for record in told.records]
    words = words_of(report_page(replace(told, records=records)), "What waited in the gateway")
    assert "At the start 8 took longer than 2 s all the same" in words


@pytest.mark.parametrize("style", ["level", "moment"])
def test_what_is_drawn_dashed_is_dashed_in_the_legend(style: str) -> None:
    page = report_page(story(kill=True))
    assert f'<i class="{style}"></i>' in page
    assert re.search(rf"path\.(line\.)?{style} {{[^}}]*stroke-dasharray", page)
    assert re.search(rf"\.legend i\.{style} {{[^}}]*dashed", page)


def test_the_verdict_stands_at_the_top() -> None:
    assert "missing 0, duplicates 0" in report_page(story())
    page = report_page(story(lost=True))
    assert '<div class="verdict bad">✗ missing 1, duplicates 0</div>' in page
    assert "1 acknowledged reading is not in `readings`." in page
    assert '<td class="finding">1</td>' in page


def test_a_run_that_shows_nothing_is_no_success_although_nothing_is_missing() -> None:
    page = report_page(replace(story(), findings=("2 of 4 sensors left no ledger",)))
    assert '<div class="verdict bad">✗ missing 0, duplicates 0, but: 2 of 4 sensors left no ledger</div>' in page
    assert "<h1>No acknowledged reading is missing or doubled, but this run does not show what it should.</h1>" in page
    assert "<p><b>2 of 4 sensors left no ledger.</b></p>" in page


class References(HTMLParser):
    """Collects whatever would make a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in {"src", "href", "srcset"}]
        if tag not in {"meta", "path", "rect"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in {"src", "href"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_in_itself_and_well_formed() -> None:
    page = report_page(story(kill=True))
    parser = References()
    parser.feed(page)
    assert parser.found == []
    assert parser.open == []
    assert "url(" not in page
    assert "@import" not in page
    assert "://" not in page
    assert "${" not in page


def test_names_are_text_and_not_markup() -> None:
    told = story()
    ledgers = [Ledger("<b>", "1-aa", 1, ((0, 0),))]
    readings = [TableReading("<b>", "1-aa", 0, "<i>", NOON_US, 1.0, 1, "estimated")]
    result = audit(ledgers, [], readings)
    page = report_page(
        Story(
            told.settings,
            told.chronicle,
            result,
            audit_times(readings, {}),
            (),
            result.sensors,
            {},
            [],
            readings,
            told.summary,
        )
    )
    assert "<td>&lt;b&gt;</td>" in page
    assert "<b>" not in page
    assert "<i>" not in page


def test_the_summary_has_the_keys_that_are_promised() -> None:
    assert story().summary == {
        "sent": 60,
        "acknowledged": 60,
        "in_kafka": 60,
        "in_readings": 60,
        "missing": 0,
        "duplicates": 0,
        "buffer_peak": 19,
        "disk_bytes": 3_000_000,
        "late_readings": 0,
        "times_judged": 30,
        "times_within_bound": 30,
        "seconds": 61.3,
    }


finite = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(values=st.lists(finite, max_size=20), whole_from_zero=st.booleans())
def test_an_axis_holds_its_values_between_round_numbers(*, values: list[float], whole_from_zero: bool) -> None:
    made = axis(values, "title", "unit", whole_from_zero=whole_from_zero)
    assert made.low < made.high
    assert 2 <= len(made.ticks) <= 12
    slack = (made.high - made.low) * 1e-6
    assert all(made.low - slack <= value <= made.high + slack for value in values)
    labels = [made.label(tick) for tick in made.ticks]
    assert len(set(labels)) == len(labels)


@given(finite, st.floats(0.001, 1e6))
@example(-1.9, 0.125)  # -95 steps of 0.02 are a hair less than -1.9
def test_a_span_keeps_its_ends(low: float, length: float) -> None:
    made = span_axis(low, low + length, "title", "unit")
    assert (made.low, made.high) == (low, low + length)
    assert all(made.low <= tick <= made.high for tick in made.ticks)


@given(st.lists(st.floats(0, 1e9), max_size=20))
@example([1e-3, 1e3])
@example([0.0])
@example([999_999_999.999_999_9])
def test_a_log_axis_gives_each_power_of_ten_the_same_room(values: list[float]) -> None:
    made = log_axis((value for value in values if value == 0 or value > 1e-9), "title", "ms")
    shares = [made.share(tick) for tick in made.ticks]
    assert shares == pytest.approx([number / (len(shares) - 1) for number in range(len(shares))])
    assert all(made.share(value) == 0 for value in (0.0, made.low / 10))
    assert all(made.low <= value <= made.high * (1 + 1e-9) for value in values if value > 1e-9)
    assert all(float(made.label(tick).replace(",", "")) == pytest.approx(tick) for tick in made.ticks)


shares = st.floats(0, 1, allow_subnormal=False)
label_lists = st.lists(
    st.builds(Label, shares, st.text("outage, 12 s", min_size=1, max_size=20), st.just("moment"), st.booleans()),
    max_size=5,
)


@given(label_lists)
def test_labels_never_overlap_nor_stick_out_of_the_plot(labels: list[Label]) -> None:
    placed = label_places(labels)
    assert len(placed) == len(labels)
    for number, (label, place) in enumerate(zip(labels, placed, strict=True)):
        assert 0 <= place.first < place.last <= 1
        room_px = (place.last - place.first) * NARROW_PX
        assert room_px == pytest.approx(CHARACTER_PX * len(label.words) + 12)
        for other in placed[:number]:
            assert place.row != other.row or place.last <= other.first or other.last <= place.first


@pytest.mark.parametrize("outage_s", [8, 14, 20, 40])
@pytest.mark.parametrize("kill_share", [0.0, 1 / 3, 0.6])
def test_a_label_stands_at_its_line(outage_s: int, kill_share: float) -> None:
    seconds = outage_s + 20
    cut = 10 / seconds
    killed = cut + kill_share * outage_s / seconds
    runs = killed + 3 / seconds
    outage = Label(cut, f"outage, {outage_s} s", "band", rightwards=True)
    labels = [Label(killed, "kill -9", "moment", rightwards=False), Label(runs, "runs again", "moment", True), outage]
    placed = label_places(labels)
    assert max(place.row for place in placed) <= 2
    for label, place in zip(labels, placed, strict=True):
        assert label.at in {place.first, place.last}


def test_a_chart_without_moments_has_no_room_above_it() -> None:
    x, y = span_axis(0, 10, "time", "s"), axis([], "depth", "rows")
    assert '<div class="notes" style="height:0.0em"></div>' in chart(x, y, [])
    assert '<div class="notes" style="height:1.5em"><span' in chart(x, y, [], moments=[Moment(5, "kill -9")])


def test_a_chart_without_points_has_its_axes_still() -> None:
    drawn = chart(span_axis(0, 10, "time", "s"), axis([], "depth", "rows"), [Marks("area", "buffer", "prompt", [])])
    assert 'class="y-labels"' in drawn
    assert "data-name" not in drawn
