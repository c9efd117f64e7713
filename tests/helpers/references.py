"""The independent reference that knows a recorded target."""

from tests.reference.forward import Reference
from tests.reference.hybrid import HybridReference


def reference_of(case, **options):
    """``Reference`` or ``HybridReference`` of a `TargetCase`; both have ``forward(tokens)``."""
    made = HybridReference if case.arch == "qwen35" else Reference
    return made(case.path, **options)
