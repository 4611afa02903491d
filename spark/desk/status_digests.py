"""Digests of the evidence by day: the status of a day's windows can only have changed if the day's digest has.

A window's status follows from its stream's proof, and of that only from those spans of time that reach into the window.
No window crosses midnight. So a day's digest is made of all spans of all streams, each cut to the day. Digests of spans
are added up. Thus a span of a year costs no more than a span of two days.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import date
from hashlib import blake2b

from spark.desk.evidence import Device
from spark.finality.stream_proofs import StreamProof
from spark.log.edge_times import FOREVER_US

DAY_US = 86_400_000_000
BITS = 64
EPOCH = date(1970, 1, 1)


def digests(proofs: Iterable[tuple[Device, StreamProof]], days: Iterable[date]) -> dict[date, str]:
    """Return the digest of each of these days."""
    sums = _Sums()
    for device, proof in proofs:
        stream = (*device, proof.stream)
        runs = _places(proof)
        if proof.last_us is not None:
            sums.add((*stream, "last"), -FOREVER_US, proof.last_us)
        for proven in proof.proven:
            sums.add((*stream, "proven", runs[proven.run]), proven.from_us, proven.to_us)
        for kind, spans in (("missing", proof.missing), ("lost", proof.lost), ("waits", proof.waits)):
            for span in spans:
                # The status of a window looks at the runs of losses alone.
                run = runs.get(span.run) if kind == "lost" else None
                sums.add((*stream, kind, run, span.why), span.from_us, span.until_us)
    return sums.of(days)


def _places(proof: StreamProof) -> Mapping[int | None, int]:
    """Number the runs by their beginnings. A run's own number may change when another run is found."""
    begins: dict[int, int] = {}
    begun: list[tuple[int | None, int]] = [(span.run, span.from_us) for span in proof.proven]
    begun += [(span.run, span.from_us) for span in proof.lost]
    for run, from_us in begun:
        if run is not None:
            begins[run] = min(from_us, begins.get(run, from_us))
    return {run: place for place, run in enumerate(sorted(begins, key=lambda run: (begins[run], run)))}


class _Sums:
    """Sums of the digests of spans: by the day, and as steps from one day to the next."""

    def __init__(self) -> None:
        self._cut: dict[int, int] = defaultdict(int)
        self._steps: dict[int, int] = defaultdict(int)

    def add(self, what: tuple[object, ...], from_us: int, to_us: int) -> None:
        """Add a span that a window touches if it ends after `from_us` and begins before `to_us`."""
        first, last = from_us // DAY_US, to_us // DAY_US
        if first == last:
            self._cut[first] += _digest(what, from_us % DAY_US, to_us % DAY_US)
        elif from_us < to_us:
            whole = _digest(what, 0, DAY_US)
            self._cut[first] += _digest(what, from_us % DAY_US, DAY_US)
            self._steps[first + 1] += whole
            self._steps[last] -= whole
            if to_us % DAY_US:
                self._cut[last] += _digest(what, 0, to_us % DAY_US)
        # Else it ends days before it begins. Only a window that holds both ends would touch it.

    def of(self, days: Iterable[date]) -> dict[date, str]:
        steps = sorted(self._steps)
        found, place, total = {}, 0, 0
        for day in sorted(days):
            number = (day - EPOCH).days
            while place < len(steps) and steps[place] <= number:
                total += self._steps[steps[place]]
                place += 1
            found[day] = f"{(total + self._cut.get(number, 0)) % 2**BITS:016x}"
        return found


def _digest(what: tuple[object, ...], from_us: int, to_us: int) -> int:
    return int.from_bytes(blake2b(repr((what, from_us, to_us)).encode(), digest_size=BITS // 8).digest())
