from pathlib import Path

from demo.audit import TableReading
from demo.time_audit import UNBOUNDED_US, QualityAudit, audit_times, read_taken

NOON_US = 1_750_000_000_000_000


def row(sequence: int, quality: str = "estimated", *, error_us: int = 1_000, metric: str = "celsius") -> TableReading:
    return TableReading("s1", "1-aa", sequence, metric, NOON_US + sequence, 21.5, error_us, quality)


def test_each_reading_is_held_against_when_it_was_measured() -> None:
    rows = [row(0), row(0, metric="humidity"), row(1), row(2, error_us=3_000), row(3)]
    true_us = {0: NOON_US, 1: NOON_US + 1 - 1_000, 2: NOON_US + 2 + 3_001}

    times = audit_times(rows, {("s1", "1-aa", sequence): at_us for sequence, at_us in true_us.items()})

    # What is not known of the last one is not held against it; a bound that is just kept is kept.
    assert times.qualities == (
        QualityAudit(
            "estimated",
            readings=4,
            unbounded=0,
            bound_median_us=1_000,
            bound_max_us=3_000,
            off_median_us=1_000,
            off_max_us=3_001,
            judged=3,
            within=2,
        ),
    )
    assert times.off_us == {("s1", "1-aa", 0): 0, ("s1", "1-aa", 1): 1_000, ("s1", "1-aa", 2): -3_001}
    assert times.findings == ("1 of 3 readings were not measured within the bound of their time",)


def test_times_of_receipt_are_not_judged() -> None:
    rows = [row(0, "received"), row(1, "bounded", error_us=UNBOUNDED_US), row(2)]
    times = audit_times(rows, {each.identity: NOON_US - 60_000_000 for each in rows[:2]})
    assert (times.judged, times.within, times.findings) == (0, 0, ())
    bounded, estimated, received = times.qualities
    assert (bounded.unbounded, bounded.bound_median_us, bounded.bound_max_us) == (1, None, None)
    assert (received.off_max_us, estimated.off_max_us) == (60_000_000, None)


def test_one_in_a_thousand_may_lie_outside() -> None:
    rows = [row(sequence) for sequence in range(2_000)]
    taken = {each.identity: each.event_us for each in rows}
    wrong = {each.identity: each.event_us + 2_000 for each in rows[:3]}
    assert audit_times(rows, taken | dict(list(wrong.items())[:2])).findings == ()
    assert audit_times(rows, taken | wrong).findings == (
        "3 of 2,000 readings were not measured within the bound of their time",
    )


def test_the_simulators_samples_are_read(tmp_path: Path) -> None:
    fleet, board = tmp_path / "fleet.samples", tmp_path / "board-1.samples"
    fleet.write_text("device,boot,sequence,time_us\nm001,1-aa,0,17\n")
    board.write_text("boot,sequence,centi_celsius,time_us\n7-1a2b3c4d,4,2153,18\n")
    expected = {("m001", "1-aa", 0): 17, ("board-1", "7-1a2b3c4d", 4): 18}
    assert read_taken(fleet, [board]) == expected
    assert read_taken(tmp_path / "none", [board]) == {("board-1", "7-1a2b3c4d", 4): 18}
