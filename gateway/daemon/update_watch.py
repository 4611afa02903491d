"""Reports what became of an update of the box's image, once, as the event `update`."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway.buffer.buffer import Buffer
from gateway.host import last_update
from gateway.host.last_update import LastUpdate
from gateway.reading import BufferFileError, Mark

TOLD_MARK: Final = "update/told"
"""Key in the buffer. Its value is the update and the result that were reported last."""
REFUSED_MARK: Final = "update/refused"
"""The same for an update on a stick. That one is no later than the other, and is reported by itself."""
INTERVAL_S: Final = 10.0
"""Seconds between two looks at the files. On a box without our image they are not there."""


class UpdateWatch:
    """Looks whether an update has a result that was not reported."""

    def __init__(
        self, buffer: Buffer, event: Callable[..., None], file: Path | None = None, refused: Path | None = None
    ) -> None:
        self._buffer = buffer
        self._event = event
        self._files = {TOLD_MARK: file or last_update.FILE, REFUSED_MARK: refused or last_update.REFUSED}
        self._due_s = 0.0
        self._told: dict[str, str] = {}
        """By mark: what was reported last. Before the buffer was asked there is nothing."""

    async def look(self, now_s: float) -> None:
        """Report new results, if there are any."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        for mark, file in self._files.items():
            update = last_update.read(file)
            if update is not None and update.result != "on-trial":
                await self._report(mark, update)

    async def _report(self, mark: str, update: LastUpdate) -> None:
        if mark not in self._told:
            with suppress(BufferFileError):  # the next look tries again
                marks = await self._buffer.run(lambda file: file.marks(mark))
                self._told[mark] = marks.get(mark, b"").decode()
        told = f"{update.id} {update.result}"
        if self._told.get(mark, told) == told:
            return
        reason = update.reason or None
        self._event(
            "update", None, **{"from": update.old, "to": update.new or None}, result=update.result, reason=reason
        )
        # With the event, in the next commit.
        self._buffer.keep([Mark(mark, told.encode())])
        self._told[mark] = told
