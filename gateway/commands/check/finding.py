"""Findings of `sluice check`, with their four results: pass, warning, fail and skipped."""

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from gateway.health.conditions import Condition

OK = "ok"
"""Code of a finding that needs no action."""
NOT_CHECKED = "not-checked"


class Finding(Struct, frozen=True):
    """Result of one check."""

    subject: str
    ok: bool
    words: str
    link: str = ""
    """Link of the chain (`commands.check.chain.LINKS`). The caller that walks along the chain fills it in."""
    code: str = OK
    """Stable name of what was found, for programs (`docs/conditions.md`)."""

    @property
    def result(self) -> Literal["pass", "warning", "fail", "skipped"]:
        """Result in one word."""
        return "pass" if self.ok else "fail"


class Remark(Finding, frozen=True):
    """Finding that somebody should look at, and that stops nothing: `ok` is true."""

    warning: bool = True

    @property
    def result(self) -> Literal["pass", "warning", "fail", "skipped"]:
        """Result in one word."""
        return "warning"


class Skipped(Finding, frozen=True):
    """Check that could not be made because of another finding, which must be corrected first: `ok` is true."""

    skipped: bool = True

    @property
    def result(self) -> Literal["pass", "warning", "fail", "skipped"]:
        """Result in one word."""
        return "skipped"


def well(subject: str, words: str) -> Finding:
    """Make a finding that needs no action."""
    return Finding(subject, ok=True, words=words)


def remark(code: str, subject: str, words: str) -> Finding:
    """Make a warning: somebody should look at it, and it stops nothing."""
    return Remark(subject, ok=True, words=words, code=code)


def remark_on(condition: "Condition", subject: str) -> Finding:
    """Make a warning of a condition that `sluice status` and the status page show too."""
    return remark(condition.code, subject, condition.line)


def wrong(code: str, subject: str, words: str) -> Finding:
    """Make a finding that must be corrected."""
    return Finding(subject, ok=False, words=words, code=code)


def skipped(subject: str, because: str) -> Finding:
    """Make a finding for a check that could not be made."""
    return Skipped(subject, ok=True, words=f"not checked: {because}", code=NOT_CHECKED)
