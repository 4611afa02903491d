"""Sends messages to systemd about the state of a service (sd_notify(3))."""

import os
import socket
from contextlib import suppress


def notify(*assignments: str) -> bool:
    """Send `READY=1` and the like, and return whether it was taken. Never waits for systemd."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    # systemd writes the abstract namespace with an @.
    name = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        # If systemd reads nothing for a while, its queue is full: readings must not wait for that.
        channel.setblocking(False)
        channel.sendto("\n".join(assignments).encode(), name)
        return True
    return False
