"""Finds the answer to a Modbus RTU request in the received bytes, or says in words what came instead.

Sections are those of the MODBUS Application Protocol Specification V1.1b3, or, with "serial", of "MODBUS over Serial
Line, Specification and Implementation Guide V1.02".
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from pymodbus.framer import FramerRTU

from gateway.host.terminal_text import counted
from gateway.serial_lines.modbus_registers import FUNCTIONS, Request

NO_ANSWER: Final = "no answer"
"""Words if nothing came at all."""
ANSWER_BYTES: Final = 5
"""Bytes of an answer beside its data: unit, function, byte count or exception code, CRC. A refusal has no others."""

_REFUSED = 0x80
"""The bit of a function code that makes it a refusal (section 7)."""
_TABLES = {function: table for table, function in FUNCTIONS.items()}
_READS_BITS_MAX = FUNCTIONS["discrete"]
_REQUEST_BYTES = 8
"""Bytes of a request that reads, or writes one value (sections 6.1 to 6.6), or of an answer to writing several."""
_WRITES_ONE = frozenset({5, 6})
_WRITES_SEVERAL = frozenset({15, 16})
_WRITE_BYTES = 9
"""Bytes of a request that writes several values, beside its data (sections 6.11 and 6.12)."""
_FRAME_BYTES_MIN = 4
_FRAME_BYTES_MAX = 256
"""Bytes of the longest frame (serial, section 2.5.1)."""
_NOISE_BYTES_MAX = 3
"""Noise around a frame of unknown length. If more were allowed, noise would pass for a frame too often."""
_LOOKED_AT_BYTES_MAX = 1_024
"""Newest bytes that are searched, as the check of each possible frame costs time."""


class Answer(NamedTuple):
    """A unit's answer to a request: data, or a refusal."""

    data: bytes
    exception: int | None = None
    """Exception code of a refusal; None if the unit gives data."""


def find_answer(received: bytes, asked: bytes, request: Request, searched: int = 0) -> Answer | None:
    """The answer to a request in the bytes after it; None if the answer is missing, not whole, or damaged.

    `asked` is the request's frame. Other bytes in `received` are skipped: the frame's echo by an adapter that hears
    itself, the noise of a line that turns around, a late answer of another unit. The first `searched` bytes hold no
    whole answer, so no answer that ends in them is looked for. Each check is made once, however much noise comes.
    """
    echo_at = received.find(asked)
    echo = range(echo_at, echo_at + len(asked)) if echo_at >= 0 else ()
    # The answer's first bytes are known, and so is its length (sections 6.1 to 6.4 and 7).
    for beginning, length in _beginnings(asked, request):
        at = received.find(beginning, max(0, searched - length + 1))
        while 0 <= at <= len(received) - length:
            frame = received[at : at + length]
            # Some requests begin like an answer, CRC included (unit 4, holding 688). Within an echo that is none.
            if at not in echo and frame != asked[:length] and _is_whole(frame):
                return Answer(b"", frame[2]) if frame[1] & _REFUSED else Answer(frame[3:-2])
            at = received.find(beginning, at + 1)
    return None


def other_words(received: bytes, asked: bytes, request: Request) -> str:
    """Words for what came if `find_answer` finds no answer. docs/serial.md has the causes, and what to do.

    A frame with a right CRC was not damaged, so the words name its unit, function or length.
    """
    heard = _behind_echo(received, asked).replace(asked, b"")[-_LOOKED_AT_BYTES_MAX:]
    frames = [frame for frame in _whole_frames(heard) if frame != asked[: len(frame)]]
    of_this_unit = [frame for frame in frames if frame[0] == asked[0]]
    for frame in (*of_this_unit, *frames):
        return _frame_words(frame, asked, request)
    if not heard:
        return NO_ANSWER
    if _is_cut(heard, asked, request):
        return "its answer was cut short"
    # A part of the echo is noise, too.
    if len(heard) < ANSWER_BYTES or asked.startswith(heard):
        return f"{NO_ANSWER}, only noise"
    return "its answer was damaged"


def _behind_echo(received: bytes, asked: bytes) -> bytes:
    before, echo, after = received.partition(asked)
    return after if echo else before


def _beginnings(asked: bytes, request: Request) -> tuple[tuple[bytes, int], ...]:
    """First bytes and whole length of an answer with data, and of a refusal."""
    unit, function = asked[0], asked[1]
    return (
        (bytes((unit, function, request.data_bytes)), ANSWER_BYTES + request.data_bytes),
        (bytes((unit, function | _REFUSED)), ANSWER_BYTES),
    )


def _is_whole(frame: bytes) -> bool:
    return FramerRTU.check_CRC(frame[:-2], int.from_bytes(frame[-2:]))


def _whole_frames(heard: bytes) -> Iterator[bytes]:
    """All frames with a right CRC, whoever sent them, in their order."""
    at = 0
    while at + _FRAME_BYTES_MIN <= len(heard):
        rest = heard[at:]
        lengths = [*_lengths(rest)]
        if at <= _NOISE_BYTES_MAX:
            # A frame of another function, or with a wrong length: the silence around it tells its ends. The shortest
            # comes first, as a frame's CRC is still right with a zero behind it.
            lengths += range(len(rest) - _NOISE_BYTES_MAX, len(rest) + 1)
        found = (
            rest[:length]
            for length in lengths
            if _FRAME_BYTES_MIN <= length <= min(len(rest), _FRAME_BYTES_MAX) and _is_whole(rest[:length])
        )
        frame = next(found, b"")
        if frame:
            yield frame
        at += len(frame) or 1


def _lengths(rest: bytes) -> Iterator[int]:
    """Possible lengths of a frame that begins here, by its function: of an answer, of a request."""
    function = rest[1]
    if function & _REFUSED:
        yield ANSWER_BYTES
    elif function in _TABLES:
        yield ANSWER_BYTES + rest[2]
        yield _REQUEST_BYTES
    elif function in _WRITES_ONE | _WRITES_SEVERAL:
        yield _REQUEST_BYTES
        if function in _WRITES_SEVERAL and len(rest) > _WRITE_BYTES:
            yield _WRITE_BYTES + rest[6]


def _frame_words(frame: bytes, asked: bytes, request: Request) -> str:
    unit, function = frame[0], frame[1]
    reads = function & ~_REFUSED
    of_asked = frame[:2] == asked[:2] or frame[:2] == bytes((asked[0], asked[1] | _REFUSED))
    if not of_asked and not function & _REFUSED and function not in _TABLES:
        return f"a frame to unit {unit} with function {function} came, and not from here: another master is on the line"
    if _is_request(frame) and not (of_asked and frame[2] == request.data_bytes):
        return f"a request to unit {unit} came, and not from here: another master is on the line"
    if unit != asked[0]:
        return f"unit {unit} answered instead: is its number right, and is there no other master?"
    if not of_asked:
        does = "refused" if function & _REFUSED else "answered"
        return f"it {does} function {_named(reads)}, and {_named(asked[1])} was asked: is there no other master?"
    whole = ANSWER_BYTES if function & _REFUSED else ANSWER_BYTES + request.data_bytes
    if len(frame) != whole:
        return (
            f"its answer has {counted(len(frame), 'byte')} instead of {whole}: compare address and type with its manual"
        )
    return f"its answer says that it has {counted(frame[2], 'byte')} of data, and has {request.data_bytes}"


def _is_request(frame: bytes) -> bool:
    """Whether a whole frame is a request that reads. An answer is as long as it says, and registers have two bytes."""
    if frame[1] not in _TABLES or len(frame) != _REQUEST_BYTES:
        return False
    return ANSWER_BYTES + frame[2] != len(frame) or frame[1] > _READS_BITS_MAX


def _is_cut(heard: bytes, asked: bytes, request: Request) -> bool:
    """Whether an answer begins, but ends before its full length."""
    at = heard.find(asked[:2])
    if at < 0 or len(heard) >= ANSWER_BYTES + request.data_bytes or asked.startswith(heard):
        return False
    data_bytes = min(heard[at + 2], request.data_bytes) if len(heard) > at + 2 else request.data_bytes
    return len(heard) - at < ANSWER_BYTES + data_bytes


def _named(function: int) -> str:
    return f"{function} ({_TABLES[function]})" if function in _TABLES else str(function)
