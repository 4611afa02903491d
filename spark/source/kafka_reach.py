"""Checks that Kafka can be reached before Spark tries it: Spark would take minutes to fail."""

import socket

CONNECT_S_MAX = 5.0


def unreachable(bootstrap: str) -> str | None:
    """Say why no broker accepts a connection; None if one does. `bootstrap` is host:port, several with commas."""
    reasons = []
    for address in bootstrap.split(","):
        host, _, port = address.strip().rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            reasons.append(f"{address.strip()!r} is no address: write it with its port, as in kafka.example:9092")
            continue
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S_MAX).close()
        except OSError as error:
            reasons.append(f"{address.strip()}: {error.strerror or error}")
        except UnicodeError:
            reasons.append(f"{host!r} is no host's name")
        else:
            return None
    return "; ".join(reasons)
