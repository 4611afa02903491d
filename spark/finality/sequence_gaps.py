"""Finds the gaps in a device's numbers, with their times and the losses that explain them. It needs no Spark."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

from spark.log.edge_times import FOREVER_US, Moment

COUNT_MAX = 2**63 - 1


class TimedIsland(NamedTuple):
    """Contiguous numbers of a boot in `log`, with the times of the first and the last, as they are known now."""

    stream: str
    device_counter: str
    """Counter; empty if stream and device imply it."""
    device_boot: str
    first: int
    last: int
    first_at: Moment
    last_at: Moment


class TimedLoss(NamedTuple):
    """A loss of the device's readings that a gateway told of."""

    reason: str
    size: int
    device_boot: str | None
    first_sequence: int | None
    last_sequence: int | None
    from_us: int
    to_us: int


class Gap(NamedTuple):
    """Numbers that are missing between two islands, with the times of the readings before and after.

    They were taken between `from_us` and `to_us`.
    """

    run: int
    """Number of a boot and stream. All counters of one boot and stream share it."""
    stream: str | None
    """Stream; None if the device's streams share one counter."""
    device_counter: str | None
    """Counter; None if the device's streams share it, or if the stream implies it."""
    device_boot: str
    first: int
    last: int
    size: int
    after: Moment
    before: Moment
    from_us: int
    to_us: int
    explained: bool
    """Whether losses tell of them all. Those of a loss that nobody could count may still come."""
    reasons: list[str]


class Proven(NamedTuple):
    """A span of time. All readings of a run from it are here, except those whose loss is explained."""

    run: int
    from_us: int
    to_us: int


class StreamProof(NamedTuple):
    """The proofs and gaps of one stream, by its numbers."""

    stream: str
    proven: list[Proven]
    gaps: list[Gap]


class Judged(NamedTuple):
    """The proofs and gaps of one device, by its numbers."""

    gaps: list[Gap]
    streams: list[StreamProof]


@dataclass(slots=True)
class _Run:
    """One counter in one boot."""

    stream: str | None
    device_counter: str | None
    streams: set[str]
    device_boot: str
    islands: list[TimedIsland]
    reasons: dict[int, set[str]] = field(default_factory=dict)
    """Reasons of the explained holes, by place. The hole of place n is behind island n."""
    uncounted: dict[int, set[str]] = field(default_factory=dict)
    """Reasons of further holes that are explained only together with losses that nobody could count."""

    def holes(self) -> list[tuple[int, int]]:
        return [(before.last + 1, after.first - 1) for before, after in pairwise(self.islands)]

    def spans_us(self) -> list[tuple[int, int]]:
        """The times between which each hole's readings were taken. Numbers rise with time, so all islands tell."""
        count = len(self.islands)
        earliest = [-FOREVER_US] * (count + 1)
        latest = [FOREVER_US] * (count + 1)
        for place, island in enumerate(self.islands):
            ends = island.first_at.earliest_us(), island.last_at.earliest_us()
            earliest[place + 1] = max(earliest[place], *ends)
        for place in reversed(range(count)):
            island = self.islands[place]
            ends = island.first_at.latest_us(), island.last_at.latest_us()
            latest[place] = min(latest[place + 1], *ends)
        # If a sensor's numbers went back within a boot, so do the times. Then all times between them are in doubt.
        spans = [(earliest[place + 1], latest[place + 1]) for place in range(count - 1)]
        return [(min(span), max(span)) for span in spans]


def judged(islands: Iterable[TimedIsland], losses: Iterable[TimedLoss]) -> Judged:
    """Judge one device's numbers. Islands may overlap or touch, because their table is only appended to."""
    runs = _runs(islands)
    told = list(losses)
    for boot, of_boot in groupby(runs, key=lambda run: run.device_boot):
        _explain_by_numbers(list(of_boot), [loss for loss in told if loss.device_boot == boot])
    _explain_by_times(runs, [loss for loss in told if not _has_numbers(loss)])
    numbered = [(number, list(of_stream)) for number, (_, of_stream) in enumerate(groupby(runs, key=_stream_of_boot))]
    gaps = {number: [gap for run in of_stream for gap in _gaps(number, run)] for number, of_stream in numbered}
    proven = {number: _proven_by_all(number, of_stream) for number, of_stream in numbered}
    streams = sorted({stream for run in runs for stream in run.streams})
    return Judged(
        [gap for of_run in gaps.values() for gap in of_run],
        [
            StreamProof(
                stream,
                [span for number, (run, *_) in numbered if stream in run.streams for span in proven[number]],
                [gap for number, (run, *_) in numbered if stream in run.streams for gap in gaps[number]],
            )
            for stream in streams
        ],
    )


def _stream_of_boot(run: _Run) -> tuple[str, str | None]:
    return run.device_boot, run.stream


def _runs(islands: Iterable[TimedIsland]) -> list[_Run]:
    """Find the device's counters. All streams of a boot share one, unless a number came in two of them.

    Runs of one boot and stream stand together.
    """
    by_boot: dict[str, dict[tuple[str, str], list[TimedIsland]]] = defaultdict(lambda: defaultdict(list))
    for island in islands:
        by_boot[island.device_boot][island.stream, island.device_counter].append(island)
    runs: list[_Run] = []
    for boot, by_counter in sorted(by_boot.items()):
        united = {counter: _united(of_counter) for counter, of_counter in sorted(by_counter.items())}
        ordered = sorted((island for of_counter in united.values() for island in of_counter), key=_first)
        if any(after.first <= before.last for before, after in pairwise(ordered)):
            runs += [
                _Run(stream, counter or None, {stream}, boot, of_counter)
                for (stream, counter), of_counter in united.items()
            ]
        else:
            runs.append(_Run(None, None, {stream for stream, _ in united}, boot, _united(ordered)))
    return runs


def _first(island: TimedIsland) -> int:
    return island.first


def _united(islands: Sequence[TimedIsland]) -> list[TimedIsland]:
    united: list[TimedIsland] = []
    for island in sorted(islands, key=lambda island: (island.first, island.first_at.error_us, island)):
        before = united[-1] if united else None
        if before is None or island.first > before.last + 1:
            united.append(island)
        elif (island.last, -island.last_at.error_us) > (before.last, -before.last_at.error_us):
            united[-1] = before._replace(last=island.last, last_at=island.last_at)
    return united


def _has_numbers(loss: TimedLoss) -> bool:
    return loss.device_boot is not None and loss.first_sequence is not None


class _Cluster(NamedTuple):
    """Losses whose numbers overlap."""

    first: int
    last: int
    size: int
    reasons: set[str]


def _explain_by_numbers(runs: list[_Run], losses: Iterable[TimedLoss]) -> None:
    """Explain holes of one boot whose numbers all lie within losses.

    A loss record says how many numbers of a range are lost. If more are missing there, nobody knows which are lost and
    which may still come. Then it explains none.
    """
    told = list(losses)
    clusters = _clusters(loss for loss in told if loss.size)
    ends = [cluster.last for cluster in clusters]
    parts: list[tuple[_Run, int, int, int]] = []
    missing = [0] * len(clusters)
    for run in runs:
        for place, (first, last) in enumerate(run.holes()):
            number = bisect_left(ends, first)
            while number < len(clusters) and clusters[number].first <= last:
                part = min(last, clusters[number].last) - max(first, clusters[number].first) + 1
                parts.append((run, place, number, part))
                missing[number] += part
                number += 1
    for run in runs:
        holes = run.holes()
        for place, of_hole in groupby((part for part in parts if part[0] is run), key=lambda part: part[1]):
            enough = [(number, part) for _, _, number, part in of_hole if clusters[number].size >= missing[number]]
            if sum(part for _, part in enough) == holes[place][1] - holes[place][0] + 1:
                run.reasons[place] = {reason for number, _ in enough for reason in clusters[number].reasons}
    uncounted = _clusters(loss for loss in told if not loss.size)
    if uncounted and len(runs) == 1:
        # Of several counters, nobody knows which one's numbers these are.
        counted = [cluster for cluster, lacking in zip(clusters, missing, strict=True) if cluster.size >= lacking]
        _explain_uncounted(runs[0], sorted([*counted, *uncounted], key=lambda cluster: cluster.first))


def _clusters(losses: Iterable[TimedLoss]) -> list[_Cluster]:
    """Losses with numbers, in order of these, put together where they overlap."""
    clusters: list[_Cluster] = []
    numbered = [(loss.first_sequence, loss.last_sequence or 0, loss) for loss in losses if _has_numbers(loss)]
    for first, last, loss in sorted((first, last, loss) for first, last, loss in numbered if first is not None):
        before = clusters[-1] if clusters else None
        if before is not None and first <= before.last:
            reasons = before.reasons | {loss.reason}
            clusters[-1] = _Cluster(before.first, max(last, before.last), before.size + loss.size, reasons)
        else:
            clusters.append(_Cluster(first, last, loss.size, {loss.reason}))
    return clusters


def _explain_uncounted(run: _Run, told: list[_Cluster]) -> None:
    """Explain holes whose numbers all lie within losses, of which nobody could count some. `told` are in order."""
    for place, (first, last) in enumerate(run.holes()):
        near = [cluster for cluster in told if cluster.first <= last and cluster.last >= first]
        untold = first
        for cluster in near:
            if cluster.first <= untold:
                untold = max(untold, cluster.last + 1)
        if untold > last:
            run.uncounted[place] = {reason for cluster in near for reason in cluster.reasons}


def _explain_by_times(runs: list[_Run], losses: list[TimedLoss]) -> None:
    """Explain the other holes by losses without numbers, if their counts suffice for each hole, and for all together.

    Losses and holes are grouped if their times overlap, directly or through others. A group is judged as a whole,
    because a loss cannot explain two holes.
    """
    if not losses:
        return
    holes = [
        (span, run, place, last - first + 1)
        for run in runs
        for place, ((first, last), span) in enumerate(zip(run.holes(), run.spans_us(), strict=True))
        if place not in run.reasons
    ]
    spans = sorted([span for span, *_ in holes] + [(loss.from_us, loss.to_us) for loss in losses])
    groups: list[tuple[int, int]] = []
    for from_us, to_us in spans:
        if groups and from_us <= groups[-1][1]:
            groups[-1] = groups[-1][0], max(groups[-1][1], to_us)
        else:
            groups.append((from_us, to_us))
    ends = [to_us for _, to_us in groups]
    missing, lost = [0] * len(groups), [0] * len(groups)
    for span, _, _, size in holes:
        missing[bisect_left(ends, span[1])] += size
    for loss in losses:
        lost[bisect_left(ends, loss.to_us)] += loss.size
    for span, run, place, size in holes:
        group = bisect_left(ends, span[1])
        if lost[group] < missing[group]:
            continue
        near = [
            loss
            for loss in losses
            if loss.from_us <= span[1] and loss.to_us >= span[0] and loss.device_boot in {None, run.device_boot}
        ]
        if sum(loss.size for loss in near) >= size:
            run.reasons[place] = {loss.reason for loss in near}


def _gaps(number: int, run: _Run) -> list[Gap]:
    return [
        Gap(
            number,
            run.stream,
            run.device_counter,
            run.device_boot,
            before.last + 1,
            after.first - 1,
            min(after.first - before.last - 1, COUNT_MAX),
            before.last_at,
            after.first_at,
            *span_us,
            place in run.reasons or place in run.uncounted,
            sorted(run.reasons.get(place) or run.uncounted.get(place, set())),
        )
        for place, ((before, after), span_us) in enumerate(zip(pairwise(run.islands), run.spans_us(), strict=True))
    ]


def _proven_by_all(number: int, runs: list[_Run]) -> list[Proven]:
    """Find the times that all counters of a stream prove. Of a counter that does not, readings may still come."""
    proven, *others = [_proven(number, run) for run in runs]
    for other in others:
        both: list[Proven] = []
        place = 0
        for span in proven:
            while place < len(other) and other[place].from_us < span.to_us:
                from_us, to_us = max(span.from_us, other[place].from_us), min(span.to_us, other[place].to_us)
                if from_us < to_us:
                    both.append(Proven(number, from_us, to_us))
                if other[place].to_us > span.to_us:
                    break
                place += 1
        proven = both
    return proven


def _proven(number: int, run: _Run) -> list[Proven]:
    """Find the span from each island's first reading to the last of the islands that explained holes join to it."""
    spans: list[Proven] = []
    reach_us = -FOREVER_US
    for place in reversed(range(len(run.islands))):
        island = run.islands[place]
        own_us = island.last_at.earliest_us()
        reach_us = max(own_us, reach_us) if place in run.reasons else own_us
        from_us = island.first_at.latest_us()
        if from_us < reach_us:
            spans.append(Proven(number, from_us, reach_us))
    # Drop spans that lie within another.
    widest: list[Proven] = []
    for span in sorted(spans, key=lambda span: (span.from_us, -span.to_us)):
        if not widest or span.to_us > widest[-1].to_us:
            widest.append(span)
    return widest
