"""Serves the page on this machine until Ctrl-C."""

import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

import uvicorn

from spark.desk.kept_tables import KeptWarehouse
from spark.engine.told_error import ToldError
from spark.page.access import TOKEN_BYTES, TOKEN_CHARACTERS_MIN
from spark.page.app import application

HOST: Final = "127.0.0.1"
END_S: Final = 1
"""Seconds that running requests have at the end before they are cut off."""
TOKEN: Final = re.compile(rf"[\w-]{{{TOKEN_CHARACTERS_MIN},200}}", re.ASCII)


class TokenError(ToldError):
    """A file holds no token. The message says what to write."""


def bound(port: int) -> socket.socket:
    """Take a port of this machine, 0 for a free one. Raises OSError."""
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((HOST, port))
        found.listen()
    except OSError:
        found.close()
        raise
    return found


def new_token() -> str:
    """Make a token that nobody guesses."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def kept_token(path: Path) -> str:
    """Return the token of a file, which is made if it is not there. Raises OSError and TokenError."""
    try:
        # Made as what it shall be: nobody else can read it for a moment.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(f"{new_token()}\n")
    except FileExistsError:
        pass
    token = path.read_text(encoding="utf-8", errors="replace").strip()
    if not TOKEN.fullmatch(token):
        raise TokenError(
            f"{path} holds no token: write {TOKEN_CHARACTERS_MIN} letters and digits or more, or delete the file"
        )
    return token


def serve(warehouse: KeptWarehouse, listening: socket.socket, token: str) -> None:
    """Serve until SIGINT, which is a clean end."""
    config = uvicorn.Config(
        application(warehouse, listening.getsockname()[1], token),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=END_S,
    )
    # It raises the signal anew after its end.
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([listening])
