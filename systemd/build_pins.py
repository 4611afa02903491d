"""Chooses the pins of `constraints.txt` that `make deb` and `make cloud` install: the gateway's, and those of extras.

Runs before anything is installed, so it needs Python alone.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def requirements(constraints: str, wanted: Iterable[str]) -> str:
    """Return the pins of these packages and of all that they need, as `constraints.txt` has them.

    `# via` below a pin names who needs it.

    Raises:
        LookupError: one is not pinned.
    """
    pins = re.split(r"(?m)^(?=\w)", constraints)[1:]
    names = [canonical(pin.partition("==")[0]) for pin in pins]
    needed_by = [{canonical(found) for found in re.findall(r"(?m)^ +#(?: via)? +([\w.-]+)", pin)} for pin in pins]
    chosen = {canonical(name) for name in wanted}
    if missing := chosen.difference(names):
        raise LookupError(f"{', '.join(sorted(missing))}: not in constraints.txt; run `make lock`")
    while more := {name for name, needs in zip(names, needed_by, strict=True) if needs & chosen} - chosen:
        chosen |= more
    return "".join(pin for pin, name in zip(pins, names, strict=True) if name in chosen)


def canonical(name: str) -> str:
    """Return a package's name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(*extras: str) -> list[str]:
    """Names of the packages that `pyproject.toml` lists for the gateway and for these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    return [found[0] for line in lines if (found := re.match(r"[\w.-]+", line))]


if __name__ == "__main__":
    sys.stdout.write(requirements((ROOT / "constraints.txt").read_text(), needs(*sys.argv[1:])))
