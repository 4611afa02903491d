"""The page's addresses: the page itself, rows as files, curves, and what there is to choose from."""

import hashlib
import time
from collections.abc import AsyncIterator, Callable
from functools import cache
from importlib.resources import files
from typing import IO, Any, Final
from urllib.parse import urlencode

import duckdb
import msgspec
from deltalake.exceptions import DeltaError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark.desk.explain import NoWindowError, SeveralSeriesError
from spark.desk.kept_tables import KeptTables, KeptWarehouse
from spark.desk.nothing import UnknownNameError
from spark.engine.told_error import ToldError
from spark.page import gateways
from spark.page.access import HEADERS, cookie_name, has_token, is_our_host
from spark.page.answers import KINDS, VIEWS, rows_of
from spark.page.asking import Asking, GoneError
from spark.page.choices import choices
from spark.page.curve import curve
from spark.page.explaining import explained
from spark.page.questions import Question, QuestionError, question
from spark.windows.window_sizes import WindowSizeError

FILES: Final = {
    "desk.js": "text/javascript; charset=utf-8",
    "desk.css": "text/css; charset=utf-8",
    "uplot/uplot.js": "text/javascript; charset=utf-8",
    "uplot/uplot.css": "text/css; charset=utf-8",
}
PAGE_KIND: Final = "text/html; charset=utf-8"
COPY_BYTES: Final = 262_144
NOTE: Final = "sluice-note"
"""Header that says why an answer has no rows."""


class Guard:
    """Lets requests in by Host and token, and gives each answer the headers that keep a browser safe."""

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        self._app, self._port, self._token = app, port, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> Response | None:
        """Why a request is not let in; None if it is. A browser that brings the token gets it as a cookie."""
        headers, told = Headers(scope=scope), QueryParams(scope["query_string"]).get("token")
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not is_our_host(hosts[0], self._port):
            return _words(421, f"this server is not called so: open it as http://127.0.0.1:{self._port}")
        if not has_token(self._token, self._port, told, headers):
            return _words(
                401,
                "The token is missing or is of an earlier start. Open the address that `sluice-cloud desk` printed, "
                "or add &token=... to this one.",
            )
        if scope["path"] != "/" or told is None:
            return None
        # Without the token, so that it does not stay in the browser's history.
        others = [(name, value) for name, value in QueryParams(scope["query_string"]).multi_items() if name != "token"]
        found = RedirectResponse(f"/?{urlencode(others)}" if others else "/", 303)
        found.set_cookie(cookie_name(self._port), self._token, path="/", httponly=True, samesite="strict")
        return found


def application(warehouse: KeptWarehouse, port: int, token: str) -> ASGIApp:
    """Make the server's application."""
    asking = Asking(warehouse)

    async def rows(request: Request) -> Response:
        name, kind = request.path_params["view"], request.path_params["kind"]
        view = VIEWS.get(name)
        if view is None or kind not in KINDS:
            return _words(
                404, f"there is no {request.url.path}: there are {', '.join(VIEWS)}, each as .{', .'.join(KINDS)}"
            )
        found = await asking.ask(request, lambda tables: rows_of(tables, view, _asked(request), kind))
        headers = {
            "content-length": str(found.size),
            "content-disposition": f'{"inline" if kind == "json" else "attachment"}; filename="{name}.{kind}"',
        }
        if found.note:
            headers[NOTE] = found.note
        return StreamingResponse(_parts(found.body), media_type=KINDS[kind], headers=headers)

    def told(answer: Callable[[KeptTables, Question], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            asked = _asked(request)
            return _json(200, await asking.ask(request, lambda tables: answer(tables, asked)))

        return endpoint

    async def gateways_page(request: Request) -> Response:
        asked = _asked(request)
        made = await asking.ask(
            request,
            lambda tables: gateways.page(gateways.fleet(tables, time.time_ns() // 1_000, asked.asked.site), asked.zone),
        )
        return Response(made, media_type=PAGE_KIND, headers={"content-security-policy": gateways.policy()})

    app = Starlette(
        routes=[
            Route("/", _page),
            Route("/gateways.html", gateways_page),
            Route("/curve.json", told(curve)),
            Route("/choices.json", told(choices)),
            Route("/explain.json", told(explained)),
            *(Route(f"/{name}", _file) for name in FILES),
            Route("/{view}.{kind}", rows),
        ],
        exception_handlers={
            QuestionError: _wrong,
            # Of a time beyond the years that there are.
            OverflowError: _wrong,
            SeveralSeriesError: _wrong,
            WindowSizeError: _wrong,
            UnknownNameError: _unknown,
            NoWindowError: _unknown,
            ToldError: _failed,
            duckdb.Error: _failed,
            DeltaError: _failed,
            OSError: _failed,
            GoneError: _nobody,
        },
    )
    return Guard(app, port, token)


def _asked(request: Request) -> Question:
    told = request.query_params.multi_items()
    names = [name for name, _ in told]
    for name in names:
        if names.count(name) > 1:
            raise QuestionError(f"{name} is there twice")
    return question({name: value for name, value in told if name != "token"})


# -- answers ----------------------------------------------------------------------------------------


async def _page(_: Request) -> Response:
    return Response(_read("index.html"), media_type=PAGE_KIND)


async def _file(request: Request) -> Response:
    name = request.url.path[1:]
    body = _read(name)
    fresh = {"etag": f'"{hashlib.sha256(body).hexdigest()[:16]}"', "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == fresh["etag"]:
        return Response(status_code=304, headers=fresh)
    return Response(body, media_type=FILES[name], headers=fresh)


@cache
def _read(name: str) -> bytes:
    return files("spark").joinpath("page", name).read_bytes()


def _json(status: int, told: Any) -> Response:
    return Response(msgspec.json.encode(told), status, media_type=KINDS["json"])


def _words(status: int, words: str) -> Response:
    return PlainTextResponse(f"{words}\n", status)


async def _parts(body: IO[bytes]) -> AsyncIterator[bytes]:
    with body:
        while part := await run_in_threadpool(body.read, COPY_BYTES):
            yield part


# -- what goes wrong --------------------------------------------------------------------------------


def _error(request: Request, status: int, error: Exception) -> Response:
    first, *_ = str(error).splitlines() or [type(error).__name__]
    return _json(status, {"error": first}) if request.url.path.endswith(".json") else _words(status, first)


async def _wrong(request: Request, error: Exception) -> Response:
    return _error(request, 400, error)


async def _unknown(request: Request, error: Exception) -> Response:
    return _error(request, 404, error)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(request, 503, error)


async def _nobody(_request: Request, _error: Exception) -> Response:
    # Nobody reads it.
    return Response(status_code=499)
