"""The two sides of ``bench_cpu.py`` behind one small interface: ours, and llama.cpp.

A side has ``name``, ``pid`` (the process whose CPU time is its own, None when it starts one per
measurement), ``prefill(tokens) -> seconds`` and ``decode(prefix, n_tokens) -> seconds per token``.
Both sides time the same thing: the evaluation and the choice of the best next token, with nothing
of loading, tokenising or printing.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

WORKER = Path(__file__).with_name("bench_peer_worker.py")


class PeerError(Exception):
    """The peer could not be started or gave no answer; the message is one sentence."""


class Ours:
    """cudflash in this process, through its public interface."""

    name = "cudflash"

    def __init__(self, path, threads, n_ctx):
        import cudflash

        self.pid = os.getpid()
        self.engine = cudflash.load(path, device="cpu", threads=threads, n_ctx=n_ctx)
        self.greedy = cudflash.SamplingConfig(temperature=0.0)
        self.session = None
        self.prefix = None

    def settings(self):
        """Return the settings without which a figure cannot be compared with another."""
        engine = self.engine
        return {
            "activations": engine.activations,
            "kv_type": engine.kv_type,
            "kernel_path": engine.backend.kernel_path(),
        }

    def _token_times(self, session, prompt, n_tokens):
        """Return the moments at which each new token arrived, greedily chosen."""
        times = []
        for event in session.generate(
            prompt, max_tokens=n_tokens, sampling=self.greedy, speculative="off"
        ):
            if getattr(event, "token", None) is not None:
                times.append(time.perf_counter())
        return times

    def prefill(self, tokens):
        """Time one evaluation of ``tokens`` in a fresh session, best next token included."""
        session = self.engine.session()
        start = time.perf_counter()
        times = self._token_times(session, tokens, 1)
        return times[0] - start

    def step_timer(self, n_context, vocab_size):
        """Return ``seconds(n_rows)``: one pass with logits of all rows, as verifying needs them.

        The rows follow ``n_context`` tokens and are rolled back. Below the public interface,
        because the cost of a pass must not depend on what a drafter proposes.
        """
        from cudflash.model.runner import ALL, Runner

        engine = self.engine
        runner = Runner(engine.ops, engine.model, engine.work, engine.n_ctx, engine.kv_type)
        tokens = [token % vocab_size for token in range(1000, 1000 + n_context + 64)]
        runner.prefill_chunk(tokens[:n_context], True)

        def seconds(n_rows):
            start = time.perf_counter()
            runner.step(tokens[n_context : n_context + n_rows], ALL)
            elapsed = time.perf_counter() - start
            runner.rollback()
            return elapsed

        return seconds

    def decode(self, prefix, n_tokens):
        """Time greedy steps after ``prefix``; a prefix seen last time is not evaluated again.

        The model may end its text early; then the steps it made are what is timed, and one step
        at least is required.
        """
        if self.prefix != prefix:
            self.session, self.prefix = self.engine.session(), prefix
        times = self._token_times(self.session, prefix, n_tokens + 1)
        if len(times) < 2:
            return None
        return (times[-1] - times[0]) / (len(times) - 1)


class WorkerPeer:
    """llama.cpp through a worker process that keeps the model loaded and sleeps between requests."""

    name = "llama.cpp"

    def __init__(self, python, path, threads, n_ctx, flash_attn):
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self.process = subprocess.Popen(
            [str(python), str(WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )
        self.pid = self.process.pid
        self.facts = self._ask(
            op="load", path=str(Path(path).resolve()), threads=threads, n_ctx=n_ctx,
            flash_attn=flash_attn,
        )

    def _ask(self, **request):
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.errors.seek(0)
            last = (self.errors.read().strip().splitlines() or ["no message"])[-1]
            status = self.process.wait()
            ending = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
            raise PeerError(
                f"the peer's process ended with {ending} while asked to {request['op']} ({last}): "
                "after SIGILL rebuild it with the flags that scripts/bench_cpu.py --help names"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"the peer could not {request['op']}: {answer['error']}")
        return answer

    def prefill(self, tokens):
        """See the module's description."""
        return self._ask(op="prefill", tokens=tokens)["seconds"]

    def decode(self, prefix, n_tokens):
        """See the module's description."""
        answer = self._ask(op="decode", prefix=prefix, n_tokens=n_tokens)
        return answer["seconds"] / answer["n_tokens"]

    def close(self):
        """End the worker."""
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.errors.close()


class BenchPeer:
    """llama.cpp through ``llama-bench``, one short run per measurement; random tokens, no sampling.

    The second choice: every measurement loads the model anew (untimed, but caches are cold), and
    choosing the next token is not timed, which favours the peer slightly.
    """

    name = "llama.cpp"
    pid = None

    def __init__(self, program, path, threads, flash_attn):
        self.base = [str(program), "-m", str(path), "-t", str(threads), "-r", "1", "-o", "json"]
        self.base += ["-b", "512", "-ub", "512", "-fa", flash_attn]
        self.facts = {}

    def _run(self, *arguments):
        done = subprocess.run(
            [*self.base, *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise PeerError(f"llama-bench ended with exit status {done.returncode}: {last}")
        row = json.loads(done.stdout)[0]
        self.facts = {"version": row["build_commit"], "system": row["cpu_info"]}
        return row["avg_ns"] * 1e-9

    def prefill(self, tokens):
        """See the module's description; the tokens are llama-bench's own random ones."""
        return self._run("-p", str(len(tokens)), "-n", "0")

    def decode(self, prefix, n_tokens):
        """See the module's description; the prefix is as long, not the same."""
        seconds = self._run("-p", "0", "-n", str(n_tokens), "-d", str(len(prefix)))
        return seconds / n_tokens

    def close(self):
        """Nothing stays open."""


def has_llama_cpp(python):
    """Tell whether ``python`` can find the ``llama_cpp`` package (without importing it)."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('llama_cpp') is None)"
    try:
        return subprocess.run([str(python), "-c", probe], check=False).returncode == 0
    except OSError:
        return False


def command_seconds(command):
    """Return the wall time of a command that must succeed; its output goes nowhere.

    Python may keep its bytecode, as it does for every user: a setting against that would add the
    compilation of all modules to each start.
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, check=False, env=env,
        )
    except OSError as error:
        raise PeerError(f"{command[0]} could not be started: {error}") from error
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeerError(f"{command[0]} ended with exit status {done.returncode}: {last}")
    return seconds
