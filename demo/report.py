"""Draws a run as one page that needs nothing but a browser: the verdict, what happened when, the audit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from string import Template

from demo.audit import LATE_US, Audit, Identity, KafkaReading, SensorAudit, TableReading, verdict
from demo.chart import SPAN, Axis, Band, Marks, Moment, axis, chart, legend, log_axis, span_axis
from demo.chronicle import Chronicle
from demo.demo_settings import DemoSettings
from demo.time_audit import RECEIVED, UNBOUNDED_US, QualityAudit, TimeAudit, one_each
from demo.time_notes import time_notes

TEMPLATE = Path(__file__).with_name("report_template.html")
WAITED_US = 2_000_000
"""Microseconds from its event time to Kafka after which a reading is drawn as one that waited."""
DOTS_MAX = 3_000
"""Most dots for the arrivals of the fleet, and for all times. If there are more, one reading in so many is drawn."""
MEANINGS: Mapping[str, str] = {
    "estimated": "estimated by the sensor's own clock, as the gateway learnt it",
    "received": "the time of receipt: from the sensor came no time of its own",
    "bounded": "known by a span of time alone",
    "device": "sent by the sensor as a date and time",
}
"""Meanings of the qualities of a time, in the order in which they are told."""
SERIES_BOARDS_MAX = 8
SERIES_FLEET_MAX = 4


@dataclass(frozen=True, slots=True)
class Story:
    """All that the page tells."""

    settings: DemoSettings
    chronicle: Chronicle
    audit: Audit
    times: TimeAudit
    findings: Sequence[str]
    """Faults of the run, in words; empty if all is well."""
    shown: Sequence[SensorAudit]
    """Sensors in the short table."""
    boards: Mapping[str, str]
    """Kind of each AVR board in words, by device."""
    records: Sequence[KafkaReading]
    readings: Sequence[TableReading]
    summary: Mapping[str, float]


def report_page(story: Story) -> str:
    """Draw the whole page."""
    arrived = first_arrivals(story.records)
    time = _time_axis(story)
    total = story.audit.total
    good = not story.findings
    return Template(TEMPLATE.read_text()).substitute(
        verdict=escape(verdict(total, story.findings)),
        verdict_mark="✓" if good else "✗",
        mood="good" if good else "bad",
        headline=_headline(story),
        circumstances=_circumstances(story),
        findings="".join(f"<p><b>{escape(each)}.</b></p>" for each in story.findings),
        figures=_figures(story),
        buffer_words=_buffer_words(story, arrived),
        buffer_chart=_buffer_chart(story, time),
        arrival_words=_arrival_words(story, arrived),
        arrival_legend=legend(
            (*_waiting_legend(), ("level", "on this line a reading would be in Kafka the moment it is taken"))
        ),
        arrival_chart=_arrival_chart(story, arrived, time),
        series_words=_series_words(story),
        series_legend=legend((*_waiting_legend(), *_moment_legend(story))),
        series_charts=_series_charts(story, arrived, time),
        times_words=_times_words(story),
        times_notes=_times_notes(story),
        times_legend=_times_legend(story),
        times_chart=_times_chart(story, time),
        times_table=_times_table(story.times),
        audit_words=_audit_words(story),
        shown_table=_table(story.shown, total),
        whole_table=_table(story.audit.sensors, total),
        sensor_count=len(story.audit.sensors),
        footer=escape(
            f"Made by `make demo` at {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Point at a mark to read its value."
        ),
        span=SPAN,
    )


def first_arrivals(records: Sequence[KafkaReading]) -> dict[Identity, KafkaReading]:
    """Return the first record of each reading: Kafka may hold copies."""
    first: dict[Identity, KafkaReading] = {}
    for record in records:
        known = first.get(record.identity)
        if known is None or record.appended_us < known.appended_us:
            first[record.identity] = record
    return first


def _seconds(story: Story, at_us: int) -> float:
    return (at_us - story.chronicle.sampling_from_us) / 1e6


def _time_axis(story: Story) -> Axis:
    """Make an axis from the first sample to the end of the drain, in seconds since the sensors began."""
    chronicle = story.chronicle
    last_us = max(chronicle.sampling_until_us, chronicle.drained_us)
    return span_axis(0.0, _seconds(story, last_us), "seconds since the sensors began", "s")


def _bands(story: Story) -> list[Band]:
    chronicle = story.chronicle
    first, last = _seconds(story, chronicle.cut_us), _seconds(story, chronicle.restored_us)
    return [Band(first, last, f"outage, {last - first:.0f} s")]


def _moments(story: Story) -> list[Moment]:
    chronicle = story.chronicle
    if not chronicle.killed_us:
        return []
    return [
        Moment(_seconds(story, chronicle.killed_us), "kill -9"),
        Moment(_seconds(story, chronicle.restarted_us), "runs again"),
    ]


def _waiting_legend() -> tuple[tuple[str, str], ...]:
    limit = WAITED_US // 1_000_000
    return (
        ("prompt", f"in Kafka within {limit} s"),
        ("waited", f"waited longer than {limit} s in the buffer or at the sensor"),
    )


def _moment_legend(story: Story) -> list[tuple[str, str]]:
    entries = [("band", "outage: the path to Kafka is cut")]
    if story.chronicle.killed_us:
        entries.append(("moment", "the gateway is ended by kill -9, and runs again"))
    return entries


def _headline(story: Story) -> str:
    total = story.audit.total
    if total.missing or total.doubled:
        return "Not every acknowledged reading stands in the table exactly once."
    if story.findings:
        return "No acknowledged reading is missing or doubled, but this run does not show what it should."
    return f"All {total.acknowledged:,} acknowledged readings stand in the table, each exactly once."


def _circumstances(story: Story) -> str:
    settings = story.settings
    killed = " In the midst of it the gateway was ended by kill -9 and started again." if settings.kill else ""
    return escape(
        f"{settings.serial_sensors} AVR boards on serial lines, {settings.wifi_sensors} on MQTT through modems and a "
        f"fleet of {settings.sensors} MQTT sensors measured for {settings.seconds} s. For {settings.outage_seconds} s "
        f"the gateway could not reach Kafka.{killed}"
    )


def _figures(story: Story) -> str:
    summary = story.summary
    named = (
        ("sent by the sensors", summary["sent"]),
        ("acknowledged by the gateway", summary["acknowledged"]),
        ("found in Kafka", summary["in_kafka"]),
        ("found in the table", summary["in_readings"]),
        ("missing from the table", summary["missing"]),
        ("twice in the table", summary["duplicates"]),
        ("waited in the buffer at once, at most", summary["buffer_peak"]),
        ("bytes that the gateway wrote to its disk", summary["disk_bytes"]),
        (f"came to Kafka more than {LATE_US // 1_000_000} s late", summary["late_readings"]),
        ("seconds that the whole demo took", summary["seconds"]),
    )
    return "".join(f"<div><dt>{escape(name)}</dt><dd>{value:,.0f}</dd></div>" for name, value in named)


def _buffer_words(story: Story, arrived: Mapping[Identity, KafkaReading]) -> str:
    words = "With the path open a reading stays for a moment only. "
    before = [record for record in arrived.values() if record.appended_us < story.chronicle.cut_us]
    if waited := sum(map(_waited, before)):
        words += (
            f"At the start {waited:,} took longer than {WAITED_US // 1_000_000} s all the same: a reading may have to "
            "wait until its sensor is connected, its topic made, or its sensor's clock known. "
        )
    words += (
        "While it is cut, the gateway goes on taking "
        f"readings in and acknowledging them: up to {story.chronicle.buffer_peak:,} waited on its disk. When the "
        "path is back they drain, beside the readings that still come in."
    )
    if story.settings.kill:
        words += " While the gateway is dead none comes in, and none goes."
    return escape(words)


def _buffer_chart(story: Story, time: Axis) -> str:
    points = [
        (_seconds(story, sample.at_us), float(sample.buffered))
        for sample in story.chronicle.samples
        if sample.buffered is not None and time.low <= _seconds(story, sample.at_us) <= time.high
    ]
    depth = axis((value for _, value in points), "rows in the buffer", "rows", whole_from_zero=True)
    marks = [Marks("area", "buffer", "prompt", points)]
    return chart(time, depth, marks, _bands(story), _moments(story))


def _arrival_words(story: Story, arrived: Mapping[Identity, KafkaReading]) -> str:
    words = (
        "Each dot is a reading: to the right, its time in the table; upwards, when Kafka had it. What the gateway "
        "took in during the outage arrives in one go after it, the oldest with the most delay, and keeps its time."
    )
    if received := len(_of_receipt(story)):
        words += f" The time of {received:,} readings is that at which the gateway received them"
        words += ", after its restart where they had to wait for it." if story.settings.kill else "."
    stride = _stride(story, arrived)
    return escape(words if stride == 1 else f"{words} Of the fleet one reading in {stride} is drawn.")


def _readings_of(story: Story, quality: str) -> int:
    return sum(each.readings for each in story.times.qualities if each.quality == quality)


def _of_receipt(story: Story) -> list[TableReading]:
    """Return the readings whose time is that of their receipt: the gateway's own clock is known all the while."""
    return [row for row in one_each(story.readings) if row.quality == RECEIVED or row.error_us == UNBOUNDED_US]


def _stride(story: Story, arrived: Mapping[Identity, KafkaReading]) -> int:
    fleet = sum(1 for device, _, _ in arrived if device not in story.boards)
    return -(-fleet // DOTS_MAX) or 1


def _arrival_chart(story: Story, arrived: Mapping[Identity, KafkaReading], time: Axis) -> str:
    ordered = sorted(arrived.values(), key=lambda record: (record.event_us, record.identity))
    boards = [record for record in ordered if record.device in story.boards]
    fleet = [record for record in ordered if record.device not in story.boards]
    dots: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for record in (*fleet[:: _stride(story, arrived)], *boards):
        place = (_seconds(story, record.event_us), _seconds(story, record.appended_us))
        dots[_waited(record)].append(place)
    last = max((y for each in dots.values() for _, y in each), default=time.high)
    arrival = span_axis(time.low, max(time.high, last), "arrived in Kafka, seconds since the sensors began", "s")
    level = Marks("line", "at once", "level", [(time.low, time.low), (time.high, time.high)])
    marks = [level, Marks("dots", "prompt", "prompt", dots[False]), Marks("dots", "waited", "waited", dots[True])]
    return chart(time, arrival, marks, _bands(story), _moments(story))


def _waited(record: KafkaReading) -> bool:
    return record.appended_us - record.event_us > WAITED_US


def _series_words(story: Story) -> str:
    settings = story.settings
    words = "Temperatures out of the table, each at its time there. "
    if settings.sensors > SERIES_FLEET_MAX:
        words += f"Of the fleet {SERIES_FLEET_MAX} are shown. "
    words += "The cut of the path to Kafka leaves no hole: its readings came later."
    if settings.kill:
        words += " While the gateway was dead the sensors kept their readings."
        if _readings_of(story, "estimated"):
            words += " Where a sensor sends its own clock along, they stand where they were taken."
        if any(reading.event_us >= story.chronicle.restarted_us for reading in _of_receipt(story)):
            words += (
                " If a sensor's clock is not known, its kept readings have the time of their receipt. So there is a "
                "hole from the kill until the sensor was connected again, and a stack of dots at its end."
            )
    return escape(words)


def _series_charts(story: Story, arrived: Mapping[Identity, KafkaReading], time: Axis) -> str:
    by_device: dict[str, list[TableReading]] = {}
    for reading in story.readings:
        by_device.setdefault(reading.device, []).append(reading)
    names = [sensor.device for sensor in story.shown if sensor.device in by_device]
    boards = [name for name in names if name in story.boards][:SERIES_BOARDS_MAX]
    fleet = [name for name in names if name not in story.boards][:SERIES_FLEET_MAX]
    return "".join(_series_chart(story, name, by_device[name], arrived, time) for name in (*boards, *fleet))


def _series_chart(
    story: Story,
    device: str,
    readings: Sequence[TableReading],
    arrived: Mapping[Identity, KafkaReading],
    time: Axis,
) -> str:
    dots: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for reading in sorted(readings, key=lambda reading: reading.event_us):
        record = arrived.get(reading.identity)
        waited = record is not None and _waited(record)
        dots[waited].append((_seconds(story, reading.event_us), reading.value))
    metric = ", ".join(sorted({reading.metric for reading in readings}))
    unit = "°C" if metric == "celsius" else ""
    values = axis(
        (y for each in dots.values() for _, y in each), f"{metric}, {unit}" if unit else metric, unit, count=3
    )
    kind = story.boards.get(device, "MQTT")
    marks = [Marks("dots", device, "prompt", dots[False]), Marks("dots", device, "waited", dots[True])]
    drawn = chart(time, values, marks, _bands(story), _moments(story))
    return f"<div><h3>{escape(device)} <small>{kind}, {len(readings)} readings</small></h3>{drawn}</div>"


def _times_words(story: Story) -> str:
    times = story.times
    words = (
        "Each reading's time comes with a bound on its error, and with how it was obtained. Each coloured dot is the "
        "bound of one reading"
    )
    words += ", each grey one how far a time really is from when the sensor measured." if times.off_us else "."
    if times.judged:
        share = 100 * times.within / times.judged
        words += (
            f" The simulated sensors know when that was: of {times.judged:,} readings whose time tells it, "
            f"{times.within:,} ({share:.2f} %) were measured within the bound of their time."
        )
    stride = _times_stride(story)
    return escape(words if stride == 1 else f"{words} One reading in {stride} is drawn.")


def _times_stride(story: Story) -> int:
    return -(-sum(each.readings for each in story.times.qualities) // DOTS_MAX) or 1


def _qualities(times: TimeAudit) -> list[str]:
    """Return the qualities that there are, in the order in which they are told."""
    there = [each.quality for each in times.qualities]
    return [*(name for name in MEANINGS if name in there), *(name for name in there if name not in MEANINGS)]


def _times_notes(story: Story) -> str:
    serial = [device for device, kind in story.boards.items() if kind.startswith("serial")]
    notes = time_notes(story.readings, story.times, serial)
    return f'<ul class="asked">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else ""


def _times_legend(story: Story) -> str:
    drawn = {each.quality for each in story.times.qualities if each.unbounded < each.readings}
    entries = [
        (_style(name), f"{name}: {MEANINGS[name]}" if name in MEANINGS else name)
        for name in _qualities(story.times)
        if name in drawn
    ]
    if story.times.off_us:
        entries.append(("off", "how far off the time really is"))
    return legend(entries)


def _style(quality: str) -> str:
    return quality if quality in MEANINGS else "level"


def _times_chart(story: Story, time: Axis) -> str:
    ordered = sorted(one_each(story.readings), key=lambda reading: (reading.event_us, reading.identity))
    drawn = [row for row in ordered[:: _times_stride(story)] if row.error_us != UNBOUNDED_US]
    off = [
        (_seconds(story, row.event_us), abs(story.times.off_us[row.identity]) / 1_000)
        for row in drawn
        if row.identity in story.times.off_us
    ]
    bounds = {
        quality: [(_seconds(story, row.event_us), row.error_us / 1_000) for row in drawn if row.quality == quality]
        for quality in _qualities(story.times)
    }
    values = (y for points in (*bounds.values(), off) for _, y in points)
    marks = [Marks("dots", "really off", "off", off)]
    marks += [Marks("dots", quality, _style(quality), points) for quality, points in bounds.items()]
    return chart(
        time,
        log_axis(values, "milliseconds, each line ten times the one below", "ms"),
        marks,
        _bands(story),
        _moments(story),
    )


def _times_table(times: TimeAudit) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in (
            "quality",
            "readings",
            "no bound",
            "bound, median",
            "largest",
            "off, median",
            "most",
            "within the bound",
        )
    )
    by_name = {each.quality: each for each in times.qualities}
    rows = "".join(f"<tr>{_times_row(by_name[name])}</tr>" for name in _qualities(times))
    return f"<table><tr>{head}</tr>{rows}</table>"


def _times_row(each: QualityAudit) -> str:
    spans = (each.bound_median_us, each.bound_max_us, each.off_median_us, each.off_max_us)
    cells = "".join(f"<td>{_ms(us)}</td>" for us in spans)
    within = f"<td>{each.within:,} of {each.judged:,}</td>" if each.judged else "<td>-</td>"
    return f"<td>{escape(each.quality)}</td><td>{each.readings:,}</td><td>{each.unbounded:,}</td>{cells}{within}"


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1_000:,.1f} ms"


def _audit_words(story: Story) -> str:
    late, copies = story.audit.late_readings, story.audit.copies
    return escape(
        "Sent and acknowledged are by the sensors' own accounts; the rest was counted in Kafka and in the table. "
        "Missing: acknowledged, but not in the table. Doubled: more than once in the table. A sensor may have more "
        "in Kafka than acknowledged, where only the acknowledgement was lost. "
        f"{late:,} readings reached Kafka more than {LATE_US // 1_000_000} s after they were taken. Kafka holds "
        f"{copies:,} readings again that were sent more than once; the table counts each once."
    )


def _table(sensors: Sequence[SensorAudit], total: SensorAudit) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in ("sensor", "sent", "acknowledged", "in Kafka", "in the table", "missing", "doubled")
    )
    rows = "".join(f"<tr>{_row(sensor)}</tr>" for sensor in sensors)
    return f'<table><tr>{head}</tr>{rows}<tr class="total">{_row(total)}</tr></table>'


def _row(sensor: SensorAudit) -> str:
    plain = (sensor.sent, sensor.acknowledged, sensor.in_kafka, sensor.in_readings)
    cells = "".join(f"<td>{number:,}</td>" for number in plain)
    findings = "".join(
        f'<td class="finding">{number:,}</td>' if number else "<td>0</td>"
        for number in (sensor.missing, sensor.doubled)
    )
    return f"<td>{escape(sensor.device)}</td>{cells}{findings}"
