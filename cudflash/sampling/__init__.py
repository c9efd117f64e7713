"""Sampling: the generator, the settings and llama.cpp's chain. NumPy only, no models, no devices."""

from cudflash.sampling.candidates import Distribution
from cudflash.sampling.chain import SamplerChain
from cudflash.sampling.config import SamplingConfig
from cudflash.sampling.logprobs import LogProbs, log_softmax_top
from cudflash.sampling.mt19937 import Mt19937, MtState

__all__ = [
    "Distribution",
    "LogProbs",
    "Mt19937",
    "MtState",
    "SamplerChain",
    "SamplingConfig",
    "log_softmax_top",
]
