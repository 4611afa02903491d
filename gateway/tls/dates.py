"""Judges dates of certificates while this box's clock cannot: it is not synced yet, or was set by hand since.

A Pi without a network believes that it is 2000, or the hour at which it was switched off. By such a clock, OpenSSL
would refuse good certificates, or take one that ended long ago. So while the clock is not synced, the floor judges
(`clock.floor`): the true time is later. Certificates that ended before the floor are refused. Nobody can tell whether
others have begun, or have ended since, so they pass. OpenSSL judges all else as ever: who signed a certificate, and for
whom and what it is. Once the clock is known, OpenSSL judges dates too, and peers that passed before are judged again.

OpenSSL is told not to look at dates (X509_V_FLAG_NO_CHECK_TIME). The dates of the chain that it has verified are judged
here, before the handshake counts as done. OpenSSL could be given a time of our own instead (X509_VERIFY_PARAM_set_time,
by ctypes). But that would refuse certificates made after the floor, and needs the address of a structure within
Python's objects. The flag and the classes go by Python's documented `verify_flags` and `sslobject_class`. The verified
chain is public from Python 3.13 (Debian 13) on. Python 3.11 (Debian 12) has it in a private place. If some Python has
it nowhere, nothing passes.
"""

import ssl
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import structlog

from gateway.clock.floor import ClockFloor
from gateway.clock.gateway_clock import BootClock
from gateway.clock.kernel_clock import boottime_us
from gateway.tls.certificates import Validity, date_trouble, validity

NO_CHECK_TIME: Final = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL (X509_VERIFY_PARAM_set_flags(3)); Python has no name for it."""
ASTRAY_US: Final = 60_000_000
"""Microseconds beyond its bound by which a system clock may differ from the synced one. If it differs by more, it was
set by hand. Less does not matter for dates of certificates."""
_ENCODING_DER: Final = 2
"""`_ssl.ENCODING_DER`."""
_LATEST_US: Final = 253_402_300_799_000_000
"""The end of the year 9999 in microseconds since 1970. No certificate goes beyond it."""
EXPIRED, NOT_YET_VALID = 10, 9
"""X509_V_ERR_... of OpenSSL (X509_STORE_CTX_get_error(3))."""
OTHER_NAMES = frozenset({62, 64})
"""X509_V_ERR_... for a certificate of another host name or of another address."""

_log = structlog.get_logger()


class TrueTime(NamedTuple):
    """Bounds of the true time, as far as it is known: microseconds since 1970, UTC."""

    earliest_us: int
    latest_us: int | None


Dates = Callable[[], TrueTime | None]
"""Gives the time to judge dates by; None if OpenSSL is to judge them by the system's clock."""


def by_system_clock() -> TrueTime | None:
    """`Dates` for whoever has no other clock."""
    return None


def true_time(known: tuple[int, int | None], floor_us: int, system_us: int) -> TrueTime | None:
    """The time to judge dates by, as `Dates` gives it, if the system's clock says `system_us`.

    `known` is the time by this box's clock, and the bound of its error. The bound is None if the clock was not synced.
    """
    known_us, error_us = known
    if error_us is None:
        return TrueTime(floor_us, None)
    if abs(system_us - known_us) <= error_us + ASTRAY_US:
        return None
    # The clock was synced once, and set to something else since. The synced time still holds.
    return TrueTime(known_us - error_us, known_us + error_us)


class CertificateDates:
    """`Dates` of this gateway. It logs when dates begin to be judged by another clock than the system's."""

    def __init__(self, clock: Callable[[], BootClock], floor: ClockFloor) -> None:
        self._clock = clock
        self.floor = floor
        self._told = False

    def __call__(self) -> TrueTime | None:
        """See `Dates`."""
        clock, now_us = self._clock(), boottime_us()
        known = clock.at(now_us), clock.error_us(now_us) if clock.synced else None
        found = true_time(known, self.floor.us, time.time_ns() // 1000)
        if found is not None and not self._told:
            _log.info(
                "this box's clock is not to be trusted: until it is synced, certificates that ended before the latest "
                "time that is known to have passed are refused, and the dates of others let pass",
                passed=day(found),
            )
        self._told = found is not None
        return found


def day(moment: TrueTime) -> str:
    """The day that has surely come."""
    return f"{_datetime(moment.earliest_us):%Y-%m-%d}"


class CertificateDateError(ssl.SSLCertVerificationError):
    """A chain is valid at no moment that may be now. `verify_message` is for people."""

    def __init__(self, words: str, code: int = 0) -> None:
        super().__init__(1, f"certificate verify failed: {words}")
        self.reason = "CERTIFICATE_VERIFY_FAILED"
        self.library = "SSL"
        self.verify_code = code
        self.verify_message = words


def judge_dates(context: ssl.SSLContext, dates: Dates) -> None:
    """Let `dates` judge the dates of certificates that peers of this context show, and not the system's clock.

    A handshake that does not pass raises CertificateDateError.
    """

    class JudgedObject(ssl.SSLObject):
        """The TLS object that asyncio uses."""

        def do_handshake(self) -> None:
            super().do_handshake()
            check_dates(self, dates())

    class JudgedSocket(ssl.SSLSocket):
        """The TLS object of a blocking socket."""

        def do_handshake(self, block: bool = False) -> None:  # noqa: FBT001, FBT002 - as SSLSocket has it
            super().do_handshake(block)
            check_dates(self, dates())

    context.verify_flags |= NO_CHECK_TIME
    context.sslobject_class = JudgedObject
    context.sslsocket_class = JudgedSocket


def check_dates(tls: ssl.SSLObject | ssl.SSLSocket, moment: TrueTime | None) -> None:
    """Check that the dates of the peer's certificates may hold at `moment`; without it, by the system's clock.

    Raises CertificateDateError. A peer that was asked for no certificate, and showed none, passes.
    """
    shown = tls.getpeercert(binary_form=True)
    if shown is None:
        return
    # A resumed TLS session brings no chain. The chain was verified when the session began.
    chain = _verified_chain(tls) or [shown]
    if moment is None:
        now_us = time.time_ns() // 1000
        moment = TrueTime(now_us, now_us)
    try:
        validities = [validity(certificate) for certificate in chain]
    except ValueError as error:
        raise CertificateDateError(f"has, or hangs on one that has, dates that cannot be read ({error})") from error
    _check_validities(validities, moment)


def _check_validities(validities: Sequence[Validity], moment: TrueTime) -> None:
    """Check the dates, those of the peer's own certificate first. Raises CertificateDateError."""
    earliest = _datetime(moment.earliest_us)
    latest = None if moment.latest_us is None else _datetime(moment.latest_us)
    for place, dates in enumerate(validities):
        whose = "" if place == 0 else "hangs on one that "
        if earliest >= dates.end:
            words = f"{whose}{date_trouble(dates, earliest)}, and it is {earliest:%Y-%m-%d} at least"
            raise CertificateDateError(words, EXPIRED)
        if latest is not None and latest < dates.begin:
            words = f"{whose}{date_trouble(dates, latest)}, and it is {latest:%Y-%m-%d} at most"
            raise CertificateDateError(words, NOT_YET_VALID)


def _verified_chain(tls: ssl.SSLObject | ssl.SSLSocket) -> list[bytes]:
    """The chain that OpenSSL has verified, from the peer's certificate to the authority, in DER."""
    # typeshed knows neither way.
    of_python: Any = tls
    if hasattr(tls, "get_verified_chain"):
        return list(of_python.get_verified_chain())
    of_openssl: Any = getattr(of_python, "_sslobj", None)
    if not hasattr(of_openssl, "get_verified_chain"):
        raise CertificateDateError("this Python shows no chain to judge before this box's clock is synced")
    return [certificate.public_bytes(_ENCODING_DER) for certificate in of_openssl.get_verified_chain() or ()]


def _datetime(us: int) -> datetime:
    return datetime.fromtimestamp(min(us, _LATEST_US) / 1e6, UTC)
