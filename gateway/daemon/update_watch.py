"""Reports what became of an update of the box's image, once, as the event `update`."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway.buffer.buffer import Buffer
from gateway.host import last_update
from gateway.reading import BufferFileError, Mark

TOLD_MARK: Final = "update/told"
"""Key in the buffer. Its value is the update and the result that were reported last."""
INTERVAL_S: Final = 10.0
"""Seconds between two looks at the file. On a box without our image it is not there."""


class UpdateWatch:
    """Looks whether an update has a result that was not reported."""

    def __init__(self, buffer: Buffer, event: Callable[..., None], file: Path | None = None) -> None:
        self._buffer = buffer
        self._event = event
        self._file = file
        self._due_s = 0.0
        self._told: str | None = None
        """What was reported last; None before the buffer was asked."""

    async def look(self, now_s: float) -> None:
        """Report a new result, if there is one."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        update = last_update.read(self._file)
        if update is None or update.result == "on-trial":
            return
        if self._told is None:
            with suppress(BufferFileError):  # the next look tries again
                marks = await self._buffer.run(lambda file: file.marks(TOLD_MARK))
                self._told = marks.get(TOLD_MARK, b"").decode()
        told = f"{update.id} {update.result}"
        if self._told in {None, told}:
            return
        details = {"from": update.old, "to": update.new, "result": update.result, "reason": update.reason or None}
        self._event("update", None, **details)
        # With the event, in the next commit.
        self._buffer.keep([Mark(TOLD_MARK, told.encode())])
        self._told = told
