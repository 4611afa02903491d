"""Hashes the status page's password by scrypt into a file of one line, and compares passwords with it."""

import hashlib
import hmac
import os
import re
import secrets
import stat
import unicodedata
from pathlib import Path
from typing import Final

CREDENTIALS_PREFIX: Final = "sluice_"
"""Prefix that systemd gives to a file's name if `LoadCredential=sluice:` names a folder (systemd.exec(5))."""
N, R, P = 2**14, 8, 1
"""Cost of scrypt: 16 MiB, and some 50 ms on a server or 0.3 s on a Raspberry Pi (RFC 7914, section 2)."""
N_MAX, R_MAX, P_MAX = 2**17, 8, 4
"""Greatest cost that a file may ask for: more would take the memory that readings need."""
SALT_BYTES: Final = 16
HASH_BYTES: Final = 32
FILE_BYTES_MAX: Final = 1_000
PASSWORD_CHARACTERS_MAX: Final = 256
_LINE = re.compile(r"scrypt\$([0-9]{1,7})\$([0-9]{1,3})\$([0-9]{1,3})\$([0-9a-f]{16,128})\$([0-9a-f]{32,128})")


class PagePasswordError(Exception):
    """No password can let anybody in; the message says why and what to do."""


def make_password_line(password: str) -> str:
    """Make the line that stands for a password: `scrypt$n$r$p$salt_hex$hash_hex`. Takes a while, by design."""
    salt = secrets.token_bytes(SALT_BYTES)
    return f"scrypt${N}${R}${P}${salt.hex()}${_hash(password, salt, N, R, P, HASH_BYTES).hex()}"


def verify_password(password: str, line: str) -> bool:
    """Whether the line stands for this password; False if it stands for none. Takes a while, by design."""
    if len(password) > PASSWORD_CHARACTERS_MAX:
        return False
    found = _parsed(line)
    if found is None:
        return False
    n, r, p, salt, wanted = found
    return hmac.compare_digest(_hash(password, salt, n, r, p, len(wanted)), wanted)


def read_password_line(path: Path) -> str:
    """Read the line of a file, or of the credential of its name from systemd. Raises PagePasswordError."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    credential = Path(folder, CREDENTIALS_PREFIX + path.name) if folder else None
    # A folder that this user cannot look into has no credential for it.
    if credential is not None and os.path.exists(credential):  # noqa: PTH110 - Path.exists raises there
        return _line(credential)
    return _line(path, is_ours=True)


def _line(path: Path, *, is_ours: bool = False) -> str:
    """Read and check a line. `is_ours`: systemd has not restricted who may read the file."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            # Opening a named pipe would wait for ever for its other end.
            raise PagePasswordError(f"status_page.password_file: {path} is no file; run sluice setup, which makes it")
        if is_ours and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PagePasswordError(f"status_page.password_file can be read by others; run: chmod 0400 {path}")
        with path.open("rb") as file:
            line = file.read(FILE_BYTES_MAX).decode("ascii", "replace").strip()
    except FileNotFoundError as error:
        raise PagePasswordError(
            f"no password is set: status_page.password_file, {path}, is not there; run sluice setup"
        ) from error
    except PermissionError as error:
        raise PagePasswordError(
            f"status_page.password_file, {path}, is not this user's to read: systemd hands it to the service when that "
            "starts (LoadCredential); run sluice setup where no password was ever set, then systemctl restart sluice"
        ) from error
    except OSError as error:
        raise PagePasswordError(
            f"status_page.password_file cannot be read: {path}: {error.strerror}; run sluice setup, which writes it"
        ) from error
    if _parsed(line) is None:
        raise PagePasswordError(
            f"status_page.password_file: {path} holds no line of scrypt$..., as sluice setup writes it; run sluice "
            "setup to set the password anew"
        )
    return line


def _parsed(line: str) -> tuple[int, int, int, bytes, bytes] | None:
    found = _LINE.fullmatch(line.strip())
    if found is None:
        return None
    n, r, p = int(found[1]), int(found[2]), int(found[3])
    is_cost = 2 <= n <= N_MAX and n & (n - 1) == 0 and 1 <= r <= R_MAX and 1 <= p <= P_MAX
    if not is_cost or len(found[4]) % 2 or len(found[5]) % 2:
        return None
    return n, r, p, bytes.fromhex(found[4]), bytes.fromhex(found[5])


def _hash(password: str, salt: bytes, n: int, r: int, p: int, length: int) -> bytes:  # noqa: PLR0913, PLR0917 - RFC 7914's own
    # One keyboard sends an é as one character, another as two.
    typed = unicodedata.normalize("NFC", password).encode("utf-8", "surrogatepass")
    # scrypt needs 128 * n * r bytes. Without `maxmem`, OpenSSL refuses at 32 MiB.
    return hashlib.scrypt(typed, salt=salt, n=n, r=r, p=p, maxmem=128 * r * (n + p + 2) + 2**20, dklen=length)
