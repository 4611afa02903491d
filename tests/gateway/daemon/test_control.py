"""The control socket: questions of commands to a running daemon, and who may not ask."""

import asyncio
import json
import socket
import stat
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.daemon import control
from gateway.daemon.control import ControlError, Handler, NotRunningError, RequestRefusedError, call, serve
from tests.support.waiting import patience, until


async def echo(arguments: dict[str, Any]) -> object:
    return arguments


async def broken(_arguments: dict[str, Any]) -> object:
    raise ValueError("no such thing")


async def for_ever(_arguments: dict[str, Any]) -> object:
    return await asyncio.Event().wait()


HANDLERS: Mapping[str, Handler] = {"echo": echo, "broken": broken, "for-ever": for_ever}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control"


@asynccontextmanager
async def serving(path: Path, handlers: Mapping[str, Handler] = HANDLERS) -> AsyncIterator[None]:
    task = asyncio.create_task(serve(path, handlers))
    try:
        await until_it_listens(path)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_it_listens(path: Path) -> None:
    async with asyncio.timeout(patience(5)):
        while True:
            try:
                await asyncio.to_thread(call, path, "nothing")
            except RequestRefusedError:
                return
            except ControlError:
                await asyncio.sleep(0.01)


async def ask(path: Path, command: str, **arguments: object) -> Any:
    return await asyncio.to_thread(call, path, command, **arguments)


async def raw(path: Path, request: bytes) -> dict[str, Any]:
    """Send bytes as they are; the answer."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(request)
        writer.write_eof()
        answer: dict[str, Any] = json.loads(await reader.readline())
        assert await reader.read() == b""
    finally:
        writer.close()
        await writer.wait_closed()
    return answer


async def test_a_command_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "buffer.db.control"
    async with serving(path):
        assert await ask(path, "echo", numbers=[1, 2], device="Küche") == {"numbers": [1, 2], "device": "Küche"}
        assert await raw(path, b'{"command": "echo"}\n') == {"result": {}}


async def test_only_its_user_may_ask_and_the_socket_is_gone_at_the_end(path: Path) -> None:
    async with serving(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
    with pytest.raises(NotRunningError):
        call(path, "echo")


async def test_a_failed_request_is_answered_with_its_error_and_the_daemon_goes_on(path: Path) -> None:
    async with serving(path):
        with pytest.raises(RequestRefusedError, match="no such thing"):
            await ask(path, "broken")
        with pytest.raises(RequestRefusedError, match="another version"):
            await ask(path, "unheard-of")
        for request in (b"", b"\n", b"nonsense\n", b'{"command": 1}\n', b"[]\n", b"[" * 60_000 + b"\n", b"\xff\n"):
            assert "this is not a request" in (await raw(path, request))["error"]
        assert await ask(path, "echo") == {}


async def test_a_request_has_a_largest_size(path: Path) -> None:
    async with serving(path):
        with pytest.raises(RequestRefusedError, match="at most 65536 bytes"):
            await ask(path, "echo", text="x" * 10_000_000)
        most = list(range(2**63 - control.NUMBERS_MAX, 2**63))
        assert await ask(path, "echo", numbers=most) == {"numbers": most}


async def test_who_says_nothing_is_let_go_and_keeps_nobody_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.2)
    async with serving(path):
        silent = [await asyncio.open_unix_connection(path) for _ in range(control.CLIENTS_MAX)]
        # All places are taken: this one waits until they are given up.
        assert await ask(path, "echo", text="still here") == {"text": "still here"}
        for reader, writer in silent:
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()


async def test_many_at_once_are_all_answered(path: Path) -> None:
    async with serving(path):
        answers = await asyncio.gather(*(ask(path, "echo", number=number) for number in range(2 * control.CLIENTS_MAX)))
    assert [answer["number"] for answer in answers] == list(range(2 * control.CLIENTS_MAX))


async def test_an_answer_that_does_not_come_is_not_waited_for_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ANSWER_TIMEOUT_S", 0.1)
    async with serving(path):
        with pytest.raises(RequestRefusedError, match="it may still be done"):
            await ask(path, "for-ever")


async def test_an_answer_that_comes_byte_by_byte_without_end_is_not_waited_for(path: Path) -> None:
    ended = asyncio.Event()

    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        ended.set()

    async with await asyncio.start_unix_server(drip, path):
        with pytest.raises(ControlError, match="does not answer"):
            await asyncio.wait_for(asyncio.to_thread(call, path, "state", 0.2), patience(20))
        await ended.wait()


async def test_a_daemon_that_stops_while_it_is_asked_leaves_no_client_hanging(path: Path) -> None:
    async with serving(path):
        asked = asyncio.create_task(ask(path, "for-ever"))
        await asyncio.sleep(0.1)
    with pytest.raises(ControlError, match="does not answer"):
        await asked


async def test_the_socket_of_a_killed_daemon_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotRunningError):
        call(path, "echo")
    async with serving(path):
        assert await ask(path, "echo") == {}


async def test_a_request_that_comes_early_is_answered_once_the_commands_are_complete(tmp_path: Path) -> None:
    path, commands, complete = tmp_path / "control", dict[str, Handler](), asyncio.Event()
    task = asyncio.create_task(serve(path, commands, complete))
    await until(path.exists)
    asked = asyncio.create_task(asyncio.to_thread(call, path, "echo", word="early"))
    await asyncio.sleep(0.05)
    commands.update(HANDLERS)
    complete.set()
    assert await asked == {"word": "early"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_another_file_of_that_name_is_left_alone_until_it_is_gone(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "REOPEN_INTERVAL_S", 0.05)
    path.write_text("somebody's")
    task = asyncio.create_task(serve(path, HANDLERS))
    said = ""

    def is_told() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "no control socket" in said

    try:
        await until(is_told)
        await asyncio.sleep(0.2)
        assert path.read_text() == "somebody's"
        # Said once, although it is tried again and again.
        assert is_told()
        assert said.count("no control socket") == 1
        path.unlink()
        await until_it_listens(path)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_socket_that_took_its_name_is_not_removed(path: Path) -> None:
    async with serving(path):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as another:
            another.bind(str(path))
    assert path.exists()


async def test_a_path_too_long_for_a_socket_address_works_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 60) / ("e" * 60)
    folder.mkdir(parents=True)
    path = folder / "buffer.db.control"
    assert len(str(path)) > 107
    descriptors = open_descriptors()
    async with serving(path):
        assert path.is_socket()
        assert await ask(path, "echo", far="away") == {"far": "away"}
    assert not path.exists()
    assert open_descriptors() == descriptors


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_name_too_long_for_any_address_is_told_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match=r"buffer\.path: the file's name"):
        call(tmp_path / ("x" * 200), "echo")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=200).filter(lambda line: b"\n" not in line), max_size=5))
def test_whatever_is_sent_is_answered_in_one_line(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    async def send_all() -> None:
        path = tmp_path_factory.mktemp("fuzz") / "control"
        async with serving(path):
            for line in lines:
                assert set(await raw(path, line + b"\n")) <= {"result", "error"}

    asyncio.run(send_all())
