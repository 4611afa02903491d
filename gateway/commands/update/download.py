"""Fetches a file by https, and goes on where a connection broke, also in a later call."""

import fcntl
import ssl
import time
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPS_PORT, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from shutil import disk_usage
from typing import BinaryIO, Final
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import msgspec
from msgspec import Struct

from gateway.commands.update.programs import UpdateError
from gateway.host.terminal import say
from gateway.host.terminal_text import size, span
from gateway.tls.client import ClientTlsError, client_context, tls_reason
from gateway.tls.dates import OTHER_NAMES, CertificateDateError, Dates, day, judge_dates

FREE_BYTES_MIN: Final = 100_000_000
"""Bytes of the disk that stay free for readings."""
SILENCE_S: Final = 30.0
"""Seconds without a byte after which a connection counts as broken."""
PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds between tries, from the first one on that brings nothing. The last one repeats."""
GIVE_UP_S: Final = 900.0
"""Seconds without a byte after which a call ends."""
PROGRESS_S: Final = 10.0
REDIRECTS_MAX: Final = 5
_CHUNK_BYTES: Final = 1 << 16
_SAFE: Final = "/?%:@!$&'()*+,;=~"
"""Characters that stay as they are in what a server is asked for (RFC 3986, 3.3)."""
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_LATER: Final = frozenset({408, 429, 500, 502, 503, 504})
"""Answers of a server that has its reasons not to give a file now."""


class _BrokenError(Exception):
    """The file did not come whole, and may do so later. The message says why."""


class _Known(Struct, frozen=True):
    """A file that has not come whole. It stands beside the file."""

    address: str
    size: int
    mark: str
    """The server's ETag or date of it. By it the server gives the rest of this file alone (RFC 9110, 13.1.5)."""


def fetch(address: str, file: Path, bytes_max: int, dates: Dates, ca: Path | None = None) -> None:
    """Fetch a file into a folder that only root can write. Raises UpdateError; the part that came stays.

    Without `ca`, the authorities that this box trusts count.

    If a part of it came in an earlier call, and the server has the same file still, only the rest is fetched.
    """
    moment = dates()
    if moment is not None:
        say(
            "this box's clock is not to be trusted: only certificates that ended before "
            f"{day(moment)} are refused as expired. The file's own signature is verified all the same"
        )
    try:
        with file.open("ab") as target:
            try:
                fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UpdateError("another `sluice update` fetches a file now: wait for its end") from None
            context = _context(dates, ca)
            _Download(address, target, file.with_name(f"{file.name}.json"), bytes_max, context).run()
    except OSError as error:
        raise UpdateError(f"{file} cannot be written: {error.strerror or error}; is the disk full?") from error


def forget(file: Path) -> None:
    """Remove a file that was fetched, or a part of it."""
    for path in (file, file.with_name(f"{file.name}.json")):
        path.unlink(missing_ok=True)


def path_of(address: str) -> str:
    """The path in an address, without the words after `?`. Raises UpdateError if it is no address to fetch from."""
    return _parts(address).path


def beside(address: str, suffix: str) -> str:
    """The address of a file beside another one, whose name ends in this, too."""
    parts = _parts(address)
    return parts._replace(path=f"{parts.path}{suffix}").geturl()


class _Download:
    """One file on its way."""

    def __init__(
        self, address: str, target: BinaryIO, known_file: Path, bytes_max: int, context: ssl.SSLContext
    ) -> None:
        self._address = address
        self._target = target
        self._known_file = known_file
        self._bytes_max = bytes_max
        self._context = context
        self._known = _read(known_file, address)
        self._last_s: float | None = None
        """When a byte came last; None before the first one."""
        self._said_s = time.monotonic()

    def run(self) -> None:
        """Fetch it whole. Raises UpdateError, and OSError if the disk does not take it."""
        tries = 0
        while True:
            before_s = self._last_s
            try:
                self._go_on()
            except _BrokenError as error:
                tries = tries + 1 if self._last_s == before_s else 0
                # A first try that brings nothing is more often a wrong address than a broken network.
                if self._last_s is None or time.monotonic() - self._last_s > GIVE_UP_S:
                    raise UpdateError(f"{error}. {self._what_came()}") from error
                pause_s = PAUSES_S[min(tries, len(PAUSES_S) - 1)]
                say(f"{error}. {self._what_came()}. It goes on in {span(pause_s)}")
                time.sleep(pause_s)
            else:
                return

    def _what_came(self) -> str:
        came = self._target.tell()
        if self._known is None or not came:
            return "Nothing came"
        later = "; the same command goes on from there" if self._known.mark else ""
        return f"{size(came)} of {size(self._known.size)} came{later}"

    def _go_on(self) -> None:
        """Fetch what is missing, by one connection. Raises _BrokenError, UpdateError, and OSError of the disk."""
        came = self._target.tell()
        known = self._known if came and self._known is not None and self._known.mark else None
        # The last byte is fetched again: no range may begin behind the end of a file.
        begin = 0 if known is None else min(came, known.size) - 1
        headers = {} if known is None else {"Range": f"bytes={begin}-", "If-Range": known.mark}
        connection, answer = self._ask(self._address, headers)
        with closing(connection), closing(answer):
            if answer.status == HTTPStatus.PARTIAL_CONTENT and known is not None:
                if answer.getheader("Content-Range") != f"bytes {begin}-{known.size - 1}/{known.size}":
                    self._begin_anew(None)
                    raise _BrokenError("the server gave another part of the file than was asked for")
                self._cut(begin)
            else:
                known = self._described(answer)
                self._begin_anew(known)
            self._need_room(known.size - self._target.tell())
            self._take(answer, known.size)

    def _ask(self, address: str, headers: dict[str, str]) -> tuple[HTTPSConnection, HTTPResponse]:
        """Ask a server, and those that it names instead of itself. Raises _BrokenError and UpdateError."""
        for _ in range(REDIRECTS_MAX + 1):
            parts = _parts(address)
            host = parts.hostname or ""
            connection = HTTPSConnection(host, parts.port or HTTPS_PORT, timeout=SILENCE_S, context=self._context)
            try:
                connection.request("GET", _target(parts), headers={"User-Agent": "sluice", **headers})
                answer = connection.getresponse()
            except (OSError, HTTPException, UnicodeError) as error:
                connection.close()
                raise _told(error, host) from error
            if answer.status in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}:
                return connection, answer
            answer.close()
            connection.close()
            if answer.status not in _REDIRECTS:
                raise _refused(answer, address)
            address = urljoin(address, answer.getheader("Location") or "")
        raise UpdateError(f"{self._address} leads from one address to another, {REDIRECTS_MAX} times and more")

    def _described(self, answer: HTTPResponse) -> _Known:
        """What a server says of a file that it gives whole. Raises UpdateError."""
        told = answer.getheader("Content-Length") or ""
        if not told.isdecimal():
            raise UpdateError(
                f"{self._address}: the server does not say how large it is, so nobody could tell whether it came "
                "whole; put it onto a plain web server"
            )
        if int(told) > self._bytes_max:
            raise UpdateError(
                f"{self._address} has {size(int(told))}, and such a file of this gateway has {size(self._bytes_max)} "
                "at most"
            )
        tag = answer.getheader("ETag") or ""
        # A weak tag does not promise the same bytes.
        mark = tag if tag.startswith('"') else answer.getheader("Last-Modified") or ""
        return _Known(self._address, int(told), mark)

    def _cut(self, end: int) -> None:
        self._target.seek(end)
        self._target.truncate()

    def _begin_anew(self, known: _Known | None) -> None:
        self._cut(0)
        self._known = known
        if known is None:
            self._known_file.unlink(missing_ok=True)
        else:
            self._known_file.write_bytes(msgspec.json.encode(known))

    def _need_room(self, needed: int) -> None:
        free = disk_usage(self._known_file.parent).free
        if free - needed < FREE_BYTES_MIN:
            raise UpdateError(
                f"{size(needed)} of it are to come, and {self._known_file.parent} has {size(free)} free, of which "
                f"{size(FREE_BYTES_MIN)} are kept for readings. Make room, or bring the file on a stick"
            )

    def _take(self, answer: HTTPResponse, whole: int) -> None:
        """Store a body up to the size of the whole file. Raises _BrokenError, and OSError of the disk."""
        while (missing := whole - self._target.tell()) > 0:
            try:
                data = answer.read1(min(_CHUNK_BYTES, missing))
            except (OSError, HTTPException) as error:
                raise _BrokenError(f"the connection broke ({tls_reason(error)})") from error
            if not data:
                raise _BrokenError("the connection broke")
            self._target.write(data)
            now_s = self._last_s = time.monotonic()
            if now_s - self._said_s > PROGRESS_S:
                self._said_s = now_s
                say(f"{size(self._target.tell())} of {size(whole)}")


def _read(file: Path, address: str) -> _Known | None:
    with suppress(OSError, msgspec.DecodeError):
        found = msgspec.json.decode(file.read_bytes(), type=_Known)
        return found if found.address == address else None
    return None


def _parts(address: str) -> SplitResult:
    """Take an address apart. Raises UpdateError if it is no address of https."""
    try:
        parts = urlsplit(address)
        # To ask for the port reads it.
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise UpdateError(f"{address} is no address") from None
    if parts.scheme != "https":
        raise UpdateError(f"{address}: an update is fetched by https:// and by nothing else")
    if not is_address or parts.username is not None:
        raise UpdateError(f"{address}: give an address with a host, and without user and password")
    return parts


def _context(dates: Dates, ca: Path | None) -> ssl.SSLContext:
    try:
        context = client_context(ca, None, None)
    except ClientTlsError as error:
        raise UpdateError(f"fleet.ca: {str(error).removeprefix('tls.ca: ')}") from error
    judge_dates(context, dates)
    return context


def _target(parts: SplitResult) -> str:
    """What a server is asked for."""
    target = quote(parts.path or "/", safe=_SAFE)
    return f"{target}?{quote(parts.query, safe=_SAFE)}" if parts.query else target


def _refused(answer: HTTPResponse, address: str) -> Exception:
    """The error for an answer without a file."""
    told = f"{address}: the server answers {answer.status} {answer.reason}"
    if answer.status in _LATER:
        return _BrokenError(told)
    return UpdateError(f"{told}; is the address right?")


def _told(error: OSError | HTTPException | UnicodeError, host: str) -> Exception:
    """An error of the network, of TLS or of HTTP in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_refused(error, host)
    if isinstance(error, UnicodeError):
        return UpdateError(f"{host} is no name of a server")
    if isinstance(error, ssl.SSLError):
        words = f"TLS with {host} fails ({tls_reason(error)})"
    elif isinstance(error, TimeoutError):
        words = f"{host} does not answer within {SILENCE_S:.0f} s"
    elif isinstance(error, OSError):
        words = f"{host} cannot be reached ({error.strerror or error})"
    else:
        words = f"{host} does not answer as a web server does ({error or type(error).__name__})"
    return _BrokenError(words)


def _certificate_refused(error: ssl.SSLCertVerificationError, host: str) -> UpdateError:
    if isinstance(error, CertificateDateError):
        return UpdateError(
            f"the certificate of {host} {error.verify_message}; have it renewed there, or see to this box's clock "
            "(timedatectl)"
        )
    if error.verify_code in OTHER_NAMES:
        return UpdateError(f"the certificate of {host} is for another name ({error.verify_message})")
    return UpdateError(
        f"the certificate of {host} is signed by nobody whom this box trusts ({error.verify_message}). If the server "
        "is your own, name the file with its authority: ca in [fleet], or sudo env SSL_CERT_FILE=FILE sluice update ..."
    )
