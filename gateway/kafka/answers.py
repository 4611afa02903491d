"""Bounds the answers of brokers, without I/O. Whatever listens at an address may claim to be a broker."""

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any, Final

import cramjam
from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest

LISTING_BYTES_MAX: Final = 16_000_000
"""Bytes of an answer that lists topics or their settings, or holds records. 100,000 partitions take 4 MB."""
ANSWER_BYTES_MAX: Final = 1_000_000
"""Bytes of any other answer. At the worst, the client keeps 28 bytes in memory for each of them."""
FIELDS_MAX: Final = 1_000_000
"""Numbers and texts in a listing. Each takes up to 70 bytes of memory, and a microsecond of the event loop."""
UNPACKED_BYTES_MAX: Final = 16_000_000
"""Bytes of all records of an answer, once they are unpacked. A batch of a gateway's has 1 MB."""
_BATCH: Final = struct.Struct(">qiibIh38x")
"""Head of a batch: base offset, length of what follows it, leader epoch, magic, CRC-32C, attributes."""
_LENGTH_TO: Final = 12
"""Bytes of a batch up to its length."""
_MAGIC: Final = 2
_CODEC: Final = 0b111
"""Bits of the attributes that say how a batch is packed: 0 not, 1 gzip, 2 snappy, 3 LZ4, 4 Zstandard."""
_XERIAL: Final = b"\x82SNAPPY\x00"
"""Begins snappy in blocks: 16 bytes, then each block behind its length."""
_LISTINGS: Final = frozenset(
    request.API_KEY for request in (FetchRequest, MetadataRequest, CreateTopicsRequest, DescribeConfigsRequest)
)


class UnfitAnswerError(ConnectionError):
    """An answer is too large to be a broker's. The connection ends, and the answer is not read."""

    def __init__(self, announced: int, limit: int) -> None:
        """`announced` is the answer's length in bytes, as it stands before the answer."""
        super().__init__(f"an answer of {announced} bytes, where at most {limit} were to be expected")
        self.announced = announced
        self.limit = limit


class TooManyFieldsError(UnfitAnswerError):
    """An answer of an allowed size has too many fields."""


class UnfitRecordsError(UnfitAnswerError):
    """The records of an answer cannot be unpacked, or take too much memory then."""


def check_size(announced: int, request: Any) -> None:
    """Raise UnfitAnswerError if an answer is too large for its request. `request` is None if none was sent."""
    limit = LISTING_BYTES_MAX if request is not None and request.API_KEY in _LISTINGS else ANSWER_BYTES_MAX
    if announced > limit:
        raise UnfitAnswerError(announced, limit)


def check_fields(answer: bytes, request: Any) -> None:
    """Raise TooManyFieldsError if a listing, once decoded, would fill the memory. Raises ValueError for nonsense."""
    if len(answer) > ANSWER_BYTES_MAX:
        counted = _Counted(answer)
        request.parse_response_header(counted)
        request.RESPONSE_TYPE.decode(counted)


def check_records(answer: bytes, request: Any) -> None:
    """Raise UnfitRecordsError if the records of a fetch cannot be unpacked in a bounded memory.

    Whatever is read here is unpacked once more by aiokafka, which has no bound. Raises ValueError for nonsense.
    """
    if request is None or request.API_KEY != FetchRequest.API_KEY:
        return
    fields = io.BytesIO(answer)
    request.parse_response_header(fields)
    left = UNPACKED_BYTES_MAX
    try:
        for _, partitions in request.RESPONSE_TYPE.decode(fields).topics or ():
            for *_, batches in partitions or ():
                for codec, packed in _batches(batches or b""):
                    left -= _unpacked_bytes(codec, packed, left)
                    if left < 0:
                        raise UnfitRecordsError(len(answer), UNPACKED_BYTES_MAX)
    except (cramjam.DecompressionError, struct.error, zlib.error) as error:
        raise UnfitRecordsError(len(answer), UNPACKED_BYTES_MAX) from error


def _batches(batches: bytes) -> Iterator[tuple[int, bytes]]:
    """The codec and the packed records of each whole batch. Raises struct.error for an older form of messages."""
    place = 0
    while place + _BATCH.size <= len(batches):
        _, length, _, magic, _, attributes = _BATCH.unpack_from(batches, place)
        end = place + _LENGTH_TO + length
        if magic != _MAGIC or end < place + _BATCH.size:
            raise struct.error
        if end > len(batches):
            # The broker cuts the last batch off.
            return
        yield attributes & _CODEC, batches[place + _BATCH.size : end]
        place = end


def _unpacked_bytes(codec: int, packed: bytes, left: int) -> int:
    """The bytes of packed records, or any number above `left`. Takes `left` bytes of memory at the most.

    Raises cramjam.DecompressionError, struct.error, zlib.error.
    """
    match codec:
        case 1:
            gzip = zlib.decompressobj(wbits=zlib.MAX_WBITS + 16)
            unpacked = len(gzip.decompress(packed, left + 1))
            # aiokafka would unpack a second stream behind the first.
            return left + 1 if gzip.unused_data else unpacked
        case 2:
            return sum(cramjam.snappy.decompress_raw_len(block) for block in _snappy_blocks(packed))
        case 3:
            return cramjam.lz4.decompress_into(packed, bytearray(left))
        case 4:
            return cramjam.zstd.decompress_into(packed, bytearray(left))
        case _:
            return len(packed)


def _snappy_blocks(packed: bytes) -> Iterator[bytes]:
    if not packed.startswith(_XERIAL):
        yield packed
        return
    place = 16
    while place < len(packed):
        (length,) = struct.unpack_from(">i", packed, place)
        place += 4
        if not 0 < length <= len(packed) - place:
            # aiokafka would go back, and for ever.
            raise struct.error
        yield packed[place : place + length]
        place += length


class _Counted(io.BytesIO):
    """An answer that raises TooManyFieldsError once too many fields were read from it."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(answer)
        self._bytes = len(answer)
        self._left = FIELDS_MAX

    def read(self, size: int | None = -1, /) -> bytes:
        """The bytes of the next number, or a part of the next text."""
        self._left -= 1
        if self._left < 0:
            raise TooManyFieldsError(self._bytes, LISTING_BYTES_MAX)
        return super().read(size)
