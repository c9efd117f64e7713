"""cudflash: lossless DFlash speculative decoding of GGUF k-quant models."""

__version__ = "0.1.0"
