"""Damage that passes the frame check: shown by very many random corruptions, and measured on half of its bits.

A CRC-32 lets a random corruption pass once in 2^32, about four thousand million: more than can be tried. Its lower 16
bits are a check too, which lets one pass in 65,536, and that can be seen: the corruptions are as random as they should
be.
"""

import random
import zlib
from collections.abc import Collection

import pytest

from gateway.serial_lines.frames import DELIMITER, Data, Frame, FrameDecoder, cobs_decode, encode_frame
from tests.support.sizes import size

CORRUPTIONS = size(200_000, 1_000_000)
CRC_BYTES = 4
SAMPLES = 1_000


def sample(rng: random.Random) -> Data:
    boot, sequence, tick_ms = rng.randrange(100), rng.randrange(100_000), rng.getrandbits(32)
    return Data(boot, sequence, max(0, sequence - 8), tick_ms, 0, b'{"celsius":%.2f}' % rng.uniform(-40, 85))


def corrupt(frame: bytes, other: bytes, rng: random.Random) -> bytes:
    """Change, remove or add a few bytes anywhere, a burst, flip bits all over, or end as another frame does."""
    damaged = bytearray(frame)
    kind = rng.randrange(6)
    at = rng.randrange(len(damaged))
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(len(damaged))] = rng.getrandbits(8)
    elif kind == 1:
        length = rng.randint(2, 12)
        damaged[at : at + length] = rng.randbytes(length)
    elif kind == 2:
        for _ in range(rng.randint(1, 12)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del damaged[at : at + rng.randint(1, 4)]
    elif kind == 4:
        damaged[at:at] = rng.randbytes(rng.randint(1, 4))
    else:
        damaged[at:] = other[at:]
    return bytes(damaged)


def passes_16_bits(piece: bytes, sent: Collection[bytes]) -> bool:
    """Whether half of the check lets another content through than was sent."""
    try:
        plain = cobs_decode(piece)
    except ValueError:
        return False
    content, crc = plain[:-CRC_BYTES], plain[-CRC_BYTES:]
    return content not in sent and zlib.crc32(content).to_bytes(CRC_BYTES, "little")[:2] == crc[:2]


@pytest.mark.slow
@pytest.mark.campaign(seconds=30)
def test_no_random_corruption_becomes_a_wrong_reading() -> None:
    rng = random.Random(8)  # noqa: S311 - repeatable
    judged = passed_16_bits = 0
    wrong = []
    samples = [sample(rng) for _ in range(SAMPLES)]
    frames = [encode_frame(each) for each in samples]
    whole = {frame.removesuffix(DELIMITER) for frame in frames}
    contents = {each.to_bytes() for each in samples}
    sent: set[Frame] = set(samples)
    while judged < CORRUPTIONS:
        for piece in corrupt(rng.choice(frames), rng.choice(frames), rng).split(DELIMITER):
            # A neighbour's zero was hit, or bytes were replaced by themselves: such a frame is right.
            if len(piece) > CRC_BYTES + 1 and piece not in whole:
                judged += 1
                # A whole frame among damaged bytes is right too.
                wrong += [frame for frame in FrameDecoder().feed(piece + DELIMITER) if frame not in sent]
                passed_16_bits += passes_16_bits(piece, contents)
    assert wrong == []
    assert 0 < passed_16_bits < 10 * judged / 2**16
