"""Bounds the answers of brokers, without I/O. Whatever listens at an address may claim to be a broker."""

import io
from typing import Any, Final

from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.metadata import MetadataRequest

LISTING_BYTES_MAX: Final = 16_000_000
"""Bytes of an answer that lists topics or their settings, or holds records. 100,000 partitions take 4 MB."""
ANSWER_BYTES_MAX: Final = 1_000_000
"""Bytes of any other answer. At the worst, the client keeps 28 bytes in memory for each of them."""
FIELDS_MAX: Final = 1_000_000
"""Numbers and texts in a listing. Each takes up to 70 bytes of memory, and a microsecond of the event loop."""
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
