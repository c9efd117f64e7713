"""Files of compiled kernels: where they are kept, and that nobody else wrote them.

Owns folder choice, ownership checks, digests, atomic writes, and who is told when a kernel is
compiled because there is no file. Must not know what a kernel is.
What lies here is executed, so a file counts only if this user alone could have written it and its
digest is right; anything else is compiled again.
"""

import contextlib
import os
import stat
from pathlib import Path

try:  # hashlib begins by loading OpenSSL, which takes longer than all digests of a start
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

CACHE_ENV = "CUDFLASH_CACHE"
_DIGEST_BYTES = 32
_listeners = []


def on_compile(listener):
    """Call ``listener(name)`` before each real compilation (files that are found are silent)."""
    _listeners.append(listener)


def announce(name):
    """Tell the listeners that a kernel is about to be compiled."""
    for listener in _listeners:
        listener(name)


def candidate_folders():
    """Yield folders to try, best first; one that the user names is the only one."""
    if os.environ.get(CACHE_ENV):
        yield Path(os.environ[CACHE_ENV])
        return
    if os.environ.get("XDG_CACHE_HOME"):
        yield Path(os.environ["XDG_CACHE_HOME"]) / "cudflash"
    with contextlib.suppress(RuntimeError):
        yield Path.home() / ".cache" / "cudflash"
    import tempfile  # here and below: seldom needed, and 1 % of a start

    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    yield Path(tempfile.gettempdir()) / f"cudflash-cache-{user}"


def find_folder():
    """First folder that can be written to and is this user's alone, or None."""
    for folder in candidate_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if is_ours(folder) and os.access(folder, os.W_OK | os.X_OK):
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


def digest(*parts):
    """Digest of byte strings; their lengths count as well."""
    found = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def sealed(name, code):
    """The bytes as they are stored in a file of this name: digest first."""
    return digest(name.encode(), code) + code


def unsealed(name, blob):
    """The code in stored bytes, or None when they are torn, damaged or another file's."""
    code = blob[_DIGEST_BYTES:]
    return code if digest(name.encode(), code) == blob[:_DIGEST_BYTES] else None


def read(path):
    """Code of a stored file, or None where there is none that can be trusted."""
    try:
        if not is_ours(path.parent) or not is_ours(path) or not path.is_file():
            return None  # a pipe in its place would be waited for
        return unsealed(path.name, path.read_bytes())
    except OSError:
        return None


def write(path, code):
    """Store code; returns whether that worked. Two processes may write the same file at once."""
    import tempfile

    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_ours(path.parent):
            return False
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}")
        with os.fdopen(handle, "wb") as out:
            out.write(sealed(path.name, code))
        os.replace(temporary, path)
        temporary = None
        return True
    except OSError:
        return False
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
