"""The devices in `sluice status`: those in trouble first, as many as fit. No I/O."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from gateway.devices.listing import Clock, Device, Listing, is_silent
from gateway.devices.words import drift_words
from gateway.host.terminal_text import aligned, bound, counted, escaped, span

RATE_S_MIN = 5.0
"""Over less than that readings tell no rate."""
_UNKNOWN = "-"
_HEADERS = ("DEVICE", "HEARD", "RATE", "MISSING", "LOST", "DRIFT (ppm)", "BOUND", "WHERE")
_FIGURES = frozenset({1, 2, 3, 4, 5, 6})


class DeviceRow(Struct, frozen=True):
    """What status says of one device."""

    device: str
    place: str | None
    """The MQTT topic or the serial port that it was heard on last; None where that is not known."""
    heard_s: float | None
    """How long ago something of it was taken in; None where nothing tells."""
    readings: int
    """Of its present boot, since the gateway was started."""
    per_s: float | None
    """Readings a second of that boot; None where too little was seen."""
    missing: int | None
    """Of that boot, at the least: numbers of its sequence that did not come; None where it sends none."""
    lost: int
    """Readings that are gone for good: reported since the start, or still to be reported."""
    drift_ppm: tuple[float, float] | None
    error_us: int | None
    """The bound of a reading that is taken now, without what the gateway's own clock adds."""
    is_silent: bool
    finding: bool
    """Whether `sluice devices` says what is to be mended."""
    no_log_in: bool = False
    """Whether it is a sensor over MQTT that could not log in now: then it is to be silent, and misses nothing."""

    @property
    def in_trouble(self) -> bool:
        """Whether somebody should look at it."""
        return self.finding or self.is_silent or (bool(self.missing) and not self.no_log_in) or bool(self.lost)


def device_rows(listing: Listing, lost: Mapping[str, int], up_s: float | None = None) -> list[DeviceRow]:
    """Those in trouble first, then by name.

    `lost` is by device what was not reported to Kafka yet; `up_s` is how long the daemon runs, where it tells that.
    """
    heard = {state.device: (state.heard, state.lost) for state in listing.states}
    rows = []
    for device in listing.devices:
        of, told = heard.get(device.device, (None, 0))
        seen_s = 0.0 if of is None else (of.received_us - of.since_us) / 1e6
        per_s = (of.readings - 1) / seen_s if of is not None and of.readings > 1 and seen_s >= RATE_S_MIN else None
        rows.append(
            DeviceRow(
                device.device,
                device.place,
                device.heard_s,
                0 if of is None else of.readings,
                per_s,
                None if of is None else of.missing,
                told + lost.get(device.device, 0),
                *_worst(device),
                is_silent=not device.no_log_in and is_silent(device.heard_s, of, up_s),
                finding=device.finding,
                no_log_in=device.no_log_in,
            )
        )
    return sorted(rows, key=lambda row: (not row.in_trouble, row.device))


def _worst(device: Device) -> tuple[tuple[float, float] | None, int | None]:
    """Drift and bound of that of its clocks which is known worst."""
    known = [clock for clock in device.clocks if clock.error_us is not None]
    if not known:
        return None, None
    worst = max(known, key=lambda clock: clock.error_us or 0)
    return worst.drift_ppm, worst.error_us


def device_lines(rows: Sequence[DeviceRow], rows_max: int, width: int) -> Iterator[str]:
    """A table of as many as fit, and a line for the rest. Safe to print."""
    some = rows[: max(1, rows_max - 1)] if len(rows) > rows_max else rows
    cells = [_cells(row) for row in some]
    shown = [number for number in range(len(_HEADERS)) if number not in _EMPTY_LEFT_OUT or _has(cells, number)]
    figures = frozenset(at for at, number in enumerate(shown) if number in _FIGURES)
    yield from aligned(
        [_HEADERS[number] for number in shown],
        [[row[number] for number in shown] for row in cells],
        right=figures,
        width=width,
    )
    rest = rows[len(some) :]
    if rest:
        troubled = sum(row.in_trouble for row in rest)
        trouble = f", {troubled:,} of them in trouble" if troubled else ""
        yield f"and {len(rest):,} more{trouble}: sluice devices"


_EMPTY_LEFT_OUT = frozenset({3, 4, 5, 6})
"""Columns that are left out where no device has anything there."""


def _has(cells: Sequence[tuple[str, ...]], number: int) -> bool:
    return any(row[number] not in {_UNKNOWN, "0"} for row in cells)


def _cells(row: DeviceRow) -> tuple[str, ...]:
    heard = _UNKNOWN if row.heard_s is None else f"{span(row.heard_s)}{' ago' if not row.is_silent else ' AGO'}"
    clock = Clock("", "", "rc", "rc", row.drift_ppm, row.error_us, None)
    return (
        f"{escaped(row.device)}{' !' if row.finding else ''}{' (no log-in)' if row.no_log_in else ''}",
        heard,
        rate(row.per_s),
        _UNKNOWN if row.missing is None else f"{row.missing:,}",
        f"{row.lost:,}",
        drift_words(clock),
        bound(row.error_us),
        _UNKNOWN if row.place is None else escaped(row.place),
    )


def rate(per_s: float | None) -> str:
    """`12/s`, `6.0/min`, `3.0/h`; `0/s`, for a look of some seconds tells of no hour."""
    if per_s is None:
        return _UNKNOWN
    if not per_s:
        return "0/s"
    for factor, unit in ((1, "s"), (60, "min")):
        if per_s * factor >= 1:
            count = per_s * factor
            return f"{count:,.0f}/{unit}" if count >= 10 else f"{count:.1f}/{unit}"
    return f"{per_s * 3_600:.1f}/h"


def heading(rows: Sequence[DeviceRow]) -> str:
    """How many there are, and how many of them in trouble."""
    if not rows:
        return "none heard yet"
    troubled = sum(row.in_trouble for row in rows)
    findings = sum(row.finding for row in rows)
    parts = [counted(len(rows), "device")]
    if troubled:
        parts.append(f"{troubled:,} to be looked at (first in the table)")
    if findings:
        parts.append(f"{findings:,} with a finding (!): sluice devices says which")
    return "; ".join(parts)
