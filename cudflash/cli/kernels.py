"""Tell the user about the one-time compilation of kernels while it happens."""

from cudflash.cli.interrupts import listen


class CompileNotice:
    """Within the block compilations are announced once, counted on a terminal, and summed up.

    Kernels are compiled when they are first needed, some of them in the middle of an answer: then
    nothing is shown before the end, so that the text stays whole.
    """

    def __init__(self, output):
        self._output = output
        self._count = 0
        self._announced = False
        self._active = True

    def __enter__(self):
        from cudflash.ops import store

        listen()  # first: a kernel that Ctrl-C prevents is not counted
        store.on_compile(self._compiling)
        return self

    def __exit__(self, *exc):
        self._active = False  # listeners cannot be taken back
        if self._count:
            kernels = "kernel" if self._count == 1 else "kernels"
            self._output.note(f"compiled {self._count} {kernels} ({_kept()})")

    def _compiling(self, name):
        if not self._active:
            return
        self._count += 1
        if self._output.mid_line:
            return
        if not self._announced:
            self._announced = True
            self._output.note("compiling kernels for this machine ...")  # kept? told at the end
        self._output.progress(f"compiling kernel {self._count}: {name}")


def _kept():
    from cudflash.ops.cpu import jit
    from cudflash.ops.cuda import compiler

    folder = jit.cache_dir()
    if folder is None:
        return (
            "at every start, no folder is writable and closed to others; set CUDFLASH_CACHE to one "
            "of your own"
        )
    if not jit.stored() or not compiler.stored():
        return (
            f"at every start, {folder} took not all of them; make room there, close it to others, or "
            "set CUDFLASH_CACHE to another folder"
        )
    return f"once, cached in {folder}"
