"""The echoes of a reading: which topics must have a row, and which readings are the last."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gateway.buffer.rows import StructuredEvents
from gateway.settings import KafkaSettings
from gateway.uplink import echoes
from gateway.uplink.echoes import LastReadings, OwedRows, echo_topics
from tests.support.buffers import entry, row_of

KAFKA = KafkaSettings(("127.0.0.1:1",))
OWN, BESIDE, LATEST = ("device-thermo", 0), ("structured-device-thermo", 0), ("latest-device-thermo", 0)


def test_a_series_has_the_topics_that_its_route_and_the_gateway_want() -> None:
    plain = entry().series
    beside = replace(plain, structured=StructuredEvents(beside=True))
    latest = KafkaSettings(("127.0.0.1:1",), latest_topic="{topic}.now")
    assert echo_topics(plain, KAFKA) == {}
    assert echo_topics(replace(plain, structured=StructuredEvents(instead=True)), KAFKA) == {}
    assert echo_topics(beside, KAFKA) == {"structured-device-thermo": False}
    assert echo_topics(beside, latest) == {"structured-device-thermo": False, "device-thermo.now": True}
    assert echo_topics(replace(plain, type="sluice.gateway.boot"), latest) == {}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["own", "beside", "latest", "again"])), max_size=40),
)
def test_a_row_is_settled_once_each_of_its_partitions_has_it_since_it_was_last_sent(events: list[Any]) -> None:
    owed = OwedRows()
    rows = [row_of(number) for number in range(4)]
    wanted = {0: {OWN}, 1: {OWN, BESIDE}, 2: {OWN, BESIDE, LATEST}, 3: {OWN, LATEST}}
    left = {number: set[Any]() for number in wanted}

    def send(number: int) -> None:
        left[number] = set(wanted[number])
        owed.begin([rows[number]])
        for partition in sorted(wanted[number] - {OWN}):
            owed.owe([rows[number]], partition, OWN)

    for number in wanted:
        send(number)
    for number, event in events:
        if event == "again":
            send(number)
            continue
        partition = {"own": OWN, "beside": BESIDE, "latest": LATEST}[event]
        if partition in left[number]:
            left[number].discard(partition)
            settled = owed.acknowledged(partition, [rows[number]])
            assert bool(settled) is not bool(left[number])


def test_a_backlog_does_not_overwrite_the_last_reading() -> None:
    last = LastReadings()
    last.begin_session("file")
    old, new, later = row_of(5, lane=1), row_of(0, lane=2), row_of(1, lane=2)
    assert last.is_news("latest", b"42", new)
    assert not last.is_news("latest", b"42", old)
    assert last.is_news("latest", b"43", old)
    last.taken("latest", [new])
    last.begin_session("file")
    assert not last.is_news("latest", b"42", old)
    assert last.is_news("latest", b"42", new), "it may be sent again"
    assert last.is_news("latest", b"42", later)
    # Nobody knows whether Kafka has it, so the one before it may go again.
    last.begin_session("file")
    assert last.is_news("latest", b"42", new)
    last.begin_session("another file")
    assert last.is_news("latest", b"42", row_of(0, lane=1))


def test_what_is_remembered_of_last_readings_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(echoes, "LATEST_MAX", 2)
    last = LastReadings()
    last.begin_session("file")
    for key in (b"1", b"2", b"3"):
        row = row_of(int(key))
        assert last.is_news("latest", key, row)
        last.taken("latest", [row])
    last.begin_session("file")
    assert [last.is_news("latest", key, row_of(0)) for key in (b"1", b"2", b"3")] == [True, True, False]
