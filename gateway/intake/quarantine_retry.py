"""Takes quarantined input in again, once its route or its topic is mended."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import TICK_VOID, Doubt, Entry, Quarantined, Series
from gateway.intake.front_door import FrontDoor
from gateway.intake.routes import Refusal
from gateway.reading import Reading


class RetryOutcome(msgspec.Struct, frozen=True):
    """Result of taking quarantined input in again."""

    stored: int
    refused: dict[str, int]
    """Input that stays in the quarantine, by reason."""
    unknown: int
    """Numbers that are not, or no longer, in the quarantine."""


async def retry_quarantined(front_door: FrontDoor, buffer: Buffer, numbers: Sequence[int]) -> RetryOutcome:
    """Take quarantined input in again, in the current lane. Input refused again stays. Raises BufferFileError."""
    buffer_id = buffer.id
    entries: dict[int, Entry] = {}
    judged: dict[int, Entry] = {}
    refused: Counter[str] = Counter()
    found = await buffer.run(lambda file: file.quarantine.find(numbers), buffer_id)
    routed = {input_.series for input_ in found.values() if input_.series is not None}
    series = await buffer.run(lambda file: {number: file.series.find(number) for number in routed}, buffer_id)
    for number, input_ in found.items():
        reading = await _in_this_boot(input_, buffer, front_door.now_us)
        if input_.series is not None:
            judged[number] = front_door.times.with_earliest(_entry_of(reading, series[input_.series], input_.doubt))
        elif input_.topic is None:
            refused[input_.reason] += 1
        else:
            entry = front_door.routed(reading, None)
            if isinstance(entry, Refusal):
                refused[entry.reason] += 1
            else:
                entries[number] = entry
    await buffer.transact(lambda file: file.requeue(entries, judged), buffer_id)
    return RetryOutcome(len(entries) + len(judged), dict(refused), len(set(numbers)) - len(found))


async def _in_this_boot(input_: Quarantined, buffer: Buffer, now_us: Callable[[], int]) -> Reading:
    """Quarantined input as a reading, with its times in this boot's CLOCK_BOOTTIME."""
    shift_us, error_us, tick_ms, event_us = 0, input_.event_error_us, input_.tick_ms, input_.event_us
    if input_.boot_id is not None and input_.boot_id != buffer.boot_id:
        then = await buffer.boot_clock(input_.boot_id)
        now = await buffer.boot_clock(buffer.boot_id)
        at_us = input_.received_us if event_us is None else event_us
        shift_us = then.offset_us(at_us) - now.offset_us(now_us())
        then_error_us = then.error_us(at_us)
        if then_error_us is None or not now.known:
            # As with a sensor's clock that was not learnt, no bound is claimed for its time.
            event_us, tick_ms = None, TICK_VOID
        else:
            error_us += then_error_us
    return Reading(
        input_.topic or "",
        input_.subject,
        input_.payload,
        input_.received_us + shift_us,
        input_.device_boot,
        input_.device_sequence,
        tick_ms,
        None if event_us is None else event_us + shift_us,
        error_us,
        input_.writer,
        redelivered=input_.doubt == Doubt.REDELIVERED,
        device_time_us=input_.device_time_us,
    )


def _entry_of(reading: Reading, series: Series, doubt: int) -> Entry:
    """The row of a reading that was routed and judged before."""
    return Entry(
        series,
        reading.payload,
        reading.received_us,
        reading.event_us,
        reading.event_error_us,
        reading.device_boot,
        reading.device_sequence,
        reading.tick_ms,
        doubt,
        device_time_us=reading.device_time_us,
    )
