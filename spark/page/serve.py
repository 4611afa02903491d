"""Serves the page on this machine until Ctrl-C."""

import secrets
import socket
from contextlib import suppress
from typing import Final

import uvicorn

from spark.desk.kept_tables import KeptWarehouse
from spark.page.access import TOKEN_BYTES
from spark.page.app import application

HOST: Final = "127.0.0.1"
END_S: Final = 1
"""Seconds that running requests have at the end before they are cut off."""


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
