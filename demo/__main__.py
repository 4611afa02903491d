"""`python -m demo`: runs the whole line on one machine, with an outage in the middle and an audit at the end."""

import asyncio
import fcntl
import os
import shutil
import signal
import sys
from pathlib import Path

from rich.console import Console

from demo import child_process, fleet_evidence
from demo.children import DemoError
from demo.demo_settings import DemoSettings, DemoSettingsError, demo_settings
from demo.evidence import conclude
from demo.fleet_run import rolled_out
from demo.kafka_broker import BrokerError
from demo.progress import Progress
from demo.run import Folder, measured_run

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as a shell reports it."""
FOLDER = Path("build") / "demo"


def main() -> int:
    """Run the demo, and return the exit code."""
    try:
        settings = demo_settings(os.environ)
    except DemoSettingsError as error:
        print(error, file=sys.stderr)
        return WRONG_USAGE
    folder = Folder(FOLDER.resolve())
    folder.root.parent.mkdir(parents=True, exist_ok=True)
    with folder.root.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Another demo is running in {folder.root}: let it end, or stop it with Ctrl-C.", file=sys.stderr)
            return FAILED
        try:
            if folder.root.exists():
                shutil.rmtree(folder.root)
            folder.logs.mkdir(parents=True)
        except OSError as error:
            print(f"The last run's files cannot be removed: {error}. Remove {folder.root}.", file=sys.stderr)
            return FAILED
        return _run(settings, folder)


def _run(settings: DemoSettings, folder: Folder) -> int:
    with Progress(Console()) as progress:
        progress.note(f"{settings.in_words()}; Ctrl-C stops it all at any time")
        try:
            return asyncio.run(_run_until_stopped(settings, folder, progress))
        except asyncio.CancelledError:
            progress.console.print("Stopped, as asked; nothing is left running.", style="yellow")
            return INTERRUPTED
        except (DemoError, BrokerError, ExceptionGroup) as error:
            _explain(error, progress.console)
            return FAILED


async def _run_until_stopped(settings: DemoSettings, folder: Folder, progress: Progress) -> int:
    """Run. SIGINT or SIGTERM stops what was started; a second signal does not disturb the stopping."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - a coroutine always runs in one

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: None)
        progress.note("stopping everything that was started")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if settings.fleet:
        async with rolled_out(settings, folder, progress) as fleet:
            return 0 if await fleet_evidence.conclude(fleet) else FAILED
    async with measured_run(settings, folder, progress) as run:
        return 0 if await conclude(run) else FAILED


def _explain(error: BaseException, console: Console) -> None:
    """Say what went wrong, what the log says, and what to do. An unforeseen error is raised again."""
    if isinstance(error, BaseExceptionGroup):
        known, unknown = error.split((DemoError, BrokerError))
        if unknown is not None or known is None:
            raise error
        error = known.exceptions[0]
        if isinstance(error, BaseExceptionGroup):
            _explain(error, console)
            return
    words = str(error).removesuffix(".")
    console.print(f"The demo failed: {words}.", style="bold red", markup=False, highlight=False, soft_wrap=True)
    if isinstance(error, DemoError):
        if error.log is not None:
            console.print(f"The last lines of {error.log}:", markup=False, soft_wrap=True)
            console.print(
                child_process.log_tail(error.log) or "(it is empty)", style="dim", markup=False, soft_wrap=True
            )
        console.print(error.advice, markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
