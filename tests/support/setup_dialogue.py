"""`sluice setup` and `sluice reset` at a real terminal: what they ask, what is typed, and what came of it."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect

SLUICE = Path(sys.executable).with_name("sluice")
PROMPT = " > "
QUESTION = re.compile(r"^Question (\d): (.*?)\r?$", re.MULTILINE)
PATIENCE_S = 60
ANYWAY = r"Keep this answer anyway\? \[y/N\]: "
TLS = r"Does it speak TLS\? \[(?:Y/n|y/N)\]: "
CLOCK = r'\(clock = "system"\)\? \[y/N\]: '
ENTER = ""
CTRL_C = "\x03"


class Terminal:
    """A command at a pseudo-terminal."""

    def __init__(self, child: Any) -> None:
        self._child = child
        self.text = ""

    def until(self, pattern: str) -> str:
        """Wait for something to be shown; gives what came before it since the last time.

        Of what is asked beside the questions, and not everywhere, nothing but the pattern is waited for: Enter takes
        what is proposed.
        """
        shown = ""
        while True:
            is_aside = self._child.expect([pattern, TLS, CLOCK]) > 0
            shown = f"{shown}{self._child.before}{self._child.after}"
            if not is_aside:
                break
            self.type(ENTER)
        self.text += shown
        return shown

    def type(self, words: str) -> None:
        self._child.sendline(words)

    def press(self, key: str) -> None:
        self._child.send(key)

    def answer(self, words: str) -> str:
        """Answer the next prompt; gives what was shown up to it."""
        shown = self.until(PROMPT)
        self.type(words)
        return shown

    def end(self) -> int:
        """Wait for the command to end: its exit code."""
        self._child.expect(pexpect.EOF)
        self.text += self._child.before
        self._child.close()
        code: int = self._child.exitstatus
        return code


@contextmanager
def at_a_terminal(
    *arguments: str | Path, program: Sequence[str] = (str(SLUICE),), environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """A command of sluice's at a terminal of 100 columns; killed at the end unless it ended before."""
    first, *before = program
    child = pexpect.spawn(
        first,
        [*before, *map(str, arguments)],
        env=environment,
        encoding="utf-8",
        timeout=PATIENCE_S,
        dimensions=(50, 100),
    )
    try:
        yield Terminal(child)
    finally:
        child.close(force=True)


def questions_asked(text: str) -> list[str]:
    """The questions that a setup asked, in their order; one that was asked again counts once."""
    return [found[2] for found in QUESTION.finditer(text)]


def set_up(
    config: Path,
    answers: Sequence[str],
    program: Sequence[str] = (str(SLUICE),),
    environment: Mapping[str, str] | None = None,
) -> tuple[str, int]:
    """Go through a whole setup, with an answer for each prompt; what was shown, and the exit code.

    For benches too: `questions_asked` of what was shown says how many there were.
    """
    with at_a_terminal("setup", "--config", config, program=program, environment=environment) as terminal:
        for answer in answers:
            terminal.until(f"{PROMPT}|{ANYWAY}")
            terminal.type(answer)
        code = terminal.end()
        return terminal.text, code
