"""Debian's programs, called by `sluice update`."""

import subprocess

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


class UpdateError(Exception):
    """It is not installed. The message says why, what that means and what to do."""


def call(*command: str, patience_s: float | None = 60.0) -> subprocess.CompletedProcess[str]:
    """Run one of Debian's programs. Raises UpdateError if it is missing or does not end."""
    try:
        return subprocess.run(  # noqa: S603 - programs named here
            command,
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=patience_s,
        )
    except FileNotFoundError:
        raise UpdateError(f"there is no `{command[0]}` on this box: sudo apt install {command[0]}") from None
    except subprocess.TimeoutExpired:
        raise UpdateError(f"`{command[0]}` did not end within {patience_s:.0f} s; is the disk sound?") from None


def compare_versions(one: str, relation: str, other: str) -> bool:
    """Compare two versions as dpkg does, by `lt`, `eq` and the like."""
    return call("dpkg", "--compare-versions", one, relation, other).returncode == 0


def is_newer_version(version: str, installed: str, *, allow_downgrade: bool) -> bool:
    """Whether to install a version: False if it is installed already. Raises UpdateError for an older one."""
    if compare_versions(version, "eq", installed):
        return False
    if compare_versions(version, "lt", installed) and not allow_downgrade:
        raise UpdateError(
            f"it is version {version}, older than the installed {installed}, and may have faults that are corrected "
            "here. If you want it all the same, add --allow-downgrade: what waits in the buffer stays"
        )
    return True


def last_lines(ended: subprocess.CompletedProcess[str], count: int) -> list[str]:
    """The last lines that a program said, without empty ones."""
    return [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()][-count:]
