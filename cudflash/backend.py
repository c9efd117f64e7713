"""What an engine asks of its device beside the ops: memory, scratch, names. One class per kind.

Owns the difference between the kinds, so that the engine has none. Must not know models' files.
"""

from cudflash import device as devices


def backend_of(device, ops):
    """Backend over an op set that is open."""
    return CudaBackend(device, ops) if device.kind == "cuda" else CpuBackend(device, ops)


def planner(kind):
    """Backend that sizes memory and touches none; needs no GPU for "cuda"."""
    if kind == "cuda":
        from cudflash.ops.cuda.planning import planning_ops

        return CudaBackend(None, planning_ops())
    from cudflash.ops import cpu

    return CpuBackend(None, cpu)


class CpuBackend:
    """The CPU: the system gives pages when they are touched, and takes them back."""

    one_copy = False  # nothing is far away, and a round that waits twice tells two times apart

    def __init__(self, device, ops):
        self.device, self.ops = device, ops

    def check_memory(self, n_bytes):
        """Refuse what does not fit; see ``device.check_memory``."""
        devices.check_memory(n_bytes, devices.available_memory())

    def reserve(self, n_bytes):
        """Take memory for arrays that come next: nothing to do."""

    def prepare(self, n_bytes):
        """Allocate the scratch that ops share: they make their own."""

    def workspace_bytes(self, config, draft_config, n_ctx, max_rows):
        """Bytes of that scratch; small, and made when it is needed."""
        return 0

    def release(self):
        """Give back what the ops hold: nothing."""

    def kernel_path(self):
        """Name of the variant of the kernels in use; it never changes a bit."""
        from cudflash.ops.cpu import jit

        return jit.isa()


class CudaBackend:
    """A GPU: memory in few pieces, taken when a model or a session begins.

    Parameters
    ----------
    device : Device
    ops : CudaOps
    """

    one_copy = True  # a copy to the host waits for everything before it

    def __init__(self, device, ops):
        self.device, self.ops = device, ops

    def check_memory(self, n_bytes):
        """Refuse what does not fit; see ``device.check_memory``."""
        free, _ = self.ops.memory()
        devices.check_memory(n_bytes, free, f" on {self.device.name}")

    def reserve(self, n_bytes):
        """Take memory for arrays of ``n_bytes`` in all that come next, in one piece."""
        self.ops.reserve(n_bytes)

    def prepare(self, n_bytes):
        """Allocate the scratch that ops share, at its largest."""
        self.ops.prepare(n_bytes)

    def workspace_bytes(self, config, draft_config, n_ctx, max_rows):
        """Bytes of that scratch: the largest need of any op of a pass."""
        from cudflash.model.cache import layer_capacity
        from cudflash.model.outcome import CANDIDATES
        from cudflash.ops.cuda.attend import CHUNK, SPLIT_ROWS
        from cudflash.ops.cuda.planning import attention_bytes, selection_bytes

        needs = [selection_bytes(SPLIT_ROWS, config.vocab_size, CANDIDATES)]
        own = () if config.mtp is None else (config.mtp,)
        for layer in (*config.layers, *own):
            capacity = layer_capacity(layer.window, n_ctx, max_rows, CHUNK)
            needs.append(attention_bytes(SPLIT_ROWS, layer.n_heads, config.head_dim, capacity))
        if draft_config is not None:
            needs += self._draft_needs(draft_config, n_ctx, CHUNK)
        return max(needs)

    @staticmethod
    def _draft_needs(config, n_ctx, chunk):
        from cudflash.model.draft_context import ring_capacity
        from cudflash.ops.cuda.planning import attention_bytes, selection_bytes

        block, top_k = config.block_size, config.selector_top_k or 0
        yield selection_bytes(block, config.vocab_size, top_k)
        for layer in config.layers:
            capacity = ring_capacity(layer.window, n_ctx, block, chunk)
            sink = 0 if layer.window is None else -(-config.sink // chunk) * chunk
            yield attention_bytes(block, config.n_heads, config.head_dim, capacity, sink)

    def release(self):
        """Give back what the ops hold."""
        self.ops.close()

    def kernel_path(self):
        """Architecture and how passes are started; it never changes a bit."""
        return f"{self.ops.driver.arch}, {'graphs' if self.ops.graphs else 'no graphs'}"
