"""The format of lines of text: cuts them out of a stream that may be noisy, endless, or joined in the middle.

`text_formats` reads the lines.
"""

from collections.abc import Iterator

from gateway.formats.piece import Piece
from gateway.intake.payload_json import BYTE_ORDER_MARK
from gateway.serial_lines.text_formats import NOISE, LineError, holds_sentences, line_reader, proves_itself
from gateway.settings import SerialTextSettings

TOO_LONG = "line-too-long"

# Devices end their lines with padding, NULs of breaks on the line, or STX and ETX around them.
_AROUND_LINES = bytes((*range(9), 11, 12, *range(14, 27), *range(28, 32), 127))
_LINE_ENDS = b"\r\n"
# An adapter reads this byte when a line turns around, and when it wakes. No text in UTF-8 has it. Glued to a name or a
# value, it would change them. Sentences are told from any noise.
_IDLE = b"\xff"


class TextLines:
    """The lines of one `[[serial.text]]`, from the opening of its port to its closing. No input raises."""

    def __init__(self, settings: SerialTextSettings) -> None:
        self.bytes_max = settings.line_bytes_max + 1
        """A whole line is followed by a byte that ends it."""
        self.joined = False
        """Whether the end of a line has come."""
        self._read_line = line_reader(settings)
        self._proves_itself = proves_itself(settings)
        self._holds_sentences = holds_sentences(settings)
        self._skipping = False

    def cut(self, received: bytes) -> Piece | None:
        """See `Format`. Line ends are pieces of their own."""
        begin = len(received) - len(received.lstrip(_LINE_ENDS))
        if begin:
            self.joined, self._skipping = True, False
            return Piece(begin)
        end = min((at for at in map(received.find, (b"\r", b"\n")) if at > 0), default=None)
        if self._skipping and not self._holds_sentences:
            # The rest of a line that is too long.
            return Piece(len(received) if end is None else end)
        if end is not None:
            line = received[:end]
            return self._piece(line, untold=self._skipping or not self.joined) if _is_written(line) else Piece(end)
        if len(received) < self.bytes_max:
            return None
        # Reported now rather than at the line's end, so that a line that never ends is seen to be wrong.
        untold, self._skipping = self._skipping, True
        return self._piece(self._part(received[:-1]), untold=untold, too_long=not untold)

    def _piece(self, line: bytes, *, untold: bool, too_long: bool = False) -> Piece:
        """Read a line or a part of one.

        `untold`: it is no fault if it cannot be read. It may have begun before the port was opened, or it is a later
        part of a line that is too long. `too_long`: it is the first part of such a line.
        """
        readings: list[bytes] = []
        try:
            readings.extend(self._payloads(line, untold=untold, too_long=too_long))
        except LineError as error:
            if not untold:
                noise = error.reason == NOISE
                return Piece(len(line), tuple(readings), "" if noise else error.reason, noise)
        return Piece(len(line), tuple(readings))

    def _payloads(self, line: bytes, *, untold: bool, too_long: bool) -> Iterator[bytes]:
        # If the port was opened in the middle of a line, the missing front was never ours.
        if self._holds_sentences or not (too_long or (untold and not self._proves_itself)):
            try:
                bare = _bare(line)
                yield from self._read_line(bare if self._holds_sentences else bare.strip(_IDLE))
            except LineError:
                if not too_long:
                    raise
        if too_long:
            raise LineError(TOO_LONG)

    def _part(self, line: bytes) -> bytes:
        """A part of a line that is too long: up to a sentence that may have just begun."""
        begun = max(line.rfind(b"$"), line.rfind(b"!")) if self._holds_sentences else 0
        return line[:begun] if begun > 0 else line


def _is_written(line: bytes) -> bool:
    return bool(_bare(line).strip(_IDLE).strip())


def _bare(line: bytes) -> bytes:
    """A line without the bytes that devices write around it."""
    # A file of lines in UTF-8 may begin with a byte order mark, and each start of a sketch writes one anew.
    return line.strip(_AROUND_LINES).removeprefix(BYTE_ORDER_MARK).strip(_AROUND_LINES)
