"""Settings of the whole suite, made before NumPy is imported."""

import os

# Reference passes multiply small matrices; a BLAS pool per test process only fights over the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
