"""Files of compiled kernels: where they are kept, and that nobody else wrote them.

Owns folder choice, ownership checks, digests and atomic writes. Must not know what a kernel is.
What lies here is executed, so a file counts only if this user alone could have written it and its
digest is right; anything else is compiled again.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

CACHE_ENV = "CUDFLASH_CACHE"


def candidate_folders():
    """Folders to try, best first; one that the user names is the only one."""
    if os.environ.get(CACHE_ENV):
        return [Path(os.environ[CACHE_ENV])]
    tried = []
    if os.environ.get("XDG_CACHE_HOME"):
        tried.append(Path(os.environ["XDG_CACHE_HOME"]) / "cudflash")
    with contextlib.suppress(RuntimeError):
        tried.append(Path.home() / ".cache" / "cudflash")
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return [*tried, Path(tempfile.gettempdir()) / f"cudflash-cache-{user}"]


def find_folder():
    """First folder that can be written to and is this user's alone, or None."""
    for folder in candidate_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not is_ours(folder):
                continue
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return None


def is_ours(path):
    """Whether only this user can put something there."""
    found = os.lstat(path)
    if not hasattr(os, "getuid"):
        return True
    closed = found.st_mode & 0o022 == 0
    return found.st_uid == os.getuid() and closed and not stat.S_ISLNK(found.st_mode)


def sealed(code):
    """The bytes as they are stored: digest first."""
    return hashlib.sha256(code).digest() + code


def unsealed(blob):
    """The code in stored bytes, or None when they are torn or damaged."""
    digest, code = blob[:32], blob[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def read(path):
    """Code of a stored file, or None where there is none that can be trusted."""
    try:
        if not is_ours(path.parent) or not is_ours(path):
            return None
        return unsealed(path.read_bytes())
    except OSError:
        return None


def write(path, code):
    """Store code; returns whether that worked. Two processes may write the same file at once."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_ours(path.parent):
            return False
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}")
        with os.fdopen(handle, "wb") as out:
            out.write(sealed(code))
        os.replace(temporary, path)
        temporary = None
        return True
    except OSError:
        return False
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
