"""An SD card for qemu that loses what was not flushed, torn by sectors, when its power is cut.

To kill qemu alone loses nothing: the host keeps whatever the guest has handed over. This is a server of the network
block device protocol (github.com/NetworkBlockDevice/nbd, doc/proto.md) in a process of its own, which ends with the
power.
"""

import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

SECTOR = 512
_READ, _WRITE, _DISCONNECT, _FLUSH = range(4)
_EXPORT_NAME, _ABORT, _INFO, _GO = 1, 2, 6, 7
_FUA = 1
_FLAGS = 1 | 4 | 8
"""The export has flags, takes FLUSH, and takes FUA."""
_EINVAL = 22
_REPLY = 0x3E889045565A9
_SIMPLE_REPLY = 0x67446698


@dataclass
class ForgetfulDisk:
    """A file with what was flushed, and sectors in doubt."""

    file: int
    doubtful: dict[int, bytes] = field(default_factory=dict)
    """Sectors that were written and not flushed, by number."""

    def read(self, at: int, count: int) -> bytes:
        found = bytearray(os.pread(self.file, count, at))
        for number in range(count // SECTOR if self.doubtful else 0):
            newer = self.doubtful.get(at // SECTOR + number)
            if newer is not None:
                found[number * SECTOR : (number + 1) * SECTOR] = newer
        return bytes(found)

    def write(self, at: int, data: bytes, *, through: bool = False) -> None:
        """Write whole sectors; `through` to the card at once."""
        for offset in range(0, len(data), SECTOR):
            self.doubtful[(at + offset) // SECTOR] = data[offset : offset + SECTOR]
        if through:
            for number in range(at // SECTOR, (at + len(data)) // SECTOR):
                os.pwrite(self.file, self.doubtful.pop(number), number * SECTOR)

    def flush(self) -> None:
        for number, data in self.doubtful.items():
            os.pwrite(self.file, data, number * SECTOR)
        self.doubtful.clear()

    def cut(self, chance: random.Random) -> tuple[int, int]:
        """Lose the power: of the sectors in doubt some are kept. Returns how many were in doubt, and how many kept."""
        share, kept = chance.choice([0.0, 0.3, 0.7, 1.0]), 0
        for number, data in sorted(self.doubtful.items()):
            if chance.random() < share:
                os.pwrite(self.file, data, number * SECTOR)
                kept += 1
        doubtful = len(self.doubtful)
        self.doubtful.clear()
        return doubtful, kept


def _exactly(channel: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        chunk = channel.recv(count - len(received))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)


def _agree(channel: socket.socket, size: int) -> bool:
    """Go through the handshake; whether the client wants the disk."""
    channel.sendall(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3))
    _exactly(channel, 4)
    while True:
        _, option, length = struct.unpack(">8sII", _exactly(channel, 16))
        _exactly(channel, length)
        if option == _EXPORT_NAME:
            channel.sendall(struct.pack(">QH", size, _FLAGS))
            return True
        if option in {_INFO, _GO}:
            about = struct.pack(">HQH", 0, size, _FLAGS)
            channel.sendall(struct.pack(">QIII", _REPLY, option, 3, len(about)) + about)
            channel.sendall(struct.pack(">QIII", _REPLY, option, 1, 0))
            if option == _GO:
                return True
        elif option == _ABORT:
            return False
        else:
            channel.sendall(struct.pack(">QIII", _REPLY, option, 0x80000001, 0))


def _serve(channel: socket.socket, disk: ForgetfulDisk) -> None:
    while True:
        _, flags, kind, handle, at, count = struct.unpack(">IHHQQI", _exactly(channel, 28))
        answer, error = b"", 0
        if kind == _READ:
            answer = disk.read(at, count)
        elif kind == _WRITE:
            disk.write(at, _exactly(channel, count), through=bool(flags & _FUA))
        elif kind == _FLUSH:
            disk.flush()
        elif kind == _DISCONNECT:
            disk.flush()
            return
        else:
            error = _EINVAL
        channel.sendall(struct.pack(">IIQ", _SIMPLE_REPLY, error, handle) + answer)


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _main(image: str, address: str, seed: str) -> None:
    disk = ForgetfulDisk(os.open(image, os.O_RDWR))

    def cut(*_: object) -> NoReturn:
        doubtful, kept = disk.cut(random.Random(seed))  # noqa: S311 - drawn again by its seed
        _say(f"{doubtful} {kept}")
        os._exit(0)

    signal.signal(signal.SIGTERM, cut)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        _say("ready")
        while True:
            channel, _ = server.accept()
            try:
                if _agree(channel, os.fstat(disk.file).st_size):
                    _serve(channel, disk)
            except (EOFError, ConnectionError):
                continue


class PoweredCard:
    """A card in its reader, until its power is cut."""

    def __init__(self, server: "subprocess.Popen[str]", address: Path) -> None:
        self._server = server
        self.drive = f"nbd:unix:{address}"
        """The card's name for `-drive file=`."""

    def cut(self) -> tuple[int, int]:
        """Cut the power. Returns how many sectors were in doubt, and how many of them were kept."""
        assert self._server.stdout is not None
        self._server.terminate()
        doubtful, kept = map(int, self._server.stdout.readline().split())
        self._server.wait()
        return doubtful, kept


@contextmanager
def powered(image: Path, seed: int) -> Iterator[PoweredCard]:
    """A card with power for the length of a `with`, which ends in an orderly way unless it was cut."""
    address = image.with_suffix(f".{seed}.socket")
    address.unlink(missing_ok=True)
    command = [sys.executable, __file__, str(image), str(address), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield PoweredCard(server, address)
        finally:
            server.kill()


if __name__ == "__main__":
    _main(*sys.argv[1:])
