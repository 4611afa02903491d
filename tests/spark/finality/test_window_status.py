"""The finality of windows, and missing numbers: examples, and drawn sites against the oracle."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its customary name

from gateway.record_contract import HEARTBEAT_TYPE
from spark.decode.event_bodies import body_of
from spark.decode.loss_bodies import fault
from spark.decode.record_types import SET_ASIDE_TYPE
from spark.finality import window_status
from spark.finality.gateway_states import GatewayEvent, GatewayStates
from spark.finality.loss_records import losses_in, rejects_as_losses
from spark.finality.window_status import Evidence, with_status
from spark.log.edge_times import Correction, GatewayBoot
from spark.log.edges import EDGE_TYPE, Edge
from spark.log.lane_sequences import ranges
from tests.support import oracle_status
from tests.support.oracle_status import QUARANTINE, UNKNOWN_US, Beat, GapRow, Loss, Reading, Site, Waiting
from tests.support.sizes import size
from tests.support.spark_records import EPOCH, NOON
from tests.support.spark_warehouse import expect_rows

if TYPE_CHECKING:
    from spark.finality.gateway_rows import GatewayRow

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("interpreted")]

SECOND = 1_000_000
NOON_US = (NOON - EPOCH) // timedelta(microseconds=1)
BOOT = "7-1a2b"
THERMO, POWER = "device-thermo", "device-power"
GATEWAY_BOOT = "boot-1"
LOG_SCHEMA = """
    namespace string, gateway string, device string, stream string, ce_type string, ce_id string, value binary,
    reject_reason string, duplicate boolean, event_time timestamp, time_error_us bigint, gateway_boot string,
    boot_time_us bigint, device_boot string, device_sequence bigint, device_counter string
"""
ISLANDS_SCHEMA = f"""
    namespace string, device string, stream string, device_counter string, device_boot string,
    first bigint, last bigint, first_edge {EDGE_TYPE}, last_edge {EDGE_TYPE}
"""


def at(seconds: float) -> int:
    """Microseconds of a moment after noon."""
    return NOON_US + round(seconds * SECOND)


def time(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


# -- a site, as the tables tell of it ---------------------------------------------------------------------------------


class Window(NamedTuple):
    namespace: str
    device: str
    stream: str
    start_us: int
    end_us: int


def edge(reading: Reading) -> Edge:
    # The boot's clock began at noon, but no correction is told of it.
    return Edge(
        *(reading.time_us, reading.error_us, "estimated", reading.gateway, GATEWAY_BOOT),
        *(reading.time_us - NOON_US, None),
    )


def evidence_of(
    spark: SparkSession,
    sites: dict[str, Site],
    rng: random.Random | None = None,
    corrections: Sequence[Correction] = (),
) -> Evidence:
    """The job's evidence on sites, taken in batches if there is a source of chance."""
    rng = rng or random.Random(0)  # noqa: S311
    gateways: list[GatewayRow] = []
    boots: dict[GatewayBoot, Edge] = {}
    islands: list[tuple[object, ...]] = []
    events: list[tuple[object, ...]] = []
    services: set[tuple[str, str, str]] = set()
    heard: list[tuple[str, str, str, int]] = []
    retired: dict[tuple[str, str], int] = {}
    for namespace, site in sites.items():
        islands += islands_of(namespace, site, rng)
        events += [loss_row(namespace, number, loss) for number, loss in enumerate(site.losses)]
        # Each site has its own offsets.
        states = GatewayStates()
        take_beats(states, namespace, site, rng)
        gateways += states.rows()
        boots |= states.boots()
        services |= {(namespace, reading.device, reading.gateway) for reading in site.readings}
        heard += [(namespace, r.device, r.stream, r.time_us) for r in site.readings if r.error_us != UNKNOWN_US]
        retired |= {(namespace, gateway): us for gateway, us in site.retired_from_us.items()}
    log = spark.createDataFrame(events, LOG_SCHEMA)
    return Evidence(
        islands=spark.createDataFrame(islands, ISLANDS_SCHEMA),
        losses=losses_in(log),
        services=spark.createDataFrame(sorted(services), window_status.SERVICES_SCHEMA),
        heard=spark.createDataFrame(heard, window_status.HEARD_SCHEMA),
        gateways=gateways,
        boots=boots,
        retired_from_us=retired,
        corrections=corrections,
    )


def islands_of(namespace: str, site: Site, rng: random.Random) -> list[tuple[object, ...]]:
    """The site's numbers, come in a few batches. Islands of two batches may overlap or touch."""
    batches: dict[tuple[object, ...], dict[int, Reading]] = {}
    for each in site.readings:
        if each.boot is not None and each.number is not None:
            run = (namespace, each.device, each.stream, each.counter, each.boot)
            batches.setdefault((rng.randrange(3), *run), {})[each.number] = each
    return [
        (*run, first, last, edge(by_number[first]), edge(by_number[last]))
        for (_, *run), by_number in batches.items()
        for first, last in ranges(sorted(by_number))
    ]


def loss_row(namespace: str, number: int, loss: Loss) -> tuple[object, ...]:
    body = {
        "device": loss.device,
        "reason": loss.reason,
        "count": loss.lost,
        "boot": loss.boot,
        "first_boottime_us": loss.first_boottime_us,
        "last_boottime_us": loss.last_boottime_us,
        "device_boot": loss.device_boot,
        "first_sequence": loss.first_sequence,
        "last_sequence": loss.last_sequence,
    }
    return event_row(namespace, loss, json.dumps(body).encode(), f"loss-{number}")


def event_row(namespace: str, loss: Loss, value: bytes, ce_id: str) -> tuple[object, ...]:
    names = (namespace, loss.gateway, loss.gateway, "gateway-events", "sluice.gateway.loss", ce_id)
    clock = (time(loss.told_us), loss.told_error_us, loss.told_boot, loss.told_boottime_us)
    return (*names, value, None, False, *clock, None, None, None)


LATER_US = 2**60
"""When Kafka took all of it in: after whatever it speaks of."""


def take_beats(states: GatewayStates, namespace: str, site: Site, rng: random.Random) -> None:
    events = [heartbeat(namespace, place, beat) for place, beat in enumerate(site.beats)]
    events += [
        GatewayEvent(
            *(SET_ASIDE_TYPE, namespace, gateway, buffer_id("new"), (2 * LATER_US, "gateway-events", 0, place)),
            Edge(0, 0, "synced", gateway, "boot", 0, None),
            json.dumps({"device": None, "file": "set-aside", "buffer": buffer_id(buffer), "rows": None}).encode(),
        )
        for place, (gateway, buffer) in enumerate(sorted(site.set_aside))
    ]
    cut = rng.randrange(len(events) + 1)
    states.take(events[:cut], {}, site.reads.__contains__)
    states.take(events[cut:], site.held, site.reads.__contains__)


def heartbeat(namespace: str, place: int, beat: Beat) -> GatewayEvent:
    def told(us: int | None) -> str | None:
        return None if us is None else time(us).isoformat(timespec="microseconds").replace("+00:00", "Z")

    body = {
        "offsets": {topic: {str(n): offset for n, offset in each.items()} for topic, each in beat.offsets.items()},
        "pending": [
            {"lane": "abc", "rows": span.rows, "from": told(span.from_us), "to": told(span.to_us)}
            for span in beat.pending
        ],
        "quarantined": [
            {"count": span.rows, "from": told(span.from_us), "to": told(span.to_us)} for span in beat.quarantined
        ],
        "low_watermark": told(beat.time_us) if beat.promises else None,
        "depth_rows": 0,
        "oldest_age_s": 0.0,
        "buffer_bytes": 4096,
        "counts": {},
    }
    clock = Edge(beat.time_us, beat.error_us, "synced", beat.gateway, beat.boot, beat.boottime_us, None)
    order = (LATER_US + place, "gateway-events", 0, place)
    said = json.dumps(body).encode()
    return GatewayEvent(HEARTBEAT_TYPE, namespace, beat.gateway, buffer_id(beat.buffer), order, clock, said)


def buffer_id(name: str) -> str:
    """A buffer's name as gateways make them."""
    return sha256(name.encode()).hexdigest()[:16]


def windows_of(spark: SparkSession, windows: Iterable[Window]) -> DataFrame:
    schema = "namespace string, device string, stream string, start_us bigint, end_us bigint"
    frame = spark.createDataFrame(list(windows), schema)
    times = {f"window_{name}": F.timestamp_micros(f"{name}_us") for name in ("start", "end")}
    return frame.withColumns(times)


def verdicts(spark: SparkSession, evidence: Evidence, windows: Iterable[Window]) -> dict[Window, Row]:
    rows = with_status(windows_of(spark, windows), evidence).collect()
    return {Window(row.namespace, row.device, row.stream, row.start_us, row.end_us): row for row in rows}


def gap_rows(evidence: Evidence) -> dict[str, list[GapRow]]:
    found: dict[str, list[GapRow]] = {}
    for row in window_status.derive_gaps(evidence).collect():
        assert row["count"] == row.last - row.first + 1
        gap = GapRow(row.device, row.stream, row.device_counter, row.device_boot, row.first, row.last, row.explained)
        found.setdefault(row.namespace, []).append(gap)
    return {
        name: sorted(gaps, key=lambda gap: (gap[0], gap[1] or "", gap[2] or "", *gap[3:]))
        for name, gaps in found.items()
    }


# -- examples ---------------------------------------------------------------------------------------------------------


def every_second(numbers: Iterable[int], error_us: int = 1_000) -> list[Reading]:
    """A reading a second after noon, numbered by its second."""
    return [Reading("42", THERMO, BOOT, number, at(number), error_us, "gw-1") for number in numbers]


def unnumbered(site: Site) -> Site:
    return replace(site, readings=[reading._replace(boot=None, number=None) for reading in site.readings])


def beat(seconds: float, **changes: object) -> Beat:
    told = Beat("gw-1", "0011", at(seconds), 1_000, GATEWAY_BOOT, round(seconds * SECOND), {}, [], [], True)
    return told._replace(**changes)  # type: ignore[arg-type]


RING_OVERFLOW = Loss(
    *("gw-1", at(130), 1_000, GATEWAY_BOOT, 130 * SECOND, "42", "sensor-ring-overflow", 4, GATEWAY_BOOT),
    *(101 * SECOND, 104 * SECOND, BOOT, 101, 104),
)
NOT_NUMBERED = RING_OVERFLOW._replace(device_boot=None, first_sequence=None, last_sequence=None, reason="refused-qos0")
WHOLE = every_second(range(181))
HOLEY = every_second([*range(101), *range(105, 181)])


def said(
    spark: SparkSession, sites: dict[str, Site], start_s: int = 60, end_s: int = 120
) -> dict[str, tuple[str, str | None, str | None]]:
    """The verdict on a window of the sensor's, by site."""
    window = [Window(name, "42", THERMO, at(start_s), at(end_s)) for name in sites]
    found = verdicts(spark, evidence_of(spark, sites), window)
    return {key.namespace: (row.status, row.basis, row.why) for key, row in found.items()}


def test_numbers_without_a_hole_prove_a_window_whatever_gateways_say(spark: SparkSession) -> None:
    sites = {
        "whole": Site(WHOLE),
        "missing": Site(HOLEY),
        "one missing": Site(every_second([*range(101), *range(102, 181)])),
        "told as lost": Site(HOLEY, [RING_OVERFLOW]),
        "lost without numbers": Site(HOLEY, [NOT_NUMBERED]),
        "more is missing than was lost": Site(HOLEY, [RING_OVERFLOW._replace(lost=3)]),
        "lost elsewhere": Site(HOLEY, [RING_OVERFLOW._replace(first_sequence=102, last_sequence=105)]),
        "lost at another time": Site(
            HOLEY, [NOT_NUMBERED._replace(first_boottime_us=20 * SECOND, last_boottime_us=30 * SECOND)]
        ),
        "ends of no known time": Site(every_second(range(181), UNKNOWN_US)),
    }
    missing = ("provisional", "sequence", "readings 101 to 104 of boot 7-1a2b are missing")
    lost = "readings of about this time were lost: "
    assert said(spark, sites) == {
        "whole": ("complete", "sequence", None),
        "missing": missing,
        "one missing": ("provisional", "sequence", "reading 101 of boot 7-1a2b is missing"),
        "told as lost": ("complete_with_loss", "sequence", lost + "sensor-ring-overflow"),
        "lost without numbers": ("complete_with_loss", "sequence", lost + "refused-qos0"),
        "more is missing than was lost": missing,
        "lost elsewhere": missing,
        "lost at another time": missing,
        "ends of no known time": ("provisional", None, "no later reading of it"),
    }


def test_numbers_of_a_loss_that_nobody_could_count_are_lost_once_no_gateway_has_them(spark: SparkSession) -> None:
    perhaps, past = [RING_OVERFLOW._replace(lost=0)], [beat(200)]
    counted = RING_OVERFLOW._replace(lost=2, first_sequence=99, last_sequence=100)
    holey_before = every_second([*range(99), *range(105, 181)])
    sites = {
        "a gateway may have them": Site(HOLEY, perhaps),
        "no gateway has them": Site(HOLEY, perhaps, past),
        "a gateway has some": Site(HOLEY, perhaps, [beat(200, pending=[Waiting(2, at(101), at(102))])]),
        "all have come": Site(WHOLE, perhaps, past),
        "others are missing too": Site(holey_before, perhaps, past),
        "others were counted": Site(holey_before, [*perhaps, counted], past),
        "not enough were counted": Site(holey_before, [*perhaps, counted._replace(lost=1)], past),
        "of which counter is not told": Site([*HOLEY, HOLEY[50]._replace(stream=POWER)], perhaps, past),
    }
    missing = ("provisional", "sequence", "readings 99 to 104 of boot 7-1a2b are missing")
    lost = ("complete_with_loss", "watermark", "readings of about this time were lost: sensor-ring-overflow")
    assert said(spark, sites) == {
        "a gateway may have them": ("provisional", "watermark", "gateway gw-1 has not told how far it has come"),
        "no gateway has them": lost,
        "a gateway has some": ("provisional", "watermark", "gateway gw-1 holds 2 rows of about this time"),
        "all have come": ("complete", "sequence", None),
        "others are missing too": missing,
        "others were counted": lost,
        "not enough were counted": missing,
        "of which counter is not told": (*missing[:2], "readings 101 to 104 of boot 7-1a2b are missing"),
    }
    found = gap_rows(evidence_of(spark, sites))
    assert [gap.explained for gap in found["no gateway has them"]] == [True]
    assert [gap.explained for gap in found["not enough were counted"]] == [False]


def test_a_hole_concerns_only_the_windows_in_which_it_may_lie(spark: SparkSession) -> None:
    sites = {"precise": Site(HOLEY), "vague": Site(every_second([*range(101), *range(105, 181)], 50 * SECOND))}
    assert {name: each[:2] for name, each in said(spark, sites, 20, 80).items()} == {
        "precise": ("complete", "sequence"),
        "vague": ("provisional", "sequence"),
    }


def test_without_numbers_gateways_tell(spark: SparkSession) -> None:
    site = unnumbered(Site(WHOLE, reads={THERMO}, held={THERMO: {0: 500}}))
    waiting = Waiting(120, at(70), at(110))
    roamed = [*site.readings, Reading("42", THERMO, None, None, at(5), 1_000, "gw-2")]
    past = [beat(200)]
    wall = {
        "acknowledged": replace(site, beats=past),
        "silent": replace(site, readings=site.readings[:119], beats=past),
        "nothing told": site,
        "not yet past it": replace(site, beats=[beat(125)]),
        "not read yet": replace(site, beats=[beat(200, offsets={THERMO: {0: 501}})]),
        "of a topic that nobody reads": replace(site, beats=[beat(200, offsets={POWER: {0: 501}})]),
        "since then of one": replace(site, beats=[beat(110), beat(200, offsets={POWER: {0: 501}})]),
        "of a quarantine": replace(site, beats=[beat(200, offsets={QUARANTINE: {0: 501}})]),
        "pending": replace(site, beats=[beat(200, pending=[waiting])]),
        "pending, older": replace(site, beats=[beat(200, pending=[waiting._replace(from_us=at(0), to_us=at(49))])]),
        "pending, of any time": replace(site, beats=[beat(200, pending=[Waiting(1, None, None)])]),
        "quarantined": replace(site, beats=[beat(200, quarantined=[waiting])]),
        "unsynced": replace(site, beats=[beat(200, promises=False)]),
        "two gateways": replace(site, readings=roamed, beats=past),
        "one is retired": replace(site, readings=roamed, beats=past, retired_from_us={"gw-2": at(60)}),
        "one is retired later": replace(site, readings=roamed, beats=past, retired_from_us={"gw-2": at(61)}),
        "lost": replace(site, beats=past, losses=[NOT_NUMBERED]),
        "lost later": replace(site, beats=past, losses=[NOT_NUMBERED._replace(first_boottime_us=121 * SECOND)]),
        "lost, of any device": replace(site, beats=past, losses=[NOT_NUMBERED._replace(device=None)]),
        "no readings lost": replace(site, beats=past, losses=[NOT_NUMBERED._replace(reason="event-refused")]),
    }
    complete = ("complete", "watermark", None)
    lost = ("complete_with_loss", "watermark", "readings of about this time were lost: refused-qos0")

    def waits(why: str) -> tuple[str, str, str]:
        return "provisional", "watermark", why

    assert said(spark, wall) == {
        "acknowledged": complete,
        "silent": ("provisional", None, "no later reading of it"),
        "nothing told": waits("gateway gw-1 has not told how far it has come"),
        "not yet past it": waits("gateway gw-1 has not acknowledged past it"),
        "not read yet": waits("gateway gw-1 has not told how far it has come"),
        "of a topic that nobody reads": waits(f"gateway gw-1 sends readings to {POWER}, which `ingest` does not read"),
        "since then of one": waits(f"gateway gw-1 sends readings to {POWER}, which `ingest` does not read"),
        "of a quarantine": complete,
        "pending": waits("gateway gw-1 holds 120 rows of about this time"),
        "pending, older": complete,
        "pending, of any time": waits("gateway gw-1 holds 1 row of about this time"),
        "quarantined": waits("gateway gw-1 has 120 inputs in its quarantine of about this time"),
        "unsynced": waits("gateway gw-1 can promise nothing yet"),
        "two gateways": waits("gateway gw-2 has not told how far it has come"),
        "one is retired": complete,
        "one is retired later": waits("gateway gw-2 has not told how far it has come"),
        "lost": lost,
        "lost later": complete,
        "lost, of any device": lost,
        "no readings lost": complete,
    }


@pytest.mark.long(seconds=6)
def test_a_swapped_card_may_still_hold_what_was_not_sent(spark: SparkSession) -> None:
    site = unnumbered(Site(WHOLE))
    swapped = [beat(80), beat(100, buffer="2233"), beat(200, buffer="2233")]
    sites = {
        "swapped": replace(site, beats=swapped),
        "salvaged": replace(site, beats=swapped, set_aside={("gw-1", "0011")}),
    }
    former = "what a former buffer of gateway gw-1 still held is not known"
    assert said(spark, sites) == {
        "swapped": ("provisional", "watermark", former),
        "salvaged": ("complete", "watermark", None),
    }
    assert said(spark, sites, 0, 60)["swapped"] == ("complete", "watermark", None)


@pytest.mark.long(seconds=6)
def test_a_stream_that_shares_its_devices_counter_is_proven_by_it(spark: SparkSession) -> None:
    """A door contact that opens once a day: the thermometer's numbers tell that nothing of it is missing."""
    door = Reading("42", "device-door", BOOT, 70, at(70), 1_000, "gw-1")
    shared = Site([*(reading for reading in WHOLE if reading.number != 70), door])
    own = Site([*WHOLE, door])
    evidence = evidence_of(spark, {"shared": shared, "own": own})
    windows = [Window(name, "42", "device-door", at(60), at(120)) for name in ("shared", "own")]
    found = {window.namespace: row[-3:] for window, row in verdicts(spark, evidence, windows).items()}
    assert found == {"shared": ("complete", "sequence", None), "own": ("provisional", None, "no later reading of it")}


@pytest.mark.long(seconds=6)
def test_a_stream_of_two_counters_is_proven_by_both(spark: SparkSession) -> None:
    """Two topics of the sensor lead to one Kafka topic, and each counts its readings."""

    def counted(by: str, readings: list[Reading]) -> list[Reading]:
        return [reading._replace(counter=by) for reading in readings]

    paris = counted("paris/temp", WHOLE)
    sites = {
        "both": Site(paris + counted("rome/temp", WHOLE)),
        "one is silent": Site(paris + counted("rome/temp", every_second(range(90)))),
        "one has a hole": Site(paris + counted("rome/temp", HOLEY)),
    }
    assert said(spark, sites) == {
        "both": ("complete", "sequence", None),
        "one is silent": ("provisional", "watermark", "gateway gw-1 has not told how far it has come"),
        "one has a hole": ("provisional", "sequence", "readings 101 to 104 of boot 7-1a2b in rome/temp are missing"),
    }


def test_corrections_move_the_ends(spark: SparkSession) -> None:
    """Sent before the clock was known, told of later: the boot was at noon, to a millisecond."""
    site = Site(every_second([*range(101), *range(105, 181)], UNKNOWN_US), [RING_OVERFLOW])
    told = Correction(
        "s", "gw-1", GATEWAY_BOOT, 1, "synced", 0, NOON_US, Decimal(0), 1_000, Decimal(0), False, at(600), "id"
    )
    readings = replace(
        site,
        readings=[r._replace(error_us=UNKNOWN_US) for r in site.readings],
        losses=[RING_OVERFLOW._replace(told_error_us=UNKNOWN_US)],
    )
    evidence = evidence_of(spark, {"s": readings}, corrections=[told])
    # Their own boot time is exact, so that a correction can give the true time.
    columns = {
        name: F.col(name).withField("boot_time_error_us", F.lit(0).cast("bigint"))
        for name in ("first_edge", "last_edge")
    }
    evidence = replace(evidence, islands=evidence.islands.withColumns(columns))
    window = Window("s", "42", THERMO, at(60), at(120))
    (row,) = verdicts(spark, evidence, [window]).values()
    assert (row.status, row.basis) == ("complete_with_loss", "sequence")
    (gap,) = window_status.derive_gaps(evidence).collect()
    assert (gap.after_time, gap.before_time) == tuple(time(at(s)).replace(tzinfo=None) for s in (100, 105))
    assert (gap.after_error_us, gap.before_error_us, gap.explained) == (1_000, 1_000, True)


def test_a_reading_in_the_quarantine_is_lost_until_it_is_read(spark: SparkSession) -> None:
    site = Site(HOLEY)
    evidence = evidence_of(spark, {"s": site})
    rejects = [
        (
            *("s", "gw-1", "42", THERMO, "sluice.reading", f"id-{number}", b"?", "no JSON", False),
            *(time(at(number)), 1_000, GATEWAY_BOOT, number * SECOND, BOOT, number, None),
        )
        for number in range(101, 105)
    ]
    losses = rejects_as_losses(spark.createDataFrame(rejects, LOG_SCHEMA))
    assert losses.count() == 1
    evidence = replace(evidence, losses=evidence.losses.unionByName(losses))
    (row,) = verdicts(spark, evidence, [Window("s", "42", THERMO, at(60), at(120))]).values()
    why = "readings of about this time were lost: in the quarantine"
    assert row[-3:] == ("complete_with_loss", "sequence", why)


def test_a_malformed_loss_record_is_told_and_nothing_else(spark: SparkSession) -> None:
    good = json.loads(loss_row("s", 0, RING_OVERFLOW)[6])  # type: ignore[arg-type]
    bodies: dict[str, bytes | None] = {
        "not JSON": b"{",
        "no value": None,
        "not UTF-8": b"\xff",
        "a list": b"[]",
        "no count": json.dumps({name: good[name] for name in good if name != "count"}).encode(),
        "text for a number": json.dumps(good | {"count": "4"}).encode(),
        "less than none": json.dumps(good | {"count": -1}).encode(),
        "too large": json.dumps(good | {"count": 2**63}).encode(),
        "half a span": json.dumps(good | {"last_sequence": None}).encode(),
        "backwards": json.dumps(good | {"last_sequence": 100}).encode(),
        "good": json.dumps(good | {"more": {}}).encode(),
    }
    rows = [(*event_row("s", RING_OVERFLOW, b"", name)[:6], body, *event_row("s", RING_OVERFLOW, b"", name)[7:])
            for name, body in bodies.items()]  # fmt: skip
    log = spark.createDataFrame(rows, LOG_SCHEMA)
    # Of today's they are rejects; a `log` of before may hold some that are none.
    assert [row.ce_id for row in losses_in(log).collect()] == ["good"]
    faults = {name: fault(body_of(body)) for name, body in bodies.items()}
    assert {name for name, words in faults.items() if words is None} == {"good"}
    assert faults["half a span"] == "the loss record's sequences are no span"
    assert faults["text for a number"] == "count of the loss record is not a whole number"


def test_windows_of_a_span_need_no_older_history(spark: SparkSession) -> None:
    evidence = evidence_of(spark, {"s": Site(HOLEY)})
    windows = windows_of(
        spark, [Window("s", "42", THERMO, at(120), at(160)), Window("s", "42", THERMO, at(60), at(99))]
    )
    between = with_status(windows, evidence, (at(60), at(160)))
    expect_rows(between, with_status(windows, evidence))


def test_one_devices_windows_need_only_what_is_known_of_it(spark: SparkSession, tmp_path: Path) -> None:
    """All tables are searched by the device that was asked for, not read as a whole."""
    evidence = evidence_of(spark, {"s": replace(Site(HOLEY, [RING_OVERFLOW]), beats=[beat(200)])})
    names = ("islands", "losses", "services", "heard")
    for name in names:
        getattr(evidence, name).write.parquet(f"{tmp_path}/{name}")
    stored = replace(
        evidence,
        islands=spark.read.parquet(f"{tmp_path}/islands"),
        losses=spark.read.parquet(f"{tmp_path}/losses"),
        services=spark.read.parquet(f"{tmp_path}/services"),
        heard=spark.read.parquet(f"{tmp_path}/heard"),
    )
    windows = windows_of(spark, [Window("s", "42", THERMO, at(60), at(120))]).where(F.col("device") == "42")
    found = with_status(windows, stored)
    scans = [line for line in str(found._jdf.queryExecution().executedPlan()).splitlines() if "FileScan" in line]
    assert len(scans) >= len(names)
    # A loss without a device is searched by the gateway.
    assert all("EqualTo(device,42)" in scan or "IsNull(device)" in scan for scan in scans)
    assert [row.status for row in found.collect()] == ["complete_with_loss"]


# -- drawn sites ------------------------------------------------------------------------------------------------------


def drawn_site(rng: random.Random) -> Site:
    """A few minutes of a few sensors that roam between gateways, restart, and lose readings, reported or not."""
    gateways = ["gw-1", "gw-2", "gw-3"][: rng.randrange(1, 4)]
    site = Site(reads={THERMO, POWER}, held={THERMO: {0: rng.randrange(50, 150)}})
    gateway_clocks = {(gateway, boot): rng.randrange(-50, 200) for gateway in gateways for boot in ("boot-1", "boot-2")}
    site.retired_from_us = {gateway: at(rng.randrange(200)) for gateway in gateways if rng.random() < 0.15}
    for device in ["42", "43"][: rng.randrange(1, 3)]:
        lost = draw_readings(rng, site, device, gateways)
        draw_losses(rng, site, device, lost, gateway_clocks)
    for gateway in gateways:
        draw_beats(rng, site, gateway, gateway_clocks)
    return site


def drawn_error(rng: random.Random) -> int:
    return rng.choice([0, 0, 1_000, 1_000, SECOND, 4 * SECOND, rng.choice([20 * SECOND, UNKNOWN_US])])


def draw_readings(rng: random.Random, site: Site, device: str, gateways: list[str]) -> dict[str, list[int]]:
    """Return the numbers that never came, by boot."""
    sources = rng.choice(
        [
            [(THERMO, "")],
            [(THERMO, ""), (POWER, "")],
            [(THERMO, "a/t"), (THERMO, "b/t"), (POWER, "")][: rng.randrange(2, 4)],
        ]
    )
    style = rng.choice(["shared", "shared", "each", "none"])
    lost: dict[str, list[int]] = {}
    second = rng.randrange(30)
    for life in range(rng.randrange(1, 4)):
        boot = f"{life}-{device}"
        counted = dict.fromkeys(sources, rng.randrange(3))
        gateway = rng.choice(gateways)
        quiet = 0
        for _ in range(rng.randrange(2, 40)):
            second += rng.randrange(1, 6)
            source = rng.choice(sources)
            number = counted[source]
            for each in sources if style == "shared" else [source]:
                counted[each] += 1
            if rng.random() < 0.05:
                gateway = rng.choice(gateways)
            if rng.random() < 0.06:
                quiet = rng.randrange(1, 5)
            if quiet:
                quiet -= 1
                lost.setdefault(boot, []).append(number)
                continue
            error_us = drawn_error(rng)
            reading = Reading(device, source[0], boot, number, at(second), error_us, gateway, source[1])
            site.readings.append(reading._replace(boot=None, number=None) if style == "none" else reading)
    return lost


def draw_losses(
    rng: random.Random, site: Site, device: str, lost: dict[str, list[int]], clocks: dict[tuple[str, str], int]
) -> None:
    places: list[tuple[str | None, int, int]] = [
        (boot, number, number) for boot, all_ in lost.items() for number in all_
    ]
    places += [(boot, min(numbers), max(numbers)) for boot, numbers in lost.items()]
    for device_boot, first, last in [*places, (None, 0, 0)]:
        if rng.random() < 0.35:
            continue
        (gateway, boot), start = rng.choice(list(clocks.items()))
        told_boot = rng.choice([boot, boot, "boot-2"])
        began, ended = sorted((rng.randrange(200), rng.randrange(200)))
        ended = rng.choice([ended, began + 3])
        told = rng.randrange(ended, 260)
        numbered = device_boot is not None and rng.random() < 0.75
        wide = rng.choice([0, 0, 0, 1])
        site.losses.append(
            Loss(
                gateway,
                at(told),
                drawn_error(rng),
                told_boot,
                (told - clocks[gateway, told_boot]) * SECOND,
                rng.choice([device] * 6 + [None]),
                rng.choice(["buffer-full", "sensor-ring-overflow", "refused-qos0", "gateway-events-dropped"]),
                max(0, last - first + 1 + rng.choice([0, 0, 0, 1, -1])) * rng.choice([0, 1, 1, 1, 1]),
                boot,
                (began - start) * SECOND,
                (ended - start) * SECOND,
                device_boot if rng.random() < 0.9 else None,
                first - wide if numbered else None,
                last + wide if numbered else None,
            )
        )


def draw_beats(rng: random.Random, site: Site, gateway: str, clocks: dict[tuple[str, str], int]) -> None:
    buffers = rng.choice([["0011"], ["0011"], ["0011", "2233"]])
    second = rng.randrange(100)
    for buffer in buffers:
        for _ in range(rng.randrange(4)):
            second += rng.randrange(5, 90)
            boot = rng.choice(["boot-1", "boot-2"])

            def waiting(second: int = second) -> list[Waiting]:
                from_us, to_us = sorted((at(rng.randrange(second)), at(rng.randrange(second))))
                span = rng.choice([(from_us, to_us), (from_us, from_us + SECOND), (None, None)])
                return [Waiting(rng.randrange(1, 9), *span)] if rng.random() < 0.25 else []

            offsets = (
                {rng.choice([THERMO, POWER, QUARANTINE, "elsewhere"]): {0: rng.randrange(160)}}
                if rng.random() < 0.4
                else {}
            )
            site.beats.append(
                Beat(
                    *(gateway, buffer, at(second), drawn_error(rng), boot, (second - clocks[gateway, boot]) * SECOND),
                    *(offsets, waiting(), waiting(), rng.random() < 0.9),
                )
            )
        if len(buffers) > 1 and rng.random() < 0.5:
            site.set_aside.add((gateway, "0011"))


def drawn_windows(rng: random.Random, namespace: str, site: Site) -> set[Window]:
    streams = sorted({(reading.device, reading.stream) for reading in site.readings})
    windows = set()
    for device, stream in streams:
        for length in (1, 10, 60):
            starts = [rng.randrange(250 // length) * length for _ in range(8)]
            windows |= {Window(namespace, device, stream, at(start), at(start + length)) for start in starts}
    return windows


@pytest.mark.campaign(seconds=25)
@settings(max_examples=size(1, 3), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, 2**32))
def test_drawn_sites_are_judged_as_the_oracle_judges_them(spark: SparkSession, seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311
    sites = {f"site-{number}": drawn_site(rng) for number in range(size(20, 60))}
    windows = [window for name, site in sites.items() for window in drawn_windows(rng, name, site)]
    evidence = evidence_of(spark, sites, rng)
    assert gap_rows(evidence) == {name: gaps for name, site in sites.items() if (gaps := oracle_status.gaps(site))}
    found = {window: (row.status, row.basis) for window, row in verdicts(spark, evidence, windows).items()}
    assert found == {window: oracle_status.status(sites[window.namespace], *window[1:]) for window in windows}
