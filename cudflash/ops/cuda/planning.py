"""Sizes without a device: an op set that counts memory, and the scratch that ops share."""

from cudflash.ops.cuda.attend import CHUNK, RECORD_EXTRA
from cudflash.ops.cuda.memory import ALIGNMENT, round_up
from cudflash.ops.cuda.ops import CudaOps
from cudflash.ops.cuda.select import SPAN, TOP_K_SPAN


class PlanningDriver:
    """Hands out addresses of memory that does not exist; has no kernels."""

    name = "planning"

    def __init__(self):
        self._next = 1 << 20

    def allocate(self, n_bytes):
        """An address that nothing will be read from."""
        address, self._next = self._next, self._next + round_up(n_bytes, ALIGNMENT)
        return address

    def free(self, address, n_bytes):
        """Nothing was taken."""

    def fill(self, address, value, n_bytes):
        """Nothing is there."""


def planning_ops():
    """Op set for sizes: arrays can be made, nothing can be computed."""
    return CudaOps(PlanningDriver())


def attention_bytes(rows, n_heads, head_dim, capacity, sink_capacity=0):
    """Scratch of ``attention`` or ``attention_span`` for a cache of ``capacity`` slots."""
    slots = capacity // CHUNK + 1 + sink_capacity // CHUNK
    return 4 * rows * n_heads * slots * (head_dim + RECORD_EXTRA)


def selection_bytes(rows, width, k=0):
    """Scratch of ``argmax``, ``check_finite`` and, for k candidates, ``top_k`` on rows of logits."""
    spans = rows * -(-width // SPAN)
    best = rows * -(-width // TOP_K_SPAN) * min(k, TOP_K_SPAN)
    return 2 * round_up(4 * max(spans, best), ALIGNMENT)
