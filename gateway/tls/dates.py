"""Dates of certificates where this box's clock cannot judge them: it is not known yet, or not as the system has it.

A Pi without a network believes that it is 2000, or the hour at which it was switched off. By such a clock OpenSSL would
refuse each certificate that is good, or take one that ended long ago. So while the clock is not synced they are judged
by what is certain: the true time is later than the floor (`clock.floor`). What ended before that is refused; whether
others have begun, or have ended since, nobody can tell, and they are let pass. All else (who signed it, for whom it is,
for what) is OpenSSL's to judge, as ever; and the dates too once the clock is known: then whoever was let in so is
looked at again.

How: OpenSSL is told not to look at dates (X509_V_FLAG_NO_CHECK_TIME), and those of the chain that it has verified are
looked at here, before the handshake counts as done. A time of our own instead (X509_VERIFY_PARAM_set_time, by ctypes)
would refuse what was signed after the floor, and needs the address of a structure within Python's objects; the flag
goes by Python's documented `verify_flags`, the classes by its documented `sslobject_class`. The verified chain is
public from Python 3.13 (Debian 13) on; 3.11 (Debian 12) has it in a private place, and where some Python has it nowhere
nothing is let pass.
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
"""A system clock farther than this from the one that was synced, beyond its bound, was set by hand: dates of
certificates do not turn on less."""
_ENCODING_DER: Final = 2
"""`_ssl.ENCODING_DER`."""
_LATEST_US: Final = 253_402_300_799_000_000
"""The end of the year 9999, beyond which no certificate goes."""
_EXPIRED, _NOT_YET_VALID = 10, 9
"""X509_V_ERR_... of OpenSSL (X509_STORE_CTX_get_error(3))."""

_log = structlog.get_logger()


class TrueTime(NamedTuple):
    """Between which the true time lies, as far as that is known: microseconds since 1970, UTC."""

    earliest_us: int
    latest_us: int | None


Dates = Callable[[], TrueTime | None]
"""What dates are to be judged by at this moment; None where OpenSSL is to judge them by the system's clock."""


def by_system_clock() -> TrueTime | None:
    """`Dates` of whoever has no other clock."""
    return None


def true_time(known: tuple[int, int | None], floor_us: int, system_us: int) -> TrueTime | None:
    """As `Dates` has it, when the system's clock says `system_us`.

    `known` is what this box's clock says as far as it was synced, and the bound of its error: None where it was not.
    """
    known_us, error_us = known
    if error_us is None:
        return TrueTime(floor_us, None)
    if abs(system_us - known_us) <= error_us + ASTRAY_US:
        return None
    # Synced once, and set to something else since: what was learnt then still holds.
    return TrueTime(known_us - error_us, known_us + error_us)


class CertificateDates:
    """`Dates` of this gateway; says in the log when they begin to be judged otherwise, once it has been asked."""

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
    """The day that has come for certain."""
    return f"{_datetime(moment.earliest_us):%Y-%m-%d}"


class CertificateDateError(ssl.SSLCertVerificationError):
    """A chain holds for no moment that may be now; `verify_message` is for people."""

    def __init__(self, words: str, code: int = 0) -> None:
        super().__init__(1, f"certificate verify failed: {words}")
        self.reason = "CERTIFICATE_VERIFY_FAILED"
        self.library = "SSL"
        self.verify_code = code
        self.verify_message = words


def judge_dates(context: ssl.SSLContext, dates: Dates) -> None:
    """Have the dates of what peers of this context show judged by `dates`, whatever the system's clock says.

    A handshake that does not pass raises CertificateDateError.
    """

    class JudgedObject(ssl.SSLObject):
        """What asyncio speaks TLS by."""

        def do_handshake(self) -> None:
            super().do_handshake()
            check_dates(self, dates())

    class JudgedSocket(ssl.SSLSocket):
        """The same on a socket."""

        def do_handshake(self, block: bool = False) -> None:  # noqa: FBT001, FBT002 - as SSLSocket has it
            super().do_handshake(block)
            check_dates(self, dates())

    context.verify_flags |= NO_CHECK_TIME
    context.sslobject_class = JudgedObject
    context.sslsocket_class = JudgedSocket


def check_dates(tls: ssl.SSLObject | ssl.SSLSocket, moment: TrueTime | None) -> None:
    """Whether what the peer has shown may hold now; by the system's clock without `moment`.

    Raises CertificateDateError. A peer that was asked for no certificate, and showed none, has nothing to judge.
    """
    shown = tls.getpeercert(binary_form=True)
    if shown is None:
        return
    # A session that is gone on with brings no chain. It was verified when it began.
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
    """The peer's own certificate's first. Raises CertificateDateError."""
    earliest = _datetime(moment.earliest_us)
    latest = None if moment.latest_us is None else _datetime(moment.latest_us)
    for place, dates in enumerate(validities):
        whose = "" if place == 0 else "hangs on one that "
        if earliest >= dates.end:
            words = f"{whose}{date_trouble(dates, earliest)}, and it is {earliest:%Y-%m-%d} at least"
            raise CertificateDateError(words, _EXPIRED)
        if latest is not None and latest < dates.begin:
            words = f"{whose}{date_trouble(dates, latest)}, and it is {latest:%Y-%m-%d} at most"
            raise CertificateDateError(words, _NOT_YET_VALID)


def _verified_chain(tls: ssl.SSLObject | ssl.SSLSocket) -> list[bytes]:
    """The chain that OpenSSL has verified, from the peer's certificate to the authority, in DER."""
    # typeshed knows neither.
    of_python: Any = tls
    if hasattr(tls, "get_verified_chain"):
        return list(of_python.get_verified_chain())
    of_openssl: Any = getattr(of_python, "_sslobj", None)
    if not hasattr(of_openssl, "get_verified_chain"):
        raise CertificateDateError("this Python shows no chain to judge before this box's clock is synced")
    return [certificate.public_bytes(_ENCODING_DER) for certificate in of_openssl.get_verified_chain() or ()]


def _datetime(us: int) -> datetime:
    return datetime.fromtimestamp(min(us, _LATEST_US) / 1e6, UTC)
