"""Keeps sensors' learnt clocks in the buffer, from one start of the daemon to the next."""

import structlog

from gateway.buffer.buffer import Buffer
from gateway.clock.sensor_clocks import SENSOR_CLOCK_MARKS, DeviceClocks
from gateway.reading import BufferFileError

CLOCKS_AT_ONCE = 500
"""Sensors' clocks written in one commit at the end, half a kilobyte each."""

log = structlog.get_logger()


async def recall_clocks(buffer: Buffer, clocks: DeviceClocks) -> None:
    """Restore the sensors' clocks that an earlier start in this boot of the box had learnt."""
    try:
        kept = await buffer.run(lambda file: file.marks(SENSOR_CLOCK_MARKS))
    except BufferFileError as error:
        log.warning("sensors' clocks are learnt anew: the saved clocks cannot be read", error=str(error))
        return
    if forgotten := clocks.restore(kept):
        buffer.append((), None, forgotten)


def keep_clocks(buffer: Buffer, clocks: DeviceClocks, now_us: int) -> None:
    """Write all learnt clocks of sensors, as far as the disk has room, when the daemon ends."""
    marks = clocks.marks(now_us, all_of_them=True)
    for start in range(0, len(marks), CLOCKS_AT_ONCE):
        buffer.append((), None, marks[start : start + CLOCKS_AT_ONCE])
