"""Serve timed llama.cpp evaluations to ``bench_cpu.py`` over stdin and stdout.

Owns: one model loaded through the ``llama_cpp`` Python package, in a process of its own, so that
the peer's threads and memory never mix with ours. Must not know: anything of cudflash; it runs in
whatever Python holds the peer. Invariant: one JSON object in, one JSON object out, and no work
between an answer and the next request, so the other side can measure while this one sleeps.

Requests: ``{"op": "load", "path", "threads", "n_ctx", "flash_attn"}``,
``{"op": "prefill", "tokens"}``, ``{"op": "decode", "prefix", "n_tokens"}``, ``{"op": "quit"}``.

The low-level API is used (``llama_decode``), not the package's ``Llama`` class: the class copies
logits into Python arrays, a cost that llama.cpp itself does not have.
"""

import ctypes
import json
import sys
import time

import numpy as np

BATCH = 512  # logical and physical batch, llama.cpp's default physical batch
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}  # llama.h, enum llama_flash_attn_type


class Peer:
    """A llama.cpp model and one context, with the defaults of ``llama-bench``."""

    def __init__(self, path, threads, n_ctx, flash_attn):
        import llama_cpp

        self.lib = llama_cpp
        # Kept on self: ctypes drops a callback that nobody references.
        self.log_callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.log_callback, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = FLASH_ATTN[flash_attn]
        # The library default keeps full-size caches for windowed layers; llama-bench and the
        # command line do not, and they are what people run.
        params.swa_full = False
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp could not create a context of {n_ctx} for {path}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.prefix = None  # tokens held by the cache, when a decode request left them there

    def facts(self):
        """Return what identifies this build."""
        return {
            "version": self.lib.__version__,
            "system": self.lib.llama_print_system_info().decode().strip(),
        }

    def evaluate(self, tokens):
        """Evaluate ``tokens`` after what the cache holds; return the last row's best token."""
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            buffer = (self.lib.llama_token * len(part))(*part)
            code = self.lib.llama_decode(
                self.context, self.lib.llama_batch_get_one(buffer, len(part))
            )
            if code != 0:
                raise RuntimeError(f"llama_decode returned {code}")
        logits = self.lib.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def prefill(self, tokens):
        """Time one evaluation of ``tokens`` from an empty cache, best next token included."""
        self.lib.llama_memory_clear(self.memory, True)
        self.prefix = None
        start = time.perf_counter()
        self.evaluate(tokens)
        return {"seconds": time.perf_counter() - start}

    def decode(self, prefix, n_tokens):
        """Time ``n_tokens`` greedy steps after ``prefix``; its evaluation is not timed."""
        kept = self.prefix == prefix and self.lib.llama_memory_seq_rm(
            self.memory, 0, len(prefix) - 1, -1
        )
        if not kept:
            self.lib.llama_memory_clear(self.memory, True)
        token = self.evaluate(prefix[-1:] if kept else prefix)
        self.prefix = prefix
        start = time.perf_counter()
        for _ in range(n_tokens):
            token = self.evaluate([token])
        return {"seconds": time.perf_counter() - start, "n_tokens": n_tokens}


def main():
    """Answer requests until ``quit`` or the end of the input."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # nothing but answers may reach the pipe
    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        if op == "quit":
            break
        try:
            if op == "load":
                peer = Peer(**request)
                answer = peer.facts()
            else:
                answer = getattr(peer, op)(**request)
        except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
