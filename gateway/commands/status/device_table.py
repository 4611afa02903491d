"""Makes the table of devices in `sluice status`: devices in trouble first, as many as fit. No I/O."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from gateway.devices.listing import Clock, Device, Listing, is_silent
from gateway.devices.words import drift_words
from gateway.host.terminal_text import aligned, bound, counted, escaped, span

RATE_S_MIN = 5.0
"""Seconds over which a device must have been seen for a rate."""
_UNKNOWN = "-"
_HEADERS = ("DEVICE", "HEARD", "RATE", "MISSING", "LOST", "DRIFT (ppm)", "BOUND", "WHERE")
_FIGURES = frozenset({1, 2, 3, 4, 5, 6})


class DeviceRow(Struct, frozen=True):
    """Figures of one device for the status."""

    device: str
    place: str | None
    """MQTT topic or serial port that it was last heard on; None if that is not known."""
    heard_s: float | None
    """Seconds since something of it was taken in; None if that is not known."""
    readings: int
    """Readings of its present boot, since the gateway was started."""
    per_s: float | None
    """Readings a second of its present boot; None if too little was seen."""
    missing: int | None
    """Least number of readings of its present boot that did not come, by its sequence; None without a sequence."""
    lost: int
    """Readings that are gone for good: reported since the start, or still to be reported."""
    drift_ppm: tuple[float, float] | None
    error_us: int | None
    """Bound of the time of a reading taken now, in microseconds, without the error of the gateway's own clock."""
    is_silent: bool
    finding: bool
    """True if `sluice devices` has a finding about it."""
    no_log_in: bool = False
    """True for an MQTT sensor that could not log in now. Its silence, or missing readings, are then no trouble."""
    note: str | None = None
    """Words of `sluice devices` on it."""

    @property
    def in_trouble(self) -> bool:
        """Tell whether somebody should look at the device."""
        return self.finding or self.is_silent or (bool(self.missing) and not self.no_log_in) or bool(self.lost)


def device_rows(listing: Listing, lost: Mapping[str, int], up_s: float | None = None) -> list[DeviceRow]:
    """Make the rows: devices in trouble first, then by name.

    `lost` has losses by device that were not reported to Kafka yet. `up_s` is how long the daemon has run, if known.
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
                note=device.note,
            )
        )
    return sorted(rows, key=lambda row: (not row.in_trouble, row.device))


def _worst(device: Device) -> tuple[tuple[float, float] | None, int | None]:
    """Drift and bound of the device's clock with the largest bound."""
    known = [clock for clock in device.clocks if clock.error_us is not None]
    if not known:
        return None, None
    worst = max(known, key=lambda clock: clock.error_us or 0)
    return worst.drift_ppm, worst.error_us


def device_lines(rows: Sequence[DeviceRow], rows_max: int, width: int) -> Iterator[str]:
    """Format a table of as many devices as fit, and a line for the rest. The text is safe to print."""
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
"""Columns that are left out if no device has a value there."""


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
    """Format a rate as `12/s`, `6.0/min` or `3.0/h`. Zero is `0/s`, because a few seconds say nothing of an hour."""
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
    """Say how many devices there are, and how many are in trouble."""
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
