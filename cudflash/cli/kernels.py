"""Tell the user about the one-time compilation of CPU kernels while it happens."""


class CompileNotice:
    """Announces the first compilation, counts them on a terminal, and sums them up.

    Kernels are compiled when they are first needed, some of them only with the first token, so
    ``done`` is called then. Used in a ``with`` block.
    """

    def __init__(self, output):
        self._output = output
        self._count = 0
        self._active = True

    def __enter__(self):
        from cudflash.ops.cpu import jit

        jit.on_compile(self._compiling)
        return self

    def __exit__(self, *exc):
        self.done()
        self._active = False  # listeners cannot be taken back

    def done(self):
        """Sum up what was compiled so far."""
        if self._count:
            kernels = "kernel" if self._count == 1 else "kernels"
            self._output.note(f"compiled {self._count} {kernels}")
            self._count = 0

    def _compiling(self, name):
        if not self._active:
            return
        if not self._count:
            self._output.note(f"compiling kernels for this processor ({_kept()}) ...")
        self._count += 1
        self._output.progress(f"compiling kernel {self._count}: {name}")


def _kept():
    from cudflash.ops.cpu import jit

    folder = jit.cache_dir()
    if folder is None:
        return "at every start, no folder is writable; set CUDFLASH_CACHE to one of your own"
    return f"once, cached in {folder}"
