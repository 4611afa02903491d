"""Finds the installed packages that a requirement needs."""

from importlib.metadata import Distribution, distribution

from packaging.requirements import Requirement


def packages_of(requirement: str) -> dict[str, Distribution]:
    """All packages that pip installs for a requirement, with itself, by their names in small letters."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(requirement)]
    while waiting:
        wanted = waiting.pop()
        package = found[wanted.name.lower()] = distribution(wanted.name)
        extras = wanted.extras or {""}
        waiting += [
            each
            for each in map(Requirement, package.requires or [])
            if each.name.lower() not in found
            and (each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras))
        ]
    return found
