"""The control channel: a Unix socket beside the buffer file, by which commands ask the running daemon.

A client sends one JSON line, `{"command": ..., "arguments": {...}}`. It gets one back, `{"result": ...}` or
`{"error": "words"}`, and the connection ends. Only the daemon's own user and root may connect.
"""

import asyncio
import json
import os
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import structlog
from msgspec import Meta, Struct

from gateway.clock.kernel_clock import boottime_us

if TYPE_CHECKING:
    from gateway.buffer.buffer import Buffer
    from gateway.clock.report import ClockView
    from gateway.config.running_settings import RunningSettings
    from gateway.intake.front_door import FrontDoor
    from gateway.uplink.state import UplinkState

CLIENTS_MAX = 8
"""Clients answered at a time. As many more can wait in the socket's queue."""
REQUEST_BYTES_MAX = 65_536
RESPONSE_BYTES_MAX = 4_000_000
REQUEST_TIMEOUT_S = 10.0
"""Seconds that a client may take to send its request, and again to take in the answer."""
ANSWER_TIMEOUT_S = 60.0
"""Seconds that the daemon may take for an answer: a full disk may keep a commit waiting."""
REOPEN_INTERVAL_S = 30.0
"""Seconds until the daemon tries again to make its socket: a read-only disk may come back."""
NUMBERS_MAX = 1_000
"""Numbers of quarantined input in one request."""
FAULTS_TOLD_MAX = 100
"""Devices of each kind of fault that `state` names because their payloads are not what their routes declare."""
_ADDRESS_BYTES_MAX = 107
"""Bytes of `sun_path` in unix(7), without the terminating null."""

T = TypeVar("T")
Handler = Callable[[dict[str, Any]], Awaitable[object]]

log = structlog.get_logger()


class ControlError(Exception):
    """A request was not answered, or was refused. The message says why and what to do."""


class NotRunningError(ControlError):
    """Nobody listens at the control socket."""


class RequestRefusedError(ControlError):
    """The daemon answered with an error. Handlers raise it, and `call` raises it for the command that asked."""


class _Request(Struct, forbid_unknown_fields=True):
    command: str
    arguments: dict[str, Any] = {}


class _Check(Struct, forbid_unknown_fields=True):
    user: str
    patience_s: Annotated[float, Meta(ge=0, le=30)] = 0.0


class _Numbers(Struct, forbid_unknown_fields=True):
    numbers: Annotated[list[Annotated[int, Meta(ge=1, le=2**63 - 1)]], Meta(max_length=NUMBERS_MAX)]


def socket_path(buffer_path: Path) -> Path:
    """Path at which the daemon of a buffer listens."""
    return buffer_path.with_name(buffer_path.name + ".control")


# -- the daemon's side ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Further parts of the daemon's state. Each request calls each of them. None stands for a part not configured."""

    uplink: "Callable[[], UplinkState]"
    clock: "Callable[[], ClockView]"
    settings: "Callable[[], RunningSettings]"
    mqtt_listener: Callable[[], dict[str, int]] | None = None
    """Counts of the MQTT listener, by reason."""
    logins: Callable[[], dict[str, Any]] | None = None
    log_ins_refused: Callable[[], list[dict[str, Any]]] | None = None
    mqtt_brokers: Callable[[], dict[str, Any]] | None = None
    serial: Callable[[], dict[str, Any]] | None = None
    commands: Callable[[], dict[str, Any]] | None = None
    """Commands from the cloud."""

    def states(self) -> dict[str, object]:
        """Return the state of each part, by name."""
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: part() for name, part in parts.items() if part is not None}


def handlers(front_door: "FrontDoor", buffer: "Buffer", parts: Parts | None = None) -> dict[str, Handler]:
    """Return the daemon's handlers, by command.

    They serve `state` (with `parts`), `devices`, changes of the quarantine, and test readings of `sluice check`.
    """
    began_us = boottime_us()

    async def state(_arguments: dict[str, Any]) -> object:
        states = {} if parts is None else parts.states()
        counts = {**buffer.counts, **front_door.counts}
        last = front_door.counted_last
        lost = front_door.events.lost_told.total()
        return {
            "buffer": buffer.state,
            "usage": buffer.usage,
            "counts": counts,
            "counted_last": last,
            "payload_faults": front_door.heard.last_faults(FAULTS_TOLD_MAX),
            "lost_told": lost,
            "lost_told_us": front_door.events.lost_told_us,
            "up_s": (boottime_us() - began_us) / 1e6,
            **states,
        }

    async def devices(arguments: dict[str, Any]) -> object:
        # Imported on use: commands import this module too, and need none of it.
        from gateway.daemon.device_states import DevicesAsked, devices_page  # noqa: PLC0415

        asked = _converted(arguments, DevicesAsked)
        lost = front_door.events.lost_told
        return await devices_page(asked, front_door.heard, front_door.clocks, boottime_us(), lost)

    async def quarantine_retry(arguments: dict[str, Any]) -> object:
        from gateway.intake.quarantine_retry import retry_quarantined  # noqa: PLC0415

        return await retry_quarantined(front_door, buffer, _numbers(arguments))

    async def quarantine_drop(arguments: dict[str, Any]) -> object:
        numbers = _numbers(arguments)
        return {"dropped": await buffer.transact(lambda file: file.lose_quarantined(numbers))}

    async def check_open(_arguments: dict[str, Any]) -> object:
        return front_door.checks.open()

    async def check_enter(arguments: dict[str, Any]) -> object:
        reading = front_door.checks.reading_of(_converted(arguments, _Check).user)
        if reading is None:
            raise RequestRefusedError("there is no such test reading: begin the check anew")
        if front_door.cannot_store:
            # The reading would wait for room, for as long as that takes.
            return {"stored": False}
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        # The command that waits may be gone by then.
        front_door.take([reading], lambda is_stored: None if stored.done() else stored.set_result(is_stored))
        return {"stored": await stored}

    async def check_place(arguments: dict[str, Any]) -> object:
        asked = _converted(arguments, _Check)
        return await front_door.checks.place_of(asked.user, asked.patience_s)

    return {
        "state": state,
        "check-open": check_open,
        "check-enter": check_enter,
        "check-place": check_place,
        "devices": devices,
        "quarantine-retry": quarantine_retry,
        "quarantine-drop": quarantine_drop,
    }


def _numbers(arguments: dict[str, Any]) -> list[int]:
    return _converted(arguments, _Numbers).numbers


def _converted(arguments: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise RequestRefusedError(f"the request cannot be taken: {error}") from error


async def serve(path: Path, commands: Mapping[str, Handler], complete: asyncio.Event | None = None) -> None:
    """Answer requests at `path` until cancelled, then remove the socket. For the pipeline's TaskGroup.

    A client that asks before `commands` are `complete` waits until they are.

    The caller holds the buffer's lock. So a socket that is there already is a dead daemon's, and is replaced. If the
    socket cannot be made, the gateway goes on without it, logs this once, and tries again (promise P9).
    """
    said = ""
    while True:
        try:
            listener = _listen(path)
        except OSError as error:
            if str(error) != said:
                said = str(error)
                log.warning(
                    "no control socket: `sluice buffer quarantine retry` and `drop` cannot reach this gateway",
                    path=str(path),
                    error=said,
                )
            await asyncio.sleep(REOPEN_INTERVAL_S)
            continue
        with _named(listener, path):
            if complete is not None:
                await complete.wait()
            await _accept(listener, commands)


@contextmanager
def _named(listener: socket.socket, path: Path) -> Iterator[None]:
    """Close a listening socket at the end, and remove its name unless another socket has it by then."""
    ours = path.stat().st_ino
    try:
        yield
    finally:
        listener.close()
        with suppress(OSError):
            if path.stat().st_ino == ours:
                path.unlink()


def _listen(path: Path) -> socket.socket:
    """Make a listening socket at `path` that only this user may connect to. Raises OSError."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(f"{path} is there and is no socket: move it away")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # Linux gives the file the mode of the socket, so there is no moment at which others may connect.
        os.fchmod(listener.fileno(), 0o600)
        with _address(path) as address:
            listener.bind(address)
        listener.listen(CLIENTS_MAX)
    except BaseException:
        listener.close()
        raise
    return listener


async def _accept(listener: socket.socket, commands: Mapping[str, Handler]) -> None:
    loop = asyncio.get_running_loop()
    free = asyncio.Semaphore(CLIENTS_MAX)
    async with asyncio.TaskGroup() as clients:
        while True:
            await free.acquire()
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Such as too many open files: the sensors have them, and come first.
                log.warning("a command could not be let in", error=str(error))
                free.release()
                await asyncio.sleep(1)
                continue
            task = clients.create_task(_serve_client(client, commands), name="control-client")
            task.add_done_callback(lambda _: free.release())


async def _serve_client(client: socket.socket, commands: Mapping[str, Handler]) -> None:
    """Read one request, answer it, close. A client's mistake harms only that client."""
    reader, writer = await asyncio.open_unix_connection(sock=client, limit=REQUEST_BYTES_MAX)
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            try:
                line = await reader.readline()
            except ValueError:
                line = None
        answer = (
            {"error": f"a request is at most {REQUEST_BYTES_MAX} bytes"}
            if line is None
            else await _answer(line, commands)
        )
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            writer.write(msgspec.json.encode(answer) + b"\n")
            await writer.drain()
    except (OSError, TimeoutError) as error:
        log.debug("a command went away", error=str(error))
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _answer(line: bytes, commands: Mapping[str, Handler]) -> dict[str, object]:
    try:
        request = msgspec.json.decode(line, type=_Request)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return {"error": f"this is not a request: {error}"}
    handler = commands.get(request.command)
    if handler is None:
        return {"error": f"this gateway knows no command {request.command!r}: is it of another version?"}
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return {"result": msgspec.to_builtins(await handler(request.arguments))}
    except TimeoutError:
        return {"error": f"no answer within {ANSWER_TIMEOUT_S:.0f} s; it may still be done: is the buffer full?"}
    except Exception as error:  # noqa: BLE001 - the client gets the error, whatever it is, and the daemon goes on
        if not isinstance(error, RequestRefusedError):
            log.warning("a command failed", command=request.command, error=str(error) or type(error).__name__)
        return {"error": str(error) or type(error).__name__}


# -- the commands' side ---------------------------------------------------------------------------


def call(path: Path, command: str, timeout_s: float | None = None, /, **arguments: object) -> Any:
    """Ask the daemon that listens at `path`, and return its result. Its whole answer comes within `timeout_s`.

    Raises NotRunningError if nobody listens, RequestRefusedError with the daemon's own words, and ControlError if this
    user may not ask, or if no answer comes.
    """
    request = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        patience_s = timeout_s or ANSWER_TIMEOUT_S + REQUEST_TIMEOUT_S
        until_s = time.monotonic() + patience_s
        channel.settimeout(patience_s)
        try:
            with _address(path) as address:
                channel.connect(address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotRunningError(f"no gateway listens at {path}") from error
        except OSError as error:
            raise ControlError(
                f"the gateway at {path} cannot be asked ({error.strerror or error}): "
                "run this with sudo, or as the user that sluice runs as"
            ) from error
        try:
            # A daemon that refuses a request for its size answers before it has read all of it.
            with suppress(BrokenPipeError):
                channel.sendall(request)
            line = _line(channel, until_s)
        except OSError as error:
            raise ControlError(
                f"the gateway at {path} does not answer ({error}); it may be done all the same"
            ) from error
    answer = json.loads(line)
    if "error" in answer:
        raise RequestRefusedError(answer["error"])
    return answer["result"]


def state_of(buffer: Path) -> dict[str, Any]:
    """Return the state of the daemon with this buffer; empty if none runs, or if it does not answer."""
    try:
        state: dict[str, Any] = call(socket_path(buffer), "state")
    except ControlError:
        return {}
    return state


def _line(channel: socket.socket, until_s: float) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        # Each byte would have its own patience otherwise.
        if (left_s := until_s - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        channel.settimeout(left_s)
        chunk = channel.recv(65_536)
        if not chunk:
            raise ConnectionError("it closed the connection")
        received += chunk
        if len(received) > RESPONSE_BYTES_MAX:
            raise ConnectionError("its answer has no end")
    return bytes(received)


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield an address to bind or connect to: the path, or a short way to it if it is too long for unix(7)."""
    if len(os.fsencode(path)) <= _ADDRESS_BYTES_MAX:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        address = f"/proc/self/fd/{folder}/{path.name}"
        if len(os.fsencode(address)) > _ADDRESS_BYTES_MAX:
            raise OSError(f"buffer.path: the file's name ({len(path.name)} characters) is too long for a socket's")
        yield address
    finally:
        os.close(folder)
