"""What finding out whether drafting pays may cost: the account, and the bound that it keeps.

Owns the arithmetic of the bound. Must not know rounds or times: it counts plain steps, p each, the
time of one plain round.

Whatever is done for drafting and is not plain decoding costs some of them: a round that drafts n
tokens, takes c milliseconds and emits e tokens loses c / p - e (gains, where that is negative);
timing a pass by itself loses all of it; feeding a draft that does not draft loses what that takes.

**The bound.** The account of an answer begins at ``ALLOWANCE``, never holds more, gets ``REFILL``
per emitted token and pays each loss. Nothing is begun unless the account holds what it loses in the
worst case: a round, cost(n) / p - 1, all drafts rejected. So over any T tokens the losses are at
most ALLOWANCE + REFILL x T + one error of what was expected: for 1,000 tokens 8 + 10 = 18 steps,
1.8 %, however bad the draft is and however often the text changes.

**Preparations.** Before a pass of a new shape runs it is recorded, which takes no time that depends
on the model's size: nothing to a step of 20 ms, dozens of steps to one of 0.2 ms. Where they take
at most ``PREPARATION`` steps in all, drafting begins at once and they are a debt: no obstacle to a
draft that pays, but a pause ends only when it is paid off, too, at the same ``REFILL``. So 1,000
tokens lose 8 + 10 + 6 = 24 steps at most, 2.4 %. Where they take more (``spec.prospects``), the
account begins at ALLOWANCE + PREPARATION instead, and each step of finding out is paid from it in
advance; up to ``PURSE`` may be saved up for one. From the start of an answer that is again
14 + 10 = 24 steps in 1,000 tokens, in any later 1,000 of it 32 + 10 = 42. A step that would cost
more than ``PURSE`` is not made.

The rest to 5 % is for what is not seen here: errors of p, kernels of the draft that a process loads for
the first time and, where drafting has begun, capturing layers. A pause of a quick target is plain
decoding itself, at one comparison per token.
"""

from math import ceil

ALLOWANCE = 8.0  # plain steps
REFILL = 0.01  # plain steps per emitted token
PREPARATION = 6.0  # plain steps: when preparing takes less, drafting begins at once
PURSE = 32.0  # plain steps that may be saved up, where preparing takes more
SLACK = 0.1  # of a price that is waited for, so that it is enough when it is looked at again
MOST_DEBT = 100.0  # plain steps: beyond, it is the machine's doing


class Account:
    """Plain steps that may be spent on finding out.

    Attributes
    ----------
    balance, debt : float
    """

    def __init__(self):
        self.balance, self.debt, self._most = ALLOWANCE, 0.0, ALLOWANCE

    @property
    def spent(self):
        """Plain steps that were spent and not regained."""
        return ALLOWANCE - self.balance + self.debt

    def save_up(self):
        """From here on preparations are paid in advance."""
        self.balance += PREPARATION
        self._most = PURSE

    def pay(self, loss, off_debt=False):
        """Pay a loss; a negative one is paid in, and pays off the debt first where that is said."""
        if loss < 0 and self.debt > 0 and off_debt:
            paid = min(self.debt, -loss)
            self.debt, loss = self.debt - paid, loss + paid
        self.balance = min(self._most, self.balance - loss)

    def owe(self, steps):
        """Add to the debt."""
        self.debt += min(steps, MOST_DEBT)

    def holds(self, price):
        """Whether a price can be paid now, the debt included."""
        return self.debt + price <= self.balance

    def tokens_until(self, price):
        """Tokens to be emitted until it can be paid; 0 for now."""
        missing = self.debt + price - self.balance
        return ceil((missing + SLACK * price) / REFILL) if missing > 0 else 0
