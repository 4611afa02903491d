"""How far the salvage of a file has come, as marks in the buffer keep it."""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.buffer.rows import SEQUENCE_MAX, Loss, Span, joined
from gateway.clock.kernel_clock import boottime_us

SALVAGE_PREFIX: Final = "salvage/"
"""Prefix of marks that hold a file's `Progress`; the damaged file's name follows."""
_ASIDE = re.compile(r"[^/\0]+\.corrupt-\d{8}T\d{6}\.\d{6}")
"""Names of files that are salvaged."""


class Progress(msgspec.Struct, frozen=True):
    """Progress of one file's salvage, kept as a mark so that the next start goes on with it.

    The rows come in order, so the last one tells the place.
    """

    lanes: dict[int, int]
    """Lane numbers of the damaged file, with their numbers in the new file."""
    lane: int
    sequence: int
    """The last row that was taken over, or could not be, with `lane`."""
    dense: list[int]
    """Lanes of the damaged file that were numbered there."""
    expected: int | None
    """Rows that the file held, if the daemon knew."""
    taken: int = 0
    holes: int = 0
    """Rows that are not there between those that were taken over."""
    gone: dict[int, int] = {}
    """By lane, the numbers whose rows were not in the file, or were no more: Kafka has them."""
    torn: bool = False
    """Whether an unknown number of further rows may be missing."""
    quarantined: int = 0
    """The last number of the quarantine, as of the rows. The quarantine goes before the rows."""
    quarantine_missing: int = 0
    """Numbers of the quarantine that could not be read: one for each input, unless it had been taken out before."""
    quarantine_torn: bool = False
    """Whether an unknown part of the quarantine may be missing."""
    gaps: list[Span] = []
    """Spans up to the last row, in the damaged file's lanes, to which the tree did not lead. If the disk gives their
    rows at a later start, they are taken over too."""
    forgotten: bool = False
    """Whether there were too many gaps: rows of the first ones are missing, even if the disk gives them later."""
    crowded: bool = False
    """Whether a former version had joined gaps. Rows between them come again, so nobody knows how many are missing."""
    ends: dict[int, tuple[int, int]] = {}
    """By lane, the first and the last row known to have been there."""
    quarantine_gaps: list[Span] = []
    """Such spans of the quarantine's numbers, under the lane 0."""
    rows_max: int | None = None
    """Most rows that a file of its size can hold."""
    ended: bool = False
    """Whether the salvage has ended, and only the file's name does not say so yet."""
    newer: bool = False
    """Whether only a newer version can read the file. The salvage begins once one runs."""
    version: int = 1
    """Former versions stored none."""

    def missing(self) -> int | None:
        """Rows that are lost, at least, once it has ended; None if the number is unknown."""
        if self.crowded:
            return None
        # A damaged number far from its place makes a hole that never was.
        gone = sum(max(0, self.gone.get(lane, 0) - first) for lane, (first, _) in self.ends.items())
        holes = max(0, self.holes - gone)
        believable = self.rows_max is None or holes + self.taken <= self.rows_max
        known = max(holes if believable else 0, (self.expected or 0) - self.taken)
        unknown = self.torn or self.forgotten or not self.lanes or not (believable or self.expected)
        return None if known == 0 and unknown else known

    def losses(self, boot_id: str) -> list[Loss]:
        """Losses to be counted once it has ended. An unknown number is counted as 0."""
        quarantine = None if self.quarantine_torn and self.quarantine_missing == 0 else self.quarantine_missing
        now_us = boottime_us()
        return [
            Loss("", f"{what}-damaged" if count else f"{what}-unreadable", boot_id, count or 0, now_us, now_us)
            for what, count in (("buffer", self.missing()), ("quarantine", quarantine))
            if count != 0
        ]


class _FormerProgress(Progress, frozen=True):
    """A mark, perhaps of a former version. That followed the trees first, and searched the pages for the rest then."""

    walked: bool = False
    """Whether the trees were followed to their ends."""
    unseen: list[Span] = []
    """Spans between rows that the trees led to, in lanes with holes."""
    scanned: tuple[int, int] = (-1, -1)
    """Lane and sequence of the last row that was taken over from the pages."""
    quarantine_unseen: list[Span] = []
    quarantine_scanned: int = 0
    version: int = 0

    def of_today(self) -> Progress:
        """The progress as this version has it. Rows that may not have been taken over stand in gaps."""
        of_today = Progress(**{name: getattr(self, name) for name in Progress.__struct_fields__})
        place, gaps, quarantine_gaps = (self.lane, self.sequence), self.gaps, self.quarantine_gaps
        if self.version == 0:
            ends = self.ends
            if not ends and self.sequence >= 0:
                ends = {self.lane: (0, self.sequence)}
            gaps = [*gaps, *self.unseen]
            if self.scanned < (0, 0):
                for lane in self.lanes:
                    first, last = ends.get(lane, (SEQUENCE_MAX, -1))
                    gaps += [Span(lane, 0, first - 1), Span(lane, last + 1, SEQUENCE_MAX)]
            if self.walked:
                place = max(self.lanes, default=-1), SEQUENCE_MAX
            of_today = replace(
                of_today, version=1, ends=ends, quarantined=max(self.quarantined, self.quarantine_scanned)
            )
            gaps = _behind(gaps, *self.scanned)
            quarantine_gaps = _behind([*quarantine_gaps, *self.quarantine_unseen], 0, self.quarantine_scanned)
        # Former versions had higher sequences, and a mark may be damaged. No row could end a gap that reaches so far.
        lane, sequence = place
        return replace(
            of_today,
            lane=lane,
            sequence=min(sequence, SEQUENCE_MAX),
            gaps=_possible(gaps),
            quarantine_gaps=_possible(quarantine_gaps),
        )


def _behind(spans: Iterable[Span], lane: int, sequence: int) -> list[Span]:
    """The spans' rows behind a row."""
    cut = (span._replace(first=max(span.first, sequence + 1)) if span.lane == lane else span for span in spans)
    return [span for span in cut if span.lane >= lane]


def _possible(spans: Iterable[Span]) -> list[Span]:
    """The spans' rows that a scan can find, as joined spans."""
    cut = (Span(lane, max(first, 0), min(last, SEQUENCE_MAX)) for lane, first, last in spans)
    return joined(span for span in cut if span.first <= span.last)


def kept_marks(marks: Mapping[str, bytes]) -> dict[str, Progress]:
    """Progress by the damaged file's name, without marks that cannot be decoded."""
    kept = {}
    for key, value in marks.items():
        name = key.removeprefix(SALVAGE_PREFIX)
        if name != key and _ASIDE.fullmatch(name):
            with suppress(msgspec.DecodeError):
                kept[name] = msgspec.json.decode(value, type=_FormerProgress).of_today()
    return kept
