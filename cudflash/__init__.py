"""cudflash: lossless DFlash speculative decoding of GGUF k-quant models."""

import importlib

__version__ = "0.1.0"

# Public names and where they live; loaded on first use, so that importing the package costs nothing.
_PUBLIC = {
    "load": "cudflash.engine",
    "Engine": "cudflash.engine",
    "Session": "cudflash.session",
    "Generation": "cudflash.generation",
    "Result": "cudflash.result",
    "Usage": "cudflash.result",
    "TokenLogprob": "cudflash.result",
    "Started": "cudflash.events",
    "PrefixReused": "cudflash.events",
    "PromptProgress": "cudflash.events",
    "TokenEvent": "cudflash.events",
    "RoundFinished": "cudflash.events",
    "GateChanged": "cudflash.events",
    "EconomyChanged": "cudflash.events",
    "DrafterFailed": "cudflash.events",
    "Diagnosed": "cudflash.events",
    "Finished": "cudflash.events",
    "Plan": "cudflash.plan",
    "Tokenizer": "cudflash.loader.tokenizer",
    "SamplingConfig": "cudflash.sampling.config",
    "SamplerChain": "cudflash.sampling.chain",
    "Mt19937": "cudflash.sampling.mt19937",
    "CudflashError": "cudflash.errors",
}
_MODULES = (
    "drafters", "errors", "events", "plan", "quant", "recording", "sampling", "tui", "verify",
)  # fmt: skip

__all__ = ["__version__"]
__all__ += list(_PUBLIC)
__all__ += list(_MODULES)


def __getattr__(name):
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"cudflash.{name}")
    else:
        raise AttributeError(f"module 'cudflash' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
