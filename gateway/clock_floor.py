"""The latest time that is known to have passed: a lower bound of the true time, in a box that does not know it."""

from typing import Final

RELEASED_US: Final = 1_795_305_600_000_000
"""2026-11-22T00:00Z, in microseconds since 1970: this code was not there before. To be set anew with each release."""
