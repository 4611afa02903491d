"""One finding of `sluice check`: well, to be looked at, wrong, or skipped."""

from typing import Literal

from msgspec import Struct


class Finding(Struct, frozen=True):
    """One thing that was looked at."""

    subject: str
    ok: bool
    words: str
    link: str = ""
    """Which link of the chain it is of (`commands.check.chain.LINKS`); said by who walks along it."""

    @property
    def result(self) -> Literal["pass", "warning", "fail", "skipped"]:
        """In one word."""
        return "pass" if self.ok else "fail"


class Remark(Finding, frozen=True):
    """What somebody should look at, and what stops nothing: `ok` is true."""

    warning: bool = True

    @property
    def result(self) -> Literal["pass", "warning", "fail", "skipped"]:
        """In one word."""
        return "warning"


class Skipped(Finding, frozen=True):
    """What could not be looked at, because of another finding, which is to be mended: `ok` is true."""

    skipped: bool = True

    @property
    def result(self) -> Literal["pass", "warning", "fail", "skipped"]:
        """In one word."""
        return "skipped"


def well(subject: str, words: str) -> Finding:
    """Nothing to be done."""
    return Finding(subject, ok=True, words=words)


def remark(subject: str, words: str) -> Finding:
    """Something that should be looked at, and stops nothing."""
    return Remark(subject, ok=True, words=words)


def wrong(subject: str, words: str) -> Finding:
    """Something that has to be mended."""
    return Finding(subject, ok=False, words=words)


def skipped(subject: str, because: str) -> Finding:
    """Something that was not looked at."""
    return Skipped(subject, ok=True, words=f"not looked at: {because}")
