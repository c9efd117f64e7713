"""Muon for matrices, Adam for the rest, and a schedule that runs on CPU time.

Muon is after Keller Jordan's "Muon: an optimizer for hidden layers" (modded-nanogpt): momentum,
then five Newton-Schulz steps towards the nearest orthogonal matrix, here on stacks of matrices of
one shape. The schedule never looks at a clock on the wall, so that a paused or crowded machine
changes how long a training takes and not what it computes per unit of work.
"""

from __future__ import annotations

import time

import torch

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic step, from modded-nanogpt
NS_STEPS = 5


def orthogonalise(g: torch.Tensor) -> torch.Tensor:
    """Return the stack (n, rows, columns) with singular values moved close to 1, bfloat16."""
    a, b, c = NS_COEFFICIENTS
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x.mT if flip else x


class Optimizer:
    """One step for all parameters.

    Parameters
    ----------
    params : dict of str to Tensor
    rates : dict of str to float
        Learning rates: "matrix" (Muon), "embedding", "head", "vector" (Adam).
    decay : float
        Decoupled weight decay of matrices, times the learning rate.
    """

    def __init__(self, params, rates, decay=0.0, betas=(0.8, 0.95), momentum=0.95):
        self.params, self.rates, self.decay = params, rates, decay
        self.betas, self.momentum = betas, momentum
        self.t = 0
        self.state = {}
        self.stacks = {}  # shape -> names
        for name, p in params.items():
            kind = self.kind(name, p)
            if kind == "matrix":
                self.stacks.setdefault(tuple(p.shape), []).append(name)
                self.state[name] = {"m": torch.zeros_like(p)}
            else:
                self.state[name] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}

    @staticmethod
    def kind(name, p):
        """Which rate a parameter takes."""
        if name in ("embedding", "selector_predecessor", "selector_successor"):
            return "embedding"
        if name == "head":
            return "head"
        # a convolution has a kernel per channel: no matrix with directions to make equal
        return "matrix" if p.ndim == 2 and not name.endswith("ssm_conv") else "vector"

    @torch.no_grad()
    def step(self, factor):
        """Update with all learning rates times ``factor``; gradients are cleared."""
        self.t += 1
        b1, b2 = self.betas
        for name, p in self.params.items():
            kind = self.kind(name, p)
            if kind == "matrix" or p.grad is None:
                continue
            m, v = self.state[name]["m"], self.state[name]["v"]
            m.lerp_(p.grad, 1 - b1)
            v.lerp_(p.grad.square(), 1 - b2)
            step = (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + 1e-9)
            p.add_(step, alpha=-self.rates[kind] * factor)
            p.grad = None
        rate = self.rates["matrix"] * factor
        for (rows, columns), names in self.stacks.items():
            found = []
            for name in names:
                m, g = self.state[name]["m"], self.params[name].grad
                m.lerp_(g, 1 - self.momentum)
                found.append(g.lerp(m, self.momentum))
                self.params[name].grad = None
            updates = orthogonalise(torch.stack(found)).float()
            scale = max(1.0, rows / columns) ** 0.5
            for name, update in zip(names, updates):
                p = self.params[name]
                p.mul_(1 - rate * self.decay).add_(update, alpha=-rate * scale)

    def state_dict(self):
        """Everything but the parameters."""
        return {"t": self.t, "state": self.state}

    def load_state_dict(self, saved):
        """Continue from ``state_dict``."""
        self.t, self.state = saved["t"], saved["state"]


class CpuClock:
    """CPU seconds of this training, over restarts.

    Parameters
    ----------
    used : float
        Seconds of earlier processes.
    """

    def __init__(self, used=0.0):
        self.before, self.start = used, time.process_time()
        self.wall_start = time.monotonic()

    @property
    def used(self):
        """CPU seconds so far, all threads."""
        return self.before + time.process_time() - self.start

    @property
    def wall(self):
        """Seconds since this process started training."""
        return time.monotonic() - self.wall_start


def rate_factor(progress, step, flat, warmup=40):
    """Factor on the learning rates: a short warm-up in steps, flat, then linear to 0.

    Parameters
    ----------
    progress : float
        Share of the CPU time that is used.
    step : int
    flat : float
        Share of the training at the full rate.
    warmup : int
    """
    down = 1.0 if progress < flat else max(0.0, (1.0 - progress) / (1.0 - flat))
    return min(1.0, (step + 1) / warmup) * down
