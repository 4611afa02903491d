"""Whether Kafka can be reached, asked before Spark is: Spark takes minutes to say that it cannot."""

import socket

CONNECT_S_MAX = 5.0


def unreachable(bootstrap: str) -> str | None:
    """Why none of the brokers answers a connection; None where one does. `bootstrap` is host:port, with commas."""
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
