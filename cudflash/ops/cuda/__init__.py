"""The op set on an NVIDIA GPU: the kernels of ``raw_kernels/``, launched through CuPy.

``open_ops(index)`` returns the op set of one device: an object whose methods have the names,
argument order and bits of the functions of ``cudflash.ops.cpu``. Importing this package needs
neither CuPy nor a GPU.
"""

from cudflash.ops.cuda.ops import CudaOps


def open_ops(index=0, graphs=True):
    """Op set of CUDA device ``index``; needs CuPy, a driver and the device."""
    import cupy.cuda

    from cudflash.ops.cuda.driver import Driver

    return CudaOps(Driver(cupy.cuda, index), graphs)


__all__ = ["CudaOps", "open_ops"]
