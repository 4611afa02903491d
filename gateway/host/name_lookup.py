"""Looks names up without ever waiting for a look-up that hangs: one thread for each, bounded, and shared.

getaddrinfo cannot be ended. Where DNS is dead it takes up to (timeout x attempts x servers) seconds for the name and as
long again for the search domains: 5 s, 2 and 3 by default, which is longer than coming back may take once DNS answers
again. In asyncio's default executor such look-ups pile up, too, and keep everybody else from its threads. So:

- `bound_look_ups` has glibc ask again after 2 s, and so a look-up that is under way when DNS comes back meets it soon.
- Each look-up has a thread of its own, and whoever asks for the same name meanwhile joins it.
- Not every look-up is glibc's: systemd-resolved and mDNS have waits of their own. One that has lasted for
  `HANGING_S` is joined, and another is begun beside it; the first answer serves everybody. At most `UNDER_WAY_MAX` of
  a name and `THREADS_MAX` of all are under way, whatever happens.
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
"""resolv.conf(5): how long each server is waited for, and how often all of them are asked."""
HANGING_S: Final = 3.0
"""A look-up that lasts longer is not relied on: it may wait for a server that was there before DNS changed."""
UNDER_WAY_MAX: Final = 3
"""Look-ups of one name at a time."""
THREADS_MAX: Final = 32
"""Look-ups of all names at a time."""
KEPT_S: Final = 5.0
"""How long an answer that came when nobody waited any more serves who asks next: on a slow link that is every one."""

Address = tuple[socket.AddressFamily, socket.SocketKind, int, tuple[Any, ...]]
"""Family, kind, protocol and address, as a socket is made and connected."""


def bound_look_ups() -> None:
    """Have glibc ask DNS servers again soon. To be called before the first look-up; the environment's own wish counts.

    glibc reads /etc/resolv.conf anew when it changes, and then adds these options again.
    """
    os.environ.setdefault("RES_OPTIONS", RESOLVER_OPTIONS)


class NameLookup:
    """Look-ups of one process; `names` below is the one that everybody shares."""

    def __init__(self) -> None:
        self._under_way: defaultdict[tuple[str, int], list[_LookUp]] = defaultdict(list)
        self._lock = threading.Lock()

    async def addresses(self, host: str, port: int) -> list[Address]:
        """The addresses of a host, in the order in which they are to be tried. Raises OSError (socket.gaierror)."""
        try:
            return _look_up(host, port, socket.AI_NUMERICHOST)
        except socket.gaierror:
            pass  # a name, and none of an address
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
        """The look-ups of a name to wait for, with a new one where those under way may hang. Raises socket.gaierror."""
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
                    # Never begun, it would be waited for for ever; those that are under way may still answer.
                    if not look_ups:
                        raise socket.gaierror(socket.EAI_MEMORY, f"no thread for the look-up: {error}") from error
                else:
                    look_ups.append(look_up)
            return list(look_ups)

    def _forget(self, now_s: float) -> None:
        """Let go of names that nobody asks for any more."""
        for name, look_ups in list(self._under_way.items()):
            look_ups[:] = [look_up for look_up in look_ups if not look_up.answer.done() or look_up.is_left(now_s)]
            if not look_ups:
                del self._under_way[name]


class _LookUp(threading.Thread):
    """One call of getaddrinfo. A daemon thread: nobody waits at the process's end for a server that is not there."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name=f"look-up {host}", daemon=True)
        self.answer: Future[list[Address]] = Future()
        self.answer.set_running_or_notify_cancel()
        self.begun_s = self.ended_s = time.monotonic()
        self.served = False
        """Whether somebody had the answer."""
        self._wanted = host, port

    def is_left(self, now_s: float) -> bool:
        """Whether it has an answer that came when nobody waited any more, and lately."""
        done = self.answer.done() and self.answer.exception() is None
        return done and not self.served and now_s - self.ended_s < KEPT_S

    def run(self) -> None:
        """Ask, and give the answer."""
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
"""Of the whole process: a look-up outlives the session that began it, and the next one joins it."""
