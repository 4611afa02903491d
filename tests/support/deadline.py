"""An end to a test whose failing would be to wait for ever."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def deadline(seconds: int = 20) -> Iterator[None]:
    """Fail the test once that many seconds have passed in the block, waiting in a system call or not."""

    def expired(_number: int, _frame: object) -> None:
        # No OSError, which the code may expect of a file.
        pytest.fail(f"it has taken {seconds} s")

    former = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
