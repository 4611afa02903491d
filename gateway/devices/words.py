"""Words of `sluice devices`: a table, and notes on some of the devices below it. No I/O."""

import math
from collections.abc import Iterator

from gateway.devices.listing import Clock, Device, Listing, not_heard_words
from gateway.host.terminal_text import UNKNOWN, aligned, bound, counted, escaped, hanging, span

NAMED_MAX = 5
"""Devices named one by one if a note is about many."""
INDENT = 4
_WHOLE_PPM = 10
"""Parts per million from which on tenths tell nothing."""


def devices_lines(listing: Listing) -> Iterator[str]:
    """Yield the table, then the notes; safe to print, and fitted to the terminal."""
    if listing.unheard:
        yield hanging(f"the gateway's memory is not known: {escaped(listing.unheard)}", INDENT)
    if not listing.devices:
        yield "no device is known yet"
        yield from _not_heard(listing)
        return
    headers = ("DEVICE", "WHERE", "HEARD", "BOOT", "DRIFT (ppm)", "BOUND", "OBSERVED")
    rows = [cells for device in listing.devices for cells in _rows(device)]
    yield from aligned(headers, rows, right=frozenset({2, 4, 5, 6}))
    yield from _originals(listing)
    yield from _notes(listing)
    yield from _not_heard(listing)
    if not listing.running:
        yield hanging("sluice is not running: most faults of clocks are known only while it runs", INDENT)


def _not_heard(listing: Listing) -> Iterator[str]:
    if listing.not_heard:
        yield hanging(escaped(not_heard_words(listing.not_heard)), INDENT)


def _rows(device: Device) -> Iterator[tuple[str, ...]]:
    """Yield one row, or one for each stream whose samples have a clock of their own."""
    heard, boot = _ago(device.heard_s), UNKNOWN if device.boot is None else escaped(device.boot)
    for clock in device.clocks or (None,):
        stream = "" if clock is None else clock.stream
        where = stream or device.place or UNKNOWN
        if clock is None:
            yield escaped(device.device), escaped(where), heard, boot, UNKNOWN, UNKNOWN, UNKNOWN
            continue
        known = drift_words(clock), bound(clock.error_us), _ago(clock.observed_s)
        yield escaped(device.device), escaped(where), heard, escaped(clock.boot), *known


def _ago(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{span(seconds)} ago"


def drift_words(clock: Clock) -> str:
    """Write a drift as the middle of what is possible, and the distance to its ends: `+7,950 ± 40`."""
    if clock.drift_ppm is None or clock.error_us is None:
        return UNKNOWN
    least, most = clock.drift_ppm
    half = (most - least) / 2
    # Rounded up, and with the error that comes from rounding the middle.
    if half < _WHOLE_PPM:
        return f"{(least + most) / 2:+,.1f} ± {math.ceil(half * 10 + 0.5) / 10:.1f}"
    return f"{(least + most) / 2:+,.0f} ± {math.ceil(half + 0.5):,}"


def _originals(listing: Listing) -> Iterator[str]:
    """Yield names as they were before they were escaped, whole: a cell of the table may be cut short."""
    renamed = [device for device in listing.devices if device.original is not None]
    if renamed:
        yield ""
    for device in renamed:
        yield hanging(escaped(f"{device.device}: called {device.original}"), INDENT)


def _notes(listing: Listing) -> Iterator[str]:
    """Yield the notes, findings first, and a note on many devices once."""
    by_note: dict[tuple[bool, str], list[str]] = {}
    for device in listing.devices:
        if device.note is not None:
            by_note.setdefault((not device.finding, device.note), []).append(escaped(device.device))
    if by_note:
        yield ""
    for (_, note), names in sorted(by_note.items()):
        more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
        yield hanging(f"{', '.join(names[:NAMED_MAX])}{more}: {escaped(note)}", INDENT)
    findings = sum(device.finding for device in listing.devices)
    if findings:
        yield f"to be looked at: {findings:,} of {counted(len(listing.devices), 'device')}"
