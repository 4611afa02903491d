"""A sample that a ring dropped is counted once, whichever line finds it out."""

from gateway.serial_lines.frame_link import Identified, Lost
from gateway.serial_lines.port_line import RUNS_MAX, RingLosses
from tests.support.broker_intake import MemoryIntake

BOOT = "7-1a2b3c4d"


class Counting(MemoryIntake):
    """An intake that records losses."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str | None, str, int, tuple[str, int, int] | None]] = []

    def lost(
        self, device: str | None, reason: str, count: int = 1, sequences: tuple[str, int, int] | None = None
    ) -> None:
        self.told.append((device, reason, count, sequences))


def told(*losses: Lost) -> list[tuple[str, int, int]]:
    """The spans that are counted, with their boots."""
    intake = Counting()
    ring = RingLosses(intake)
    for lost in losses:
        ring.tell(lost)
    spans = [sequences for _, _, _, sequences in intake.told if sequences is not None]
    assert [each[:3] for each in intake.told] == [
        ("s1", "sensor-ring-overflow", last - first + 1) for _, first, last in spans
    ]
    return spans


def lost(first: int, last: int, boot: str = BOOT) -> Lost:
    return Lost("s1", boot, first, last)


def test_a_span_that_is_found_again_is_told_once() -> None:
    assert told(lost(5, 9), lost(5, 9), lost(3, 8)) == [(BOOT, 5, 9)]


def test_of_a_span_that_reaches_further_the_rest_is_told() -> None:
    assert told(lost(5, 9), lost(5, 12), lost(20, 21)) == [(BOOT, 5, 9), (BOOT, 10, 12), (BOOT, 20, 21)]


def test_a_span_that_kafka_may_have_is_told_without_a_count() -> None:
    intake = Counting()
    ring = RingLosses(intake)
    for lost_ in (Lost("s1", BOOT, 5, 9, is_sure=False), lost(10, 12)):
        ring.tell(lost_)
        ring.tell(lost_)
    assert intake.told == [
        ("s1", "sensor-ring-overflow", 0, (BOOT, 5, 9)),
        ("s1", "sensor-ring-overflow", 3, (BOOT, 10, 12)),
    ]


def test_another_run_has_spans_of_its_own() -> None:
    other = "8-1a2b3c4d"
    assert told(lost(5, 9), lost(5, 9, other), lost(5, 9)) == [(BOOT, 5, 9), (other, 5, 9)]


def test_of_ever_new_runs_only_so_many_are_remembered() -> None:
    ring = RingLosses(Counting())
    for boot in range(2 * RUNS_MAX):
        ring.tell(lost(0, 1, f"{boot}-1a2b3c4d"))
    assert len(ring._told_below) == RUNS_MAX


def test_drops_of_a_failed_boot_counter_are_reported_although_their_sequences_were_before() -> None:
    intake = Counting()
    ring = RingLosses(intake)
    for following, first, last in ((0, 0, 4999), (5064, 4990, 5002), (3, 3, 299)):
        ring.begin(Identified("s1", BOOT, "1.0", 2, ("thermo",), 0, following))
        ring.tell(lost(first, last))
    assert [count for _, _, count, _ in intake.told] == [5000, 3, 297]
