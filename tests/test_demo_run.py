import sys
from pathlib import Path

import pytest

from demo.children import Child, Children, DemoError
from demo.run import JsonLines


def test_lines_are_read_as_they_come_and_only_when_they_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path)
    assert lines.new() == []
    with path.open("a") as file:
        file.write('{"batch": 1}\nnot JSON\n{"batch"')
        file.flush()
        assert lines.new() == [{"batch": 1}]
        assert lines.new() == []
        file.write(": 2}\n")
        file.flush()
        assert lines.new() == [{"batch": 2}]


async def test_a_child_that_must_run_and_ended_is_told_with_its_log(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = children.start("worker", [sys.executable, "-c", "print('out of paper'); exit(3)"], "Add paper.")
        child.process.wait(10)
        with pytest.raises(DemoError, match="worker ended with exit code 3") as error:
            children.check()
        assert error.value.advice == "Add paper."
        assert error.value.log == tmp_path / "worker.log"
        assert child.log.read_text() == "out of paper\n"


async def test_a_child_that_was_stopped_is_not_missed(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = children.start("worker", ["sleep", "60"], "")
        children.check()
        assert await children.stop(child) == -15
        children.check()


async def test_a_child_that_does_not_end_in_time_is_left_to_the_caller(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = children.start("worker", ["sleep", "60"], "")
        assert await children.finish(child, patience_s=0.1) is None
        assert child.process.poll() is None


async def test_leaving_stops_all_children_whatever_happened(tmp_path: Path) -> None:
    started: list[Child] = []

    async def fail() -> None:
        async with Children(tmp_path) as children:
            started.extend(children.start(name, ["sleep", "60"], "") for name in ("one", "two"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert [child.process.returncode for child in started] == [-15, -15]
