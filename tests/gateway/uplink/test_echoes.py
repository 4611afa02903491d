"""The echoes of a reading: which topics must have a row, and which readings are the last."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.buffer.rows import Row, StructuredEvents
from gateway.settings import KafkaSettings
from gateway.uplink import echoes
from gateway.uplink.echoes import EchoedRows, LastReadings, echo_topics
from tests.support.buffers import entry, row_of

KAFKA = KafkaSettings(("127.0.0.1:1",))


def test_a_series_has_the_topics_that_its_route_and_the_gateway_want() -> None:
    plain = entry().series
    beside = replace(plain, structured=StructuredEvents(beside=True))
    latest = KafkaSettings(("127.0.0.1:1",), latest_topic="{topic}.now")
    assert echo_topics(plain, KAFKA) == {}
    assert echo_topics(replace(plain, structured=StructuredEvents(instead=True)), KAFKA) == {}
    assert echo_topics(beside, KAFKA) == {"structured-device-thermo": False}
    assert echo_topics(beside, latest) == {"structured-device-thermo": False, "device-thermo.now": True}
    assert echo_topics(replace(plain, type="sluice.gateway.boot"), latest) == {}


OWN, BESIDE, LATEST = "device-thermo", "structured-device-thermo", "latest-device-thermo"
WANTED = {0: [OWN], 1: [OWN, BESIDE], 2: [OWN, BESIDE, LATEST], 3: [OWN, LATEST]}


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([OWN, BESIDE, LATEST, "again", "session"])), max_size=60))
def test_a_row_is_settled_once_all_its_topics_have_it_and_none_gets_it_twice(events: list[tuple[int, str]]) -> None:
    echoed, rows = EchoedRows(), [row_of(number) for number in WANTED]
    have: dict[int, set[str]] = {number: set() for number in WANTED}
    unanswered: dict[int, set[str]] = {number: set() for number in WANTED}

    def is_settled(number: int, settled: Sequence[Row]) -> bool:
        assert list(settled) in ([], [rows[number]])
        if settled:
            assert have[number] == set(WANTED[number])
            assert echoed.settled(settled) == 0
            have[number].clear()
        return bool(settled)

    def send(number: int) -> None:
        lacking = echoed.begin([rows[number]], WANTED[number])
        unanswered[number] = set(WANTED[number]) - have[number]
        assert {topic for topic, some in lacking.items() if some} == unanswered[number]
        for topic in unanswered[number]:
            echoed.sent([rows[number]], topic)
        assert is_settled(number, echoed.complete()) is not bool(unanswered[number])

    echoed.begin_session("file")
    for number, event in events:
        if event == "session":
            echoed.begin_session("file")
            for each in unanswered.values():
                each.clear()
        elif event == "again":
            send(number)
        elif event in unanswered[number]:
            unanswered[number].discard(event)
            have[number].add(event)
            settled = echoed.acknowledged([rows[number]], event)
            assert is_settled(number, settled) is not bool(unanswered[number])


def test_an_event_that_is_left_out_counts_once_with_its_row() -> None:
    echoed, row = EchoedRows(), row_of(1)
    for session in ("file", "file"):
        echoed.begin_session(session)
        echoed.begin([row], [OWN])
        echoed.leave_out([row], BESIDE)
        echoed.sent([row], OWN)
    assert echoed.begin([row], [OWN, BESIDE])[BESIDE] == []
    assert echoed.settled([row_of(2)]) == 0
    assert [echoed.settled([row]), echoed.settled([row])] == [1, 0]


def test_another_file_has_other_rows_under_these_numbers() -> None:
    echoed, row = EchoedRows(), row_of(1)
    echoed.begin_session("file")
    echoed.leave_out([row], BESIDE)
    echoed.begin_session("another file")
    assert echoed.lacks(row, BESIDE)
    assert echoed.settled([row]) == 0


def test_what_is_remembered_of_rows_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echoes, "HAVE_MAX", 2)
    echoed = EchoedRows()
    for number in range(3):
        echoed.begin([row_of(number)], [OWN, BESIDE])
        for topic in (OWN, BESIDE):
            echoed.sent([row_of(number)], topic)
        assert not echoed.acknowledged([row_of(number)], OWN)
    assert [echoed.lacks(row_of(number), OWN) for number in range(3)] == [True, True, False]
    echoed.nothing_waits()
    assert echoed.lacks(row_of(2), OWN)


def went_out(last: LastReadings, key: bytes, row: Row) -> bool:
    """Send a reading if it is the last one of its key. Returns whether it is."""
    is_last = last.is_last(LATEST, key, row)
    if is_last:
        last.sent(LATEST, key, row)
    return is_last


def test_a_backlog_does_not_overwrite_the_last_reading() -> None:
    last = LastReadings()
    last.begin_session("file")
    old, new, later = row_of(5, lane=1), row_of(0, lane=2), row_of(1, lane=2)
    assert went_out(last, b"42", new)
    assert not went_out(last, b"42", old)
    assert went_out(last, b"43", old)
    last.taken(LATEST, [new])
    last.begin_session("file")
    assert not went_out(last, b"42", old)
    assert went_out(last, b"42", new), "it may be sent again"
    assert went_out(last, b"42", later)
    # Nobody knows whether Kafka has it, so the one before it may go again.
    last.begin_session("file")
    assert went_out(last, b"42", new)
    last.begin_session("another file")
    assert went_out(last, b"42", row_of(0, lane=1))


def test_what_is_remembered_of_last_readings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echoes, "LATEST_MAX", 2)
    last = LastReadings()
    last.begin_session("file")
    for key in (b"1", b"2", b"3"):
        row = row_of(int(key))
        assert went_out(last, key, row)
        last.taken(LATEST, [row])
    last.begin_session("file")
    assert [went_out(last, key, row_of(0)) for key in (b"1", b"2", b"3")] == [True, True, False]
