"""The op set on an NVIDIA GPU: the kernels of ``raw_kernels/``, launched through CuPy.

``open_ops(index)`` returns the op set of one device: an object whose methods have the names,
argument order and bits of the functions of ``cudflash.ops.cpu``. Importing this package needs
neither CuPy nor a GPU.
"""


def __getattr__(name):
    """``CudaOps``, imported on first use: a start without a GPU does not need it."""
    if name == "CudaOps":
        from cudflash.ops.cuda.ops import CudaOps

        return CudaOps
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open_ops(index=0, graphs=True):
    """Op set of CUDA device ``index``; needs CuPy, a driver and the device.

    Raises
    ------
    DeviceError
        If anything of that is missing or broken.
    """
    from cudflash.errors import CudflashError, DeviceError
    from cudflash.ops.cuda.driver import Driver
    from cudflash.ops.cuda.ops import CudaOps

    try:
        import cupy

        return CudaOps(Driver(cupy.cuda, index), graphs)
    except CudflashError:
        raise
    except Exception as err:  # noqa: BLE001  (a broken CuPy fails with whatever it likes)
        text = f"{type(err).__name__}: {' '.join(str(err).split())[:200]}"
        raise DeviceError(f"CUDA cannot be used ({text}); run 'cudflash doctor'") from None


__all__ = ["CudaOps", "open_ops"]
