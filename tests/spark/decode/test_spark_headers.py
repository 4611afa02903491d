"""Headers as the rule book reads them, against the contract."""

from dataclasses import replace

import pytest

from tests.support import spark_oracle
from tests.support.oracle_payloads import UnreadableError
from tests.support.read_records import rows_read, rows_typed
from tests.support.spark_records import changed, reading, reading_headers

GOOD = reading_headers(device_boot="7-1a2b3c4d")
HEADER_FAULTS: list[tuple[spark_oracle.Headers | None, str]] = [
    ([], "there is none of the gateway's headers"),
    (None, "there is none of the gateway's headers"),
    ([("traceparent", b"00")], "there is none of the gateway's headers"),
    (GOOD[:13], "content-type is missing"),
    (GOOD[:15], "ce_devicesequence is missing"),
    ([*GOOD[:14], ("ce_devicecounter", b"a")], "ce_deviceboot is missing"),
    ([*GOOD[:4], ("CE_SUBJECT", b"a"), *GOOD[5:]], "ce_subject is missing"),
    (GOOD[1::-1] + GOOD[2:], "ce_id stands where ce_specversion belongs"),
    ([*GOOD, ("extra", b"1"), ("ce_subject", b"a")], "ce_subject is there more than once"),
    ([*GOOD[:4], ("ce_subject", None), *GOOD[5:]], "ce_subject has no value in UTF-8"),
    ([*GOOD[:4], ("ce_subject", b"\xff"), ("extra", b"1"), *GOOD[5:]], "ce_subject has no value in UTF-8"),
    (changed(GOOD, "ce_specversion", "0.3"), "ce_specversion"),
    (changed(GOOD, "ce_source", "gw-1"), "ce_source"),
    (changed(GOOD, "ce_id", "1"), "ce_id"),
    (changed(GOOD, "ce_lane", "ffffffffffff"), "ce_id"),
    (changed(GOOD, "ce_lanesequence", "2"), "ce_id"),
    (changed(GOOD, "ce_time", "2026-03-14T12:00:00Z"), "ce_time"),
    (changed(GOOD, "ce_time", "2026-13-14T12:00:00.000000Z"), "ce_time"),
    (changed(GOOD, "ce_time", "2026-03-14T12:00:00.000000+00:00"), "ce_time"),
    (changed(GOOD, "ce_receivedtime", ""), "ce_receivedtime"),
    (changed(GOOD, "ce_timeerror", "-1"), "ce_timeerror"),
    (changed(GOOD, "ce_timeerror", "9223372036854775808"), "ce_timeerror"),
    (changed(GOOD, "ce_boottime", "1.5"), "ce_boottime"),
    (changed(GOOD, "ce_devicesequence", "x"), "ce_devicesequence"),
    ([*GOOD, ("ce_boottimeerror", b"-1")], "ce_boottimeerror"),
    ([*GOOD, ("ce_boottimeerror", b"9223372036854775808")], "ce_boottimeerror"),
    ([*GOOD, ("ce_boottimeerror", b"nan")], "ce_boottimeerror"),
    ([*GOOD, ("ce_boottimeerror", b"1"), ("ce_doubt", b"conflict")], "ce_boottimeerror stands where ce_doubt belongs"),
    ([*GOOD, ("ce_doubt", b"true")], "ce_doubt"),
    ([*GOOD, ("ce_doubt", None)], "ce_doubt has no value in UTF-8"),
    ([*GOOD[:14], ("ce_doubt", b"conflict"), *GOOD[14:]], "ce_doubt stands where ce_deviceboot belongs"),
    ([*GOOD, ("ce_doubt", b"conflict"), ("ce_doubt", b"conflict")], "ce_doubt is there more than once"),
]


def test_headers_that_are_not_the_contracts_say_why_and_the_bytes_are_kept() -> None:
    records = [replace(reading(), headers=headers, offset=offset) for offset, (headers, _) in enumerate(HEADER_FAULTS)]

    rows = rows_read(records)

    for row, record, (_, reason) in zip(rows, records, HEADER_FAULTS, strict=True):
        assert row.reject_reason.startswith(f"header: {reason}")
        assert row.value == record.value
        assert row.metrics is None
        with pytest.raises(UnreadableError):
            spark_oracle.read_headers(record)


def test_headers_of_others_are_passed_over_and_kept() -> None:
    whole = [*GOOD, ("ce_doubt", b"redelivered"), ("ce_boottimeerror", b"5")]
    trace: tuple[str, bytes | None] = ("traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    others: list[list[tuple[str, bytes | None]]] = [
        [trace],
        [("", None), ("raw", b"\xff"), trace, trace],
        [("__source_offset", b"\0\0\0\7"), ("ce_Subject", b"other"), ("ce_traceparent", b"\xfe")],
        [("many", b"x" * 10_000)] * 40,
    ]
    headers = [
        made
        for extra in others
        for made in (
            [*extra, *whole],
            [*whole, *extra],
            # Between each two of ours in turn.
            [each for place, ours in enumerate(whole) for each in (ours, *extra[place : place + 1])]
            + extra[len(whole) :],
        )
    ]
    records = [replace(reading(), headers=each, offset=offset) for offset, each in enumerate([whole, *headers])]

    plain, *rows = rows_read(records)

    assert (plain.headers, plain.reject_reason) == (None, None)
    columns = [name for name in plain.asDict() if name not in {"offset", "headers"}]
    for place, row in enumerate(rows):
        assert [row[name] for name in columns] == [plain[name] for name in columns]
        kept = [(each.key, None if each.value is None else bytes(each.value)) for each in row.headers]
        assert kept == [(name, value and value[:8_192]) for name, value in others[place // 3][:32]]
        assert spark_oracle.read_headers(records[place + 1]).ce_id == plain.ce_id


def test_headers_become_typed_columns() -> None:
    headers = reading_headers(17, error_us=2**63 - 1, namespace="attic", device_boot="7-1a2b3c4d")
    event = reading_headers(18, event_type="sluice.gateway.heartbeat")
    records = [reading(headers=headers, key=b"attic/42"), reading(b'{"depth": 7}', event, key=b"gw-1", offset=1)]

    taken, heartbeat = rows_read(records)

    assert (taken.namespace, taken.gateway, taken.device, taken.stream) == ("attic", "gw-1", "42", "device-thermo")
    assert (taken.key, taken.lane, taken.lane_sequence) == ("attic/42", "0123456789ab", 17)
    assert (taken.buffer, taken.ce_id) == ("00112233445566aa", "00112233445566aa-0123456789ab-17")
    assert (taken.time_error_us, taken.boot_time_us) == (2**63 - 1, 123456789)
    assert (taken.device_boot, taken.device_sequence) == ("7-1a2b3c4d", 17)
    # A gateway's own events are kept. They are neither measurements nor rejects.
    assert (heartbeat.device_boot, heartbeat.device_sequence) == (None, None)
    assert (heartbeat.metrics, heartbeat.reject_reason) == (None, None)


def test_headers_that_are_there_or_not_are_found_in_each_combination() -> None:
    shapes = [
        (boot, counter, doubt, error_us)
        for boot, counter in ((None, None), ("7-1a2b3c4d", None), ("7-1a2b3c4d", "site/42/thermo"))
        for doubt in (None, "redelivered", "conflict")
        for error_us in (None, 0, 2**63 - 1)
    ]
    records = [
        reading(
            headers=reading_headers(17, device_boot=boot, counter=counter, doubt=doubt, boot_error_us=error_us),
            offset=offset,
        )
        for offset, (boot, counter, doubt, error_us) in enumerate(shapes)
    ]

    rows = rows_typed([*records, reading(headers=[], offset=99)])

    found = [
        (r.device_boot, r.device_sequence, r.device_counter, r.doubt, r.boot_time_error_us, r.header_fault)
        for r in rows
    ]
    assert found[:-1] == [
        (boot, None if boot is None else 17, counter, doubt, error_us, None)
        for boot, counter, doubt, error_us in shapes
    ]
    assert (rows[-1].doubt, rows[-1].boot_time_error_us) == (None, None)
