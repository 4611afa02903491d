"""Takes quarantined input in again, once its route or its topic is mended."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from gateway.buffer.buffer import Buffer
from gateway.buffer.rows import TICK_VOID, Entry, Quarantined
from gateway.intake.front_door import FrontDoor
from gateway.intake.routes import Refusal
from gateway.reading import Datum, Reading
from gateway.user_properties import of_text


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
        datum = await _in_this_boot(input_, buffer, front_door.now_us)
        if input_.series is not None:
            judged[number] = front_door.times.with_earliest(Entry(series[input_.series], datum))
        elif input_.topic is None:
            refused[input_.reason] += 1
        else:
            entry = front_door.routed(_reading(input_.topic, input_, datum), None)
            if isinstance(entry, Refusal):
                refused[entry.reason] += 1
            else:
                entries[number] = entry
    await buffer.transact(lambda file: file.requeue(entries, judged), buffer_id)
    return RetryOutcome(len(entries) + len(judged), dict(refused), len(set(numbers)) - len(found))


def _reading(topic: str, input_: Quarantined, datum: Datum) -> Reading:
    """The reading as it came in, with its times in this boot."""
    return Reading(topic, input_.subject, datum, input_.writer, of_text(datum.properties))


async def _in_this_boot(input_: Quarantined, buffer: Buffer, now_us: Callable[[], int]) -> Datum:
    """The datum of quarantined input, with its times in this boot's CLOCK_BOOTTIME."""
    datum = input_.datum
    if input_.boot_id is None or input_.boot_id == buffer.boot_id:
        return datum
    then = await buffer.boot_clock(input_.boot_id)
    now = await buffer.boot_clock(buffer.boot_id)
    at_us = datum.received_us if datum.event_us is None else datum.event_us
    shift_us = then.offset_us(at_us) - now.offset_us(now_us())
    datum.received_us += shift_us
    then_error_us = then.error_us(at_us)
    if then_error_us is None or not now.known:
        # As with a sensor's clock that was not learnt, no bound is claimed for its time.
        datum.event_us, datum.tick_ms = None, TICK_VOID
    else:
        datum.event_error_us += then_error_us
        if datum.event_us is not None:
            datum.event_us += shift_us
    return datum
