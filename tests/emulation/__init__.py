"""Running the CUDA C of raw_kernels/ on the processor, for tests; see README.md."""
