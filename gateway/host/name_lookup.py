"""Looks up host names, each in a thread of its own, so that nobody waits for a look-up that hangs.

getaddrinfo cannot be ended. If DNS is dead, it takes up to (timeout x attempts x servers) seconds for the name, and as
long again for the search domains. By default these are 5 s, 2 and 3: longer than coming back may take once DNS answers
again. In asyncio's default executor such look-ups would pile up and take all threads. So:

- `bound_look_ups` makes glibc ask again after 2 s. A look-up that is under way when DNS comes back then succeeds soon.
- Each look-up has a thread of its own. Whoever asks for the same name meanwhile joins it.
- systemd-resolved and mDNS have waits of their own. If a look-up has lasted for `HANGING_S`, another is begun beside
  it, and the first answer serves everybody. At most `UNDER_WAY_MAX` look-ups of one name, and `THREADS_MAX` of all
  names, are under way.
"""

import asyncio
import os
import socket
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from typing import Any, Final

RESOLVER_OPTIONS: Final = "timeout:2 attempts:2"
"""Options of resolv.conf(5): seconds to wait for each server, and how often all servers are asked."""
HANGING_S: Final = 3.0
"""Seconds after which a look-up may hang, such as on a server from before DNS changed."""
UNDER_WAY_MAX: Final = 3
"""Look-ups of one name at a time."""
THREADS_MAX: Final = 32
"""Look-ups of all names at a time."""
KEPT_S: Final = 5.0
"""Seconds that an answer which came too late serves the next caller: on a slow link every answer comes too late."""

Address = tuple[socket.AddressFamily, socket.SocketKind, int, tuple[Any, ...]]
"""Family, kind, protocol and address, for making and connecting a socket."""


def bound_look_ups() -> None:
    """Make glibc ask DNS servers again soon. Call it before the first look-up. RES_OPTIONS of the environment wins.

    glibc reads /etc/resolv.conf anew when it changes, and then adds these options again.
    """
    os.environ.setdefault("RES_OPTIONS", RESOLVER_OPTIONS)


class NameLookup:
    """Look-ups of one process. Everybody shares the instance `names`."""

    def __init__(self) -> None:
        self._under_way: defaultdict[tuple[str, int], list[_LookUp]] = defaultdict(list)
        self._lock = threading.Lock()

    async def addresses(self, host: str, port: int) -> list[Address]:
        """Return a host's addresses, in the order in which to try them. Raises OSError (socket.gaierror)."""
        try:
            return _look_up(host, port, socket.AI_NUMERICHOST)
        except socket.gaierror:
            pass  # a name, not an address
        look_ups = {asyncio.wrap_future(look_up.answer): look_up for look_up in self._joined(host, port)}
        if not look_ups:
            raise socket.gaierror(socket.EAI_AGAIN, "too many look-ups are under way")
        waiting = set(look_ups)
        failures: list[BaseException] = []
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                failures += [failure for answer in done if (failure := answer.exception()) is not None]
                for answer in done:
                    if answer.exception() is None:
                        look_ups[answer].served = True
                        return answer.result()
            raise failures[0]
        finally:
            for answer in waiting:
                answer.cancel()

    def _joined(self, host: str, port: int) -> "list[_LookUp]":
        """Return a name's look-ups to wait for, with a new one if those under way may hang. Raises socket.gaierror."""
        now_s = time.monotonic()
        with self._lock:
            self._forget(now_s)
            total = sum(len(look_ups) for look_ups in self._under_way.values())
            look_ups = self._under_way[host, port]
            left = [look_up for look_up in look_ups if look_up.is_left(now_s)]
            if left:
                return left
            look_ups[:] = [look_up for look_up in look_ups if not look_up.answer.done()]
            if all(now_s - look_up.begun_s >= HANGING_S for look_up in look_ups) and (
                len(look_ups) < UNDER_WAY_MAX and total < THREADS_MAX
            ):
                look_up = _LookUp(host, port)
                try:
                    look_up.start()
                except (RuntimeError, MemoryError) as error:
                    # A thread that never began never answers; look-ups that are under way still may.
                    if not look_ups:
                        raise socket.gaierror(socket.EAI_MEMORY, f"no thread for the look-up: {error}") from error
                else:
                    look_ups.append(look_up)
            return list(look_ups)

    def _forget(self, now_s: float) -> None:
        """Drop look-ups that are done and that nobody will use."""
        for name, look_ups in list(self._under_way.items()):
            look_ups[:] = [look_up for look_up in look_ups if not look_up.answer.done() or look_up.is_left(now_s)]
            if not look_ups:
                del self._under_way[name]


class _LookUp(threading.Thread):
    """One call of getaddrinfo. As a daemon thread it does not delay the end of the process."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name=f"look-up {host}", daemon=True)
        self.answer: Future[list[Address]] = Future()
        self.answer.set_running_or_notify_cancel()
        self.begun_s = self.ended_s = time.monotonic()
        self.served = False
        """Whether somebody got the answer."""
        self._wanted = host, port

    def is_left(self, now_s: float) -> bool:
        """Whether it has a recent answer that nobody has got."""
        done = self.answer.done() and self.answer.exception() is None
        return done and not self.served and now_s - self.ended_s < KEPT_S

    def run(self) -> None:
        """Look the name up, and set the answer or the failure."""
        try:
            found = _look_up(*self._wanted, 0)
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits must be told
            self.ended_s = time.monotonic()
            self.answer.set_exception(error)
        else:
            self.ended_s = time.monotonic()
            self.answer.set_result(found)


def _look_up(host: str, port: int, flags: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, kind, protocol, address) for family, kind, protocol, _, address in found]


names: Final = NameLookup()
"""Look-ups of the whole process. A look-up outlives the caller that began it, and the next caller joins it."""
