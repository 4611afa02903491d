"""Signs packages by Ed25519, with openssl."""

import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

OWN_KEY = Path("build/signing/release.key")
"""Key that is made if none is given."""


class SigningError(RuntimeError):
    """openssl failed, or the key is of another kind; the message says why and what to do."""


def make_key(path: Path) -> None:
    """Make a private key at `path`, for its owner alone; an existing one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        made.touch(0o600)
        _openssl("genpkey", "-algorithm", "ed25519", "-out", str(made))
        # If two make a key at the same time, the first one's counts.
        with suppress(FileExistsError):
            path.hardlink_to(made)


def public_key(private: Path) -> str:
    """Return the public half of a key, in PEM."""
    key = _openssl("pkey", "-in", str(private), "-pubout").decode()
    if "ED25519" not in _openssl("pkey", "-in", str(private), "-noout", "-text").decode():
        raise SigningError(f"{private} is no Ed25519 key; make one by: openssl genpkey -algorithm ed25519 -out FILE")
    return key


def sign(file: Path, private: Path) -> Path:
    """Write the signature of a file beside it, as FILE.sig: 64 bytes."""
    signature = file.with_name(file.name + ".sig")
    _openssl("pkeyutl", "-sign", "-rawin", "-inkey", str(private), "-in", str(file), "-out", str(signature))
    return signature


def _openssl(*arguments: str) -> bytes:
    ended = subprocess.run(["openssl", *arguments], capture_output=True, check=False)
    if ended.returncode:
        raise SigningError(f"openssl {arguments[0]} failed: {ended.stderr.decode(errors='replace').strip()}")
    return ended.stdout
