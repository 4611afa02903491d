"""Answers requests for the status page: access, files, figures, log-ins. `page.server` has the connections."""

import asyncio
import base64
import binascii
import gzip
import hashlib
import html
import time
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs

import msgspec
import structlog
from msgspec import Struct

from gateway.page.access import LogIns, Remembered, Sessions, is_loopback, is_our_name
from gateway.page.password import PagePasswordError, read_password_line, verify_password
from gateway.page.view import SHOWN, SHOWN_MAX, StatusView
from gateway.settings import StatusPageSettings

COOKIE: Final = "sluice"
GZIP_BYTES_MIN: Final = 600
"""Bytes below which compression gains nothing."""
GZIP_LEVEL: Final = 4
SCRYPT_WAITING_MAX: Final = 4
"""Log-ins that may wait for their turn. One is hashed at a time, for each takes 16 MB."""
READ_S: Final = 2.0
"""Seconds that the password's file is waited for."""
FIELDS_MAX: Final = 8
_CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_SECURITY: Final = (
    ("content-security-policy", _CSP),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    # Others get nothing. With "no-referrer" a browser would not say, either, that a form is of this page.
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)
NOBODY: Final = (
    "Nobody can log in yet: no password is set. Run sudo sluice setup on the gateway; if you have, "
    "sudo systemctl restart sluice."
)
_KINDS: Final = {
    "index.html": "text/html; charset=utf-8",
    "login.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
}
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"

_log = structlog.get_logger("sluice.status_page")


class Request(NamedTuple):
    """One request, read whole."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    """Values by name in lower case."""
    body: bytes
    peer: str


class Answer(Struct, frozen=True):
    """The answer to a request."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


_Way = Callable[[Request], Awaitable[Answer]]


class _File(NamedTuple):
    kind: str
    plain: bytes
    packed: bytes
    etag: str


def refusal(status: int, words: str) -> Answer:
    """Refuse a request in words."""
    return _answer(status, _TEXT, f"{words}\n".encode())


class Answers:
    """Answers requests. Belongs to the event loop."""

    def __init__(
        self,
        settings: StatusPageSettings,
        view: StatusView,
        host_name: str,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._view = view
        self._host_name = host_name
        self._now_s = now_s
        self._sessions = Sessions()
        self._remembered = Remembered()
        self.log_ins = LogIns()
        self._hashing = asyncio.Lock()
        self._waiting = 0
        self._line = ""
        self._rereading: asyncio.Task[None] | None = None
        """The newest task that reads the password's file."""
        self.trouble = ""
        """Why nobody can log in; empty if somebody can."""
        for name in _KINDS:
            # Read now: later their disk may hang.
            _file(name)
        reads = "GET", "HEAD"
        self._ways: dict[str, tuple[tuple[str, ...], _Way]] = {
            "/": (reads, self._page),
            "/app.js": (reads, _static),
            "/style.css": (reads, _static),
            "/health": (reads, self._health),
            "/metrics": (reads, self._metrics),
            "/api/state": (reads, self._api),
            "/api/curves": (reads, self._api),
            "/login": (("POST",), self._log_in),
            "/logout": (("POST",), self._log_out),
        }

    async def tidy(self) -> None:
        """Do what no request brings about. Call it now and then, and once before the first request."""
        self.log_ins.sum_up(self._now_s())
        await self._read_password()

    async def answer(self, request: Request) -> Answer:
        """Answer one request."""
        if not is_our_name(request.headers.get("host", ""), self._host_name):
            return refusal(
                421,
                "this gateway is not called so: open it by its address, such as http://192.168.1.20:8080, or as "
                f"http://{self._host_name.partition('.')[0] or 'gateway'}.local:8080",
            )
        known = self._ways.get(request.path)
        if known is None:
            return refusal(404, "there is no such page; the gateway's is at /")
        methods, way = known
        if request.method not in methods:
            return _answer(405, _TEXT, b"this path is not asked so\n", ("allow", ", ".join(methods)))
        return await way(request)

    # -- pages ----------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Answer:
        if self._is_logged_in(request):
            return _served(request, _file("index.html"))
        return await self._log_in_page(200)

    async def _log_in_page(self, status: int, words: str = "", *more: tuple[str, str]) -> Answer:
        await self._read_password()
        if self.trouble:
            words = NOBODY
        told = f'<p class="refused" role="alert">{words}</p>' if words else ""
        text = _file("login.html").plain.replace(b"<!--told-->", told.encode())
        text = text.replace(b"<!--gateway-->", html.escape(self._view.gateway).encode())
        if self.trouble:
            text = text.replace(b"<fieldset>", b"<fieldset disabled>")
        return _answer(status, _KINDS["login.html"], text, ("cache-control", "no-store"), *more)

    def _is_logged_in(self, request: Request) -> bool:
        token = _cookie(request.headers.get("cookie", ""))
        return bool(token) and self._sessions.is_open(token, self._now_s())

    async def _api(self, request: Request) -> Answer:
        if not self._is_logged_in(request):
            return _json({"error": "log in first"}, status=401)
        asked = _fields(request.query)
        limit = asked.get("limit", "")
        shown = min(int(limit), SHOWN_MAX) if limit.isascii() and limit.isdigit() and len(limit) < 5 else SHOWN
        query = asked.get("q", "")
        if request.path == "/api/state":
            return _json(await self._view.state(query, shown), request)
        return _json(self._view.curves(query, shown), request)

    async def _health(self, _: Request) -> Answer:
        told = await self._view.health()
        return _json(told, status=200 if told["status"] == "ok" else 503)

    async def _metrics(self, request: Request) -> Answer:
        if not is_loopback(request.peer) and not self._is_logged_in(request):
            refused = await self._basic(request)
            if refused is not None:
                return refused
        text = await self._view.metrics()
        return _packed(request, _PROMETHEUS, text)

    async def _basic(self, request: Request) -> Answer | None:
        """Return None if the request carries the page's password, with any user name; else a refusal."""
        password = _basic_password(request.headers.get("authorization", ""))
        ask = "www-authenticate", 'Basic realm="sluice", charset="UTF-8"'
        if password is None:
            return _answer(401, _TEXT, b"the status page's password is needed, with any user name\n", ask)
        await self._read_password()
        if self._line and self._remembered.is_right(self._line, password):
            return None
        refused = await self._refused(request.peer, password)
        if refused is None:
            self._remembered.remember(self._line, password)
            return None
        status, words, retry = refused
        return _answer(status, _TEXT, f"{words}\n".encode(), *([ask] if status == 401 else []), *retry)

    # -- log-ins --------------------------------------------------------------------------------

    async def _log_in(self, request: Request) -> Answer:
        if not _is_of_our_page(request):
            self.log_ins.note_refused(request.peer, "it came from another site's page", self._now_s())
            return refusal(403, "log in on the gateway's own page")
        password = _fields(request.body.decode("utf-8", "replace")).get("password", "")
        refused = await self._refused(request.peer, password)
        if refused is not None:
            status, words, retry = refused
            return await self._log_in_page(status, words, *retry)
        token = self._sessions.begin(self._now_s())
        _log.info("somebody logged in to the status page", peer=request.peer)
        cookie = f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict"
        return _answer(303, _TEXT, b"", ("location", "/"), ("set-cookie", cookie), ("cache-control", "no-store"))

    async def _log_out(self, request: Request) -> Answer:
        if not _is_of_our_page(request):
            return refusal(403, "log out on the gateway's own page")
        self._sessions.end(_cookie(request.headers.get("cookie", "")))
        cookie = f"{COOKIE}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0"
        return _answer(303, _TEXT, b"", ("location", "/"), ("set-cookie", cookie), ("cache-control", "no-store"))

    async def _refused(self, peer: str, password: str) -> tuple[int, str, list[tuple[str, str]]] | None:
        """Return why a password lets nobody in: status, words and headers; None if it is right."""
        await self._read_password()
        now_s = self._now_s()
        if self.trouble:
            self.log_ins.note_refused(peer, "no password is set", now_s)
            return 503, NOBODY, []
        wait_s = self.log_ins.wait_s(peer, now_s)
        if wait_s:
            wait = max(1, round(wait_s))
            self.log_ins.note_refused(peer, "too many have failed", now_s)
            return 429, f"Too many log-ins have failed: try again in {wait} s.", [("retry-after", str(wait))]
        if self._waiting >= SCRYPT_WAITING_MAX:
            self.log_ins.note_refused(peer, "too many at a time", now_s)
            return 429, "Others are logging in at this moment: try again in 2 s.", [("retry-after", "2")]
        self.log_ins.begin(peer, now_s)
        line = self._line
        self._waiting += 1
        try:
            async with self._hashing:
                is_right = await asyncio.to_thread(verify_password, password, line)
        finally:
            self._waiting -= 1
        # Another password may have been set meanwhile.
        if is_right and line == self._line:
            self.log_ins.succeeded(peer, now_s)
            return None
        self.log_ins.note_refused(peer, "the password is wrong", self._now_s())
        return 401, "That is not the password of this gateway.", []

    async def _read_password(self) -> None:
        """Read the file as it is now. If its disk hangs, the line that was read before counts until it answers."""
        # One at a time: each that hangs would keep a thread from others, who open serial ports on threads.
        if self._rereading is None or self._rereading.done():
            self._rereading = asyncio.create_task(self._reread_password(), name="status-page-password")
        done, _ = await asyncio.wait([self._rereading], timeout=READ_S)
        if not (done or self._line or self.trouble):
            self.trouble = f"{self._settings.password_file} cannot be read: its disk does not answer"
            _log.warning("nobody can log in to the status page", why=self.trouble)
        for each in done:
            each.result()

    async def _reread_password(self) -> None:
        """Read the file. If its password has changed, nobody stays logged in."""
        try:
            # A disk that hangs must not hang the event loop, which readings need.
            line, trouble = await asyncio.to_thread(read_password_line, self._settings.password_file), ""
        except PagePasswordError as error:
            line, trouble = "", str(error)
        if trouble and trouble != self.trouble:
            _log.warning("nobody can log in to the status page", why=trouble)
        if self._line and line != self._line:
            self._sessions.end_all()
        self._line, self.trouble = line, trouble


# -- answers ----------------------------------------------------------------------------------------


def _answer(status: int, kind: str, body: bytes, *more: tuple[str, str]) -> Answer:
    headers = [("content-type", kind), *_SECURITY, *more]
    if not any(name == "cache-control" for name, _ in more):
        headers.append(("cache-control", "no-store"))
    return Answer(status, headers, body)


def _json(told: Any, request: Request | None = None, status: int = 200) -> Answer:
    body = msgspec.json.encode(told)
    return _answer(status, _JSON, body) if request is None else _packed(request, _JSON, body, status)


def _packed(request: Request, kind: str, body: bytes, status: int = 200) -> Answer:
    if len(body) < GZIP_BYTES_MIN or not _takes_gzip(request):
        return _answer(status, kind, body, ("vary", "accept-encoding"))
    packed = gzip.compress(body, GZIP_LEVEL, mtime=0)
    return _answer(status, kind, packed, ("content-encoding", "gzip"), ("vary", "accept-encoding"))


async def _static(request: Request) -> Answer:
    return _served(request, _file(request.path[1:]))


def _served(request: Request, file: _File) -> Answer:
    """Serve a file of the page. Browsers ask each time whether it has changed, which costs a hundred bytes."""
    fresh = ("etag", file.etag), ("cache-control", "no-cache"), ("vary", "accept-encoding, cookie")
    if file.etag in request.headers.get("if-none-match", ""):
        return Answer(304, [*_SECURITY, *fresh], b"")
    if _takes_gzip(request):
        return _answer(200, file.kind, file.packed, ("content-encoding", "gzip"), *fresh)
    return _answer(200, file.kind, file.plain, *fresh)


@cache
def _file(name: str) -> _File:
    plain = files("gateway").joinpath("page", name).read_bytes()
    return _File(_KINDS[name], plain, gzip.compress(plain, 9, mtime=0), f'"{hashlib.sha256(plain).hexdigest()[:16]}"')


# -- requests ---------------------------------------------------------------------------------------


def _takes_gzip(request: Request) -> bool:
    told = request.headers.get("accept-encoding", "").lower().replace(" ", "").split(",")
    return "gzip" in told or any(each.startswith("gzip;q=") and each != "gzip;q=0" for each in told)


def _fields(text: str) -> dict[str, str]:
    """Read a form or a query: the last value of each name."""
    try:
        found = parse_qs(text, keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError:
        return {}
    return {name: values[-1] for name, values in found.items()}


def _cookie(header: str) -> str:
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def _basic_password(header: str) -> str | None:
    """Return the password of a Basic log-in (RFC 7617); None if there is none."""
    scheme, _, told = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        text = base64.b64decode(told.strip(), validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    _, colon, password = text.partition(":")
    return password if colon else None


def _is_of_our_page(request: Request) -> bool:
    """Whether this page sent a form, as far as the browser says."""
    if request.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
        return False
    origin = request.headers.get("origin")
    return origin is None or origin == f"http://{request.headers.get('host', '')}"
