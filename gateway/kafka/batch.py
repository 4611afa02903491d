"""Builds batches of encoded records for aiokafka, in message format 2 (Kafka's documentation, "Record Batch").

aiokafka's own builder takes headers apart and encodes them anew for every record. This builder is given encoded
records. It stands in for `BatchBuilder`, whose half-private methods the accumulator and the sender call. So aiokafka is
pinned, and a test sends through this builder.
"""

import struct
import time
from collections.abc import Callable
from typing import Final

from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.producer.message_accumulator import BatchBuilder
from aiokafka.record.util import calc_crc32c

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
"""Base offset, length, leader epoch, magic, CRC-32C, attributes, last offset, first and last timestamp, producer id,
epoch and base sequence, number of records."""
HEADER_BYTES: Final = HEADER.size

_LENGTH_FROM: Final = 12
_CRC_FROM: Final = 21
_MAGIC: Final = 2
_CODECS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "gzip": (1, gzip_encode),
    "snappy": (2, snappy_encode),
    "lz4": (3, lz4_encode),
    "zstd": (4, zstd_encode),
}


class EncodedBatch(BatchBuilder):  # type: ignore[misc] # aiokafka has no types
    """Records that go to one partition in one request."""

    def __init__(self, compression: str) -> None:
        """`compression` is a value of `kafka.compression`."""
        self.records: list[bytes] = []
        """Records from `kafka.record.RecordEncoder`. Their offsets are their places in this list."""
        self.bytes = HEADER_BYTES
        """Bytes of the batch in a request, uncompressed."""
        self._codec = _CODECS.get(compression)
        self._producer = (-1, -1, 0)
        self._built: bytearray | None = None

    @property
    def wire_bytes(self) -> int | None:
        """Bytes of the batch in a request, as they are sent; None before that."""
        return None if self._built is None else len(self._built)

    def add(self, record: bytes) -> None:
        self.records.append(record)
        self.bytes += len(record)

    # -- what aiokafka calls --------------------------------------------------------------------

    def append(self, **_: object) -> None:
        """Take nothing: the batch is full for whatever else may be sent to the partition."""

    def record_count(self) -> int:
        return len(self.records)

    def size(self) -> int:
        return self.bytes

    def close(self) -> None:
        """Do nothing: the batch is closed from the beginning."""

    def closed(self) -> bool:
        return True

    def _set_producer_state(self, producer_id: int, producer_epoch: int, base_sequence: int) -> None:
        self._producer = (producer_id, producer_epoch, base_sequence)

    def _build(self) -> bytearray:
        """The batch's bytes. They are made once, and sent again unchanged."""
        if self._built is None:
            records = b"".join(self.records)
            attributes = 0
            if self._codec is not None:
                number, compress = self._codec
                compressed = compress(records)
                if len(compressed) < len(records):
                    attributes, records = number, compressed
            now_ms = int(time.time() * 1000)
            built = bytearray(
                HEADER.pack(
                    0,
                    HEADER_BYTES + len(records) - _LENGTH_FROM,
                    -1,
                    _MAGIC,
                    0,
                    attributes,
                    len(self.records) - 1,
                    now_ms,
                    now_ms,
                    *self._producer,
                    len(self.records),
                )
            )
            built += records
            struct.pack_into(">I", built, _CRC_FROM - 4, calc_crc32c(memoryview(built)[_CRC_FROM:]))
            self._built = built
        return self._built
