"""Whether the files in use are still the files that were loaded, and their digests.

Owns the marks by which a file is recognised. Must not know models, and keeps nothing alive: a digest
is made when it is asked for, long after the engine may be gone. Invariant: a digest is never that of
another file than the one that was loaded.
"""

import os

from cudflash.errors import FormatError


class LoadedFiles:
    """Files of a model, as they were when they were opened; picklable.

    Parameters
    ----------
    files : sequence of str or path-like

    Attributes
    ----------
    files : tuple of str
        Absolute paths.
    """

    def __init__(self, files):
        self.files = tuple(os.path.abspath(os.fspath(file)) for file in files)
        self._shown = tuple(os.fspath(file) for file in files)
        self._marks = tuple(_mark(file) for file in self.files)
        self._digest = None

    def check(self):
        """Raise FormatError if a file was written to since it was loaded.

        Memory that is mapped from a file changes with it, so its weights are no longer trusted. A
        file that was deleted, or replaced by another one, is still mapped as it was. Two stats; no
        protection from a file that shrinks while a pass reads it: the system then ends the process
        (bus error), and no check before a pass can exclude that.
        """
        for shown, file, mark in zip(self._shown, self.files, self._marks):
            now = _mark(file)
            if now is not None and mark is not None and now[:2] == mark[:2] and now != mark:
                raise FormatError(
                    f"{shown}: changed while loaded, from {_words(mark)} to {_words(now)}, expected "
                    "an untouched file; load it again"
                )

    def sha256(self):
        """SHA-256 as 64 hex digits, over several files as ``draft_digest`` says; read once.

        Raises
        ------
        FormatError
            If a file is no longer the one that was loaded.
        """
        if self._digest is None:
            from cudflash.loader.pairing import draft_digest

            self._same()
            digest = draft_digest(self)
            self._same()  # nor has it changed meanwhile
            self._digest = digest
        return self._digest

    def _same(self):
        for shown, file, mark in zip(self._shown, self.files, self._marks):
            now = _mark(file)
            if now != mark or now is None:
                raise FormatError(
                    f"{shown}: is no longer the file that was loaded ({_words(now)} now, "
                    f"{_words(mark)} then), so its digest cannot be proved; put it back or load it "
                    "again"
                )


class ReceiptMaker:
    """Makes the receipt of one answer when it is asked for; picklable, holds no engine.

    Parameters
    ----------
    facts : dict
        The receipt, with None for the digests.
    target : LoadedFiles
    draft : LoadedFiles or None
    """

    def __init__(self, facts, target, draft, part=dict):
        self._facts, self._target, self._draft, self._part = facts, target, draft, part

    def of(self, part):
        """Return a maker of the same receipt with the keys that ``part()`` makes."""
        return ReceiptMaker(self._facts, self._target, self._draft, part)

    def __call__(self):
        receipt = {**self._facts, **self._part()}
        receipt["target"] = {**receipt["target"], "sha256": self._target.sha256()}
        if receipt["draft"] is not None:
            receipt["draft"] = {**receipt["draft"], "sha256": self._draft.sha256()}
        return receipt


def _mark(file):
    """What changes when a file is replaced or written to; None for one that is gone."""
    try:
        status = os.stat(file)
    except (OSError, ValueError):  # a NUL in the path
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _words(mark):
    return "missing" if mark is None else f"{mark[2]} bytes of time {mark[3] / 1e9:.3f}"
