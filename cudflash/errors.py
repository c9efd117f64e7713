"""Every error a user can meet. One base class, one exit code each.

A message is one sentence: the object, what was found, what was expected, what to do. File errors
carry the path. The command line prints the message and exits with ``exit_code``.
"""


class CudflashError(Exception):
    """Base of all errors raised on purpose; anything else that escapes is a bug."""

    exit_code = 1


class UsageError(CudflashError):
    """An argument or a combination of arguments that cannot be honoured."""

    exit_code = 2


class FormatError(CudflashError):
    """A file that is damaged, truncated, or not what it should be."""

    exit_code = 3


class UnsupportedError(FormatError):
    """A sound file that needs something this version does not have."""


class PairingError(CudflashError):
    """A draft that does not belong to the target."""

    exit_code = 4


class OutOfMemoryError(CudflashError):
    """A plan or an allocation that does not fit."""

    exit_code = 5


class DeviceError(CudflashError):
    """No usable device, or a device that failed."""

    exit_code = 6


class ContextLengthError(CudflashError):
    """A prompt or an answer that does not fit the context; carries both numbers in the text."""

    exit_code = 7


class NumericsError(CudflashError):
    """Non-finite logits, or a broken numeric invariant."""

    exit_code = 8
