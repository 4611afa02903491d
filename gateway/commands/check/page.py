"""Checks the status page: whether it has a password, and whether it is served."""

import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from itertools import islice
from pathlib import Path
from typing import Final

from msgspec import structs

from gateway.buffer.status import is_running
from gateway.commands.check.finding import Finding, remark, well, wrong
from gateway.commands.check.ports import check_port
from gateway.commands.handout import own_hosts
from gateway.host.service_user import as_root
from gateway.kafka.reach import host_and_port
from gateway.page.password import PagePasswordError, read_password_line
from gateway.settings import StatusPageSettings

HOSTS_MAX: Final = 2
"""Most addresses of the page that are shown."""
ANSWER_S: Final = 8.0
"""Seconds to wait for the page. The page itself waits less for the buffer's thread."""
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what may stand in the settings
_PASSWORD: Final = "status_page.password_file"  # noqa: S105 - a setting's name
_PORT: Final = "status_page.port"


def check_page(page: StatusPageSettings, buffer: Path) -> Iterator[Finding]:
    """Check the page's password, and ask the page if the gateway runs. Else check that its port is free."""
    yield _password(page)
    yield _served(page) if is_running(buffer) else _free(page, buffer)


def _password(page: StatusPageSettings) -> Finding:
    try:
        # Only root may read a credential that systemd hands to the service.
        with as_root():
            read_password_line(page.password_file)
    except PagePasswordError as error:
        if isinstance(error.__cause__, PermissionError):
            return remark(
                "page-password-unknown",
                _PASSWORD,
                f"this user may not read {page.password_file}, which systemd hands to sluice, so it is not known "
                "whether there is a password; run this with sudo to see",
            )
        return remark("page-password-unusable", _PASSWORD, f"nobody can log in at the status page: {error}")
    return well(_PASSWORD, "a password is set")


def _served(page: StatusPageSettings) -> Finding:
    host = _EVERYWHERE.get(page.host, page.host)
    try:
        with closing(HTTPConnection(host, page.port, timeout=ANSWER_S)) as connection:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            told = json.loads(answer.read(10_000))
            status = str(told["status"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        return wrong(
            "page-unserved",
            _PORT,
            f"the running sluice does not serve its status page at {host} port {page.port} ({error}); its log says why "
            "(journalctl -u sluice). If it was started before [status_page] was written, restart it",
        )
    if status != "ok":
        return wrong(
            str(told.get("code", "gateway-failing")),
            "status page",
            f"it says that the gateway fails: {told.get('reason', status)}",
        )
    where = [f"http://{host_and_port(host, page.port)}" for host in islice(own_hosts(page.host), HOSTS_MAX)]
    return well("status page", f"served: {' or '.join(where) or 'no network has given this box an address yet'}")


def _free(page: StatusPageSettings, buffer: Path) -> Finding:
    """Check whether a daemon that starts now could serve the page."""
    found = check_port(_PORT, page.host, page.port, buffer)
    return found if found.ok else structs.replace(found, words=f"{found.words}. Readings are taken in all the same")
