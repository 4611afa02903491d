"""Finds a format of one's own: a file that root owns, or an entry point of an installed package.

It runs code, so only the process of the format itself calls it (`format_process`).
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

from gateway.formats.cutter import FormatError
from gateway.formats.piece import Format
from gateway.host.safe_files import why_others_could_change

GROUP: Final = "sluice.formats"
"""Group of entry points."""
CLASS: Final = "Format"
"""Name of the class in a file."""


def load(name: str, folder: Path) -> Format:
    """Make the format of this name. A file comes before an entry point.

    Raises FormatError, and any error of the format itself.
    """
    file = folder / f"{name}.py"
    made: Format = (_in_file(file) if file.exists() else _installed(name, file))()
    if not callable(getattr(made, "cut", None)):
        raise FormatError("has no function cut(self, received)")
    return made


def _in_file(file: Path) -> Any:
    # Who can write the file can do all that the gateway can.
    why = why_others_could_change(file)
    if why is not None:
        raise FormatError(f"is {file}, and {why}; run: chown root: {file} && chmod 644 {file}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise FormatError(f"is {file}, which is no module of Python")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module by its name.
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, CLASS):
        raise FormatError(f"is {file}, which has no class {CLASS}")
    return getattr(module, CLASS)


def _installed(name: str, file: Path) -> Any:
    from importlib.metadata import entry_points  # noqa: PLC0415 - a format in a file needs none of it

    found = list(entry_points(group=GROUP, name=name))
    if not found:
        raise FormatError(
            f"is not there: write {file}, install a package with an entry point {name} in {GROUP}, or name another "
            "format"
        )
    return found[0].load()
