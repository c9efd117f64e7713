"""The installed command, and ``python -m cudflash``."""

import os
import signal

INTERRUPTED = 130  # 128 + SIGINT, as shells count


def script():
    """Run the command line as a process of its own; Ctrl-C ends it quietly from the first import on.

    Returns
    -------
    int
        The exit code.
    """
    usual = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if usual:  # nothing has been read, written or begun: there is nothing to tell
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from cudflash.cli import script as run

    try:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:  # between the two
        return INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(script())
