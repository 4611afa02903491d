"""The card that forgets: flushed sectors stay, and each other one is the former or the new one."""

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.forgetful_card import SECTOR, ForgetfulDisk

SECTORS = 8
WRITES = st.tuples(st.just("write"), st.integers(0, SECTORS - 1), st.integers(1, 3), st.booleans())
STEPS = st.lists(WRITES | st.just(("flush", 0, 0, False)), max_size=20)


@given(steps=STEPS, seed=st.integers(0, 1000))
def test_a_cut_keeps_what_was_flushed_and_tears_the_rest_by_sectors(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int, bool]], seed: int
) -> None:
    path = tmp_path_factory.mktemp("card") / "card"
    path.write_bytes(bytes(SECTORS * SECTOR))
    disk = ForgetfulDisk(os.open(path, os.O_RDWR))
    try:
        seen = [bytes(SECTOR)] * SECTORS
        safe = list(seen)
        for value, (kind, first, count, through) in enumerate(steps, 1):
            if kind == "flush":
                disk.flush()
                safe = list(seen)
                continue
            for number in range(first, min(SECTORS, first + count)):
                seen[number] = bytes([value]) * SECTOR
                if through:
                    safe[number] = seen[number]
            disk.write(first * SECTOR, b"".join(seen[first : first + count]), through=through)
            assert disk.read(0, SECTORS * SECTOR) == b"".join(seen)
        in_doubt = disk.doubtful.copy()
        assert disk.cut(random.Random(seed))[0] == len(in_doubt)  # noqa: S311 - drawn by Hypothesis
        kept = path.read_bytes()
        for number in range(SECTORS):
            found = kept[number * SECTOR : (number + 1) * SECTOR]
            assert found in {safe[number], in_doubt.get(number, safe[number])}
    finally:
        os.close(disk.file)
