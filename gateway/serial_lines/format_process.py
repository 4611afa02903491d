"""Runs a format of one's own in a process of its own, so that it costs its port alone, whatever it does."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from msgspec import Struct

from gateway.formats.child import ANSWER_BYTES_MAX, ANSWER_S, WORDS_MAX
from gateway.formats.cutter import Cut, FormatError
from gateway.host.terminal_text import shortened

Command = tuple[str, ...]
_PROGRAM: Final = "import sys; sys.path[:] = sys.argv[1].split(':'); from gateway.formats.child import main; main()"
"""It finds the gateway's modules where this process does, and nothing of its environment has a say."""
_TOO_LONG: Final = "took too long for one answer, so it was ended"
_NO_ANSWER: Final = "wrote something else than answers to descriptors that are not its own"


class _Answer(Struct):
    cuts: list[tuple[list[str], str, bool, str]] = []
    failed: str = ""
    left: int = 0


_DECODER: Final = msgspec.json.Decoder(_Answer)


class FormatProcess:
    """The process of one format."""

    def __init__(
        self, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> None:
        self._process = process
        self._writer = writer
        self._reader = reader
        self.left = 0
        """Number of the newest bytes that the format has not cut off yet."""

    async def feed(self, data: bytes) -> list[Cut]:
        """Have the format cut the next bytes. Raises FormatError, after which the process is of no use."""
        # If the process has ended, there is no answer, and its end says why.
        with suppress(ConnectionError):
            self._writer.write(data.hex().encode() + b"\n")
            await self._writer.drain()
        return await self.answer()

    async def answer(self) -> list[Cut]:
        """The format's next answer. The first says that it is loaded. Raises FormatError."""
        try:
            line = await self._reader.readline()
        except ValueError:
            raise FormatError(_NO_ANSWER) from None
        if not line.endswith(b"\n"):
            _ended(await self._process.wait())
        cuts, self.left = _read(line)
        return cuts


@asynccontextmanager
async def running(name: str, folder: Path, answer_s: int = ANSWER_S) -> AsyncIterator[FormatProcess]:
    """Load a format in a process of its own. `answer_s` bounds the time of each answer. Raises FormatError."""
    try:
        process = await asyncio.create_subprocess_exec(
            *_command(name, folder, answer_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=ANSWER_BYTES_MAX,
            env={},
            cwd="/",
            # Keys that end the gateway in a terminal are not for it.
            start_new_session=True,
        )
    except OSError as error:
        raise FormatError(f"cannot be started: {error.strerror}") from error
    try:
        writer, reader = process.stdin, process.stdout
        if writer is None or reader is None:
            raise FormatError("has no pipes")
        running_format = FormatProcess(process, writer, reader)
        await running_format.answer()
        yield running_format
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        while process.returncode is None:
            # A loop that ends cancels a second time. The process was killed, and is gone in a moment.
            with suppress(asyncio.CancelledError):
                await process.wait()
        # Otherwise a loop that ends then would leave its pipes open.
        process._transport.close()  # type: ignore[attr-defined] # noqa: SLF001


def why_not_loaded(name: str, folder: Path) -> str | None:
    """Load a format as `running` does, and tell why it cannot be; None if it can."""
    try:
        done = subprocess.run(  # noqa: S603 - Python itself
            _command(name, folder, ANSWER_S),
            input=b"",
            stdout=subprocess.PIPE,
            env={},
            cwd="/",
            check=False,
            # The kernel ends it sooner, unless what it loads takes the signal for itself.
            timeout=2 * ANSWER_S,
        )
        line, end, _ = done.stdout.partition(b"\n")
        _read(line) if end else _ended(done.returncode)
    except FormatError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return _TOO_LONG
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    return None


def _command(name: str, folder: Path, answer_s: int) -> Command:
    return sys.executable, "-ISB", "-c", _PROGRAM, ":".join(sys.path), name, str(folder), str(answer_s)


def _read(line: bytes) -> tuple[list[Cut], int]:
    """The pieces of an answer, and the number of bytes that are left. Raises FormatError."""
    try:
        answer = _DECODER.decode(line)
        cuts = [
            Cut(tuple(reading.encode("latin-1") for reading in readings), damage, noise, piece.encode("latin-1"))
            for readings, damage, noise, piece in answer.cuts
        ]
    except ValueError:
        # No JSON, or no such characters.
        raise FormatError(_NO_ANSWER) from None
    if answer.failed:
        raise FormatError(shortened(answer.failed, WORDS_MAX))
    return cuts, answer.left


def _ended(status: int) -> NoReturn:
    """Raises FormatError: the process ended without a last answer."""
    if status == -signal.SIGALRM:
        raise FormatError(_TOO_LONG)
    if status < 0:
        raise FormatError(f"was ended by a signal ({signal.Signals(-status).name})")
    raise FormatError(f"ended its own process (status {status})")
