"""Decides which requests the page answers, by Host and token. No I/O."""

import hmac
from collections.abc import Mapping
from typing import Final

TOKEN_BYTES: Final = 24
TOKEN_CHARACTERS_MIN: Final = 16
"""Characters below which a token of somebody's own could be guessed."""
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # The address of the first request has the token.
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer."""


def is_our_host(host: str, port: int) -> bool:
    """Whether a request's Host is this server: against DNS rebinding.

    A page of another site may lead a name of its own to 127.0.0.1, and then read what this server says.
    """
    name, _, told_port = host.strip().lower().partition(":")
    return name in {"127.0.0.1", "localhost"} and (told_port or "80") == str(port)


def cookie_name(port: int) -> str:
    """The cookie of this server. Browsers send cookies of one host to all its ports."""
    return f"sluice_desk_{port}"


def has_token(token: str, port: int, told: str | None, headers: Mapping[str, str]) -> bool:
    """Whether a request carries the token: in its address (`told`), as a bearer token, or as this page's cookie."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if told is None and scheme.lower() == "bearer":
        told = bearer.strip()
    if told is None:
        told = _cookie(headers.get("cookie", ""), cookie_name(port))
    return hmac.compare_digest(told.encode("utf-8", "replace"), token.encode())


def _cookie(header: str, name: str) -> str:
    # By hand: other servers of this machine have cookies in the same header, and `http.cookies` gives up at odd ones.
    pairs = (each.strip().partition("=") for each in header.split(";"))
    return next((value for each, _, value in pairs if each == name), "")
