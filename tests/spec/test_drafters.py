"""Scripted drafters say what they are meant to say; proposals are checked."""

import numpy as np
import pytest

import cudflash.drafters as public
from cudflash.drafters import (
    POINT_MASS,
    AlwaysWrong,
    Cycle,
    DraftContext,
    Drafter,
    KeepK,
    NoDrafter,
    Oracle,
    Proposal,
    ProposalDistribution,
    Random,
    TokenDrafter,
)
from cudflash.errors import UsageError
from cudflash.spec.guard import GuardedDrafter
from cudflash.spec.proposals import ProposalError, check_proposal, uniform
from cudflash.spec.transaction import Transaction

IDS = (10, 11, 12, 13, 14, 15)


def context(index=0, n_prompt=4, vocab=50):
    return DraftContext([0] * (n_prompt + index), n_prompt + index, n_prompt, vocab)


@pytest.mark.parametrize(
    ("drafter", "index", "expected"),
    [
        (Oracle(IDS), 0, (11, 12, 13)),
        (Oracle(IDS), 3, (14, 15)),
        (Oracle(IDS), 5, ()),
        (Oracle(IDS), 99, ()),
        (AlwaysWrong(IDS), 0, (12, 13, 14)),
        (AlwaysWrong((1, 49)), 0, (0,)),
        (KeepK(IDS, 2), 1, (12, 13, 15)),
        (KeepK(IDS, 9), 0, (11, 12, 13)),
        (NoDrafter(), 0, ()),
    ],
)
def test_scripts(drafter, index, expected):
    """Catches a script one token off: the anchor is the answer's token ``index``."""
    proposal = drafter.propose(0, 3, context(index))
    assert tuple(proposal.tokens) == expected and proposal.point_mass
    check_proposal(proposal, 3, 50)


def test_cycle_counts_settled_rounds_and_starts_anew():
    """Catches a cycle that advances on a round that was rolled back, or across answers."""
    drafter = Cycle(IDS, (2, 0))

    def right(index):
        proposal = drafter.propose(0, 3, context(index))
        return sum(a == b for a, b in zip(proposal.tokens, IDS[index + 1 :]))

    assert right(0) == 2
    drafter.observe((0, 1, 2))
    drafter.commit(1)
    assert right(1) == 0
    drafter.rollback()
    assert right(1) == 0
    drafter.observe((0,))
    drafter.commit(1)
    drafter.observe((0,))
    drafter.commit(1)  # a round without proposal is not one of its turns
    assert right(2) == 2
    assert right(0) == 2


def test_random_depends_on_position_only_and_tells_its_distribution():
    """Catches randomness that changes with the verify length or repeats the answer's draws."""
    one, two = Random(1), Random(2)
    long = one.propose(0, 15, context()).tokens
    assert one.propose(0, 3, context()).tokens == long[:3]
    assert one.propose(0, 3, context(2)).tokens == long[2:5]
    assert two.propose(0, 15, context()).tokens != long
    proposal = check_proposal(one.propose(0, 7, context()), 7, 50)
    assert not proposal.point_mass and proposal.probability(3) == 1 / 50
    assert max(Random(1, 5).propose(0, 15, context()).tokens) < 5
    many = [Random(s).propose(0, 15, context()).tokens for s in range(400)]
    counts = np.bincount(np.ravel(many), minlength=50)
    assert abs(counts - 120).max() < 5 * np.sqrt(120)


def test_random_knows_large_vocabularies():
    """Catches a uniform distribution whose sum drifts from 1."""
    proposal = Random(3).propose(0, 2, context(vocab=262_144))
    check_proposal(proposal, 2, 262_144)
    assert uniform(7).of(6) == 1 / 7 and uniform(7).of(7) == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepK(IDS, -1),
        lambda: KeepK(IDS, 1.5),
        lambda: Cycle(IDS, ()),
        lambda: Random(-1),
        lambda: Random(0, 0),
        lambda: AlwaysWrong(IDS).propose(0, 1, context(vocab=1)),
    ],
)
def test_senseless_scripts_are_refused(make):
    """Catches settings that would make a script something else."""
    with pytest.raises(UsageError):
        make()


def test_a_user_written_drafter_fits_the_protocol():
    """Catches a protocol that the documented way of writing a drafter does not meet."""

    class Repeat(TokenDrafter):
        name = "repeat"

        def propose(self, anchor, n, context):
            return Proposal((anchor,) * n, POINT_MASS)

    drafter = Repeat()
    assert isinstance(drafter, Drafter)
    guard = GuardedDrafter(drafter, 50)
    guard.observe((1, 2, 3))
    guard.commit(3)
    assert guard.propose(9, 2, DraftContext([1, 2, 3], 3, 3, 50)).tokens == (9, 9)
    assert guard.drafter_max is None and (guard.name, guard.taps) == ("repeat", ())
    assert guard.rewind(2) == 2 and drafter.length == 2
    with pytest.raises(UsageError, match="without propose"):
        GuardedDrafter(object(), 50)
    for name in public.__all__:
        assert getattr(public, name) is not None


def test_a_failed_drafter_starts_the_next_answer_from_nothing():
    """Catches rows of a failed answer that condition the next one."""
    drafter = Oracle(IDS)
    guard = GuardedDrafter(drafter, 50)
    guard.observe((1, 2, 3))
    guard.commit(3)
    assert guard.propose(0, 2, context(5)) is None and guard.fault.kind == "context-hole"
    assert guard.rewind(3) == 0 and guard.fault is None and drafter.length == 0
    drafter.rewind = lambda length: 7
    assert guard.rewind(3) == 0 and guard.fault.step == "rewind"


def test_a_proposal_is_cut_with_all_that_belongs_to_it():
    """Catches a distribution or confidence that no longer lines up after a cut."""
    qs = tuple(ProposalDistribution(np.array([i]), np.array([1.0])) for i in range(3))
    proposal = Proposal((0, 1, 2), qs, (0.5, 0.6, 0.7)).first(2)
    assert (proposal.tokens, proposal.distribution, proposal.confidence) == (
        (0, 1), qs[:2], (0.5, 0.6),
    )  # fmt: skip
    assert Proposal((0, 1), POINT_MASS).first(5).tokens == (0, 1)
    checked = check_proposal(Proposal(np.array([3, 4], np.int32), POINT_MASS), 2, 50)
    assert checked.tokens == (3, 4) and all(type(t) is int for t in checked.tokens)
    with pytest.raises(ProposalError, match="below the vocabulary size 4"):
        check_proposal(Proposal((4,), POINT_MASS), 1, 4)


def test_distributions_by_id_and_by_list_agree():
    """Catches a lookup that mixes up positions and ids."""
    dense = ProposalDistribution(None, np.array([0.1, 0.2, 0.7]))
    sparse = ProposalDistribution(np.array([2, 0, 1]), np.array([0.7, 0.1, 0.2]))
    for q in (dense, sparse):
        assert [q.of(t) for t in (0, 1, 2, 9)] == [0.1, 0.2, 0.7, 0.0]
        assert q.of_many(np.array([9, 2, 0])).tolist() == [0.0, 0.7, 0.1]


class Part:
    """Target, drafter and chain of a transaction in one; can fail."""

    def __init__(self, fail=()):
        self.calls, self.fail = [], fail

    def _call(self, name):
        self.calls.append(name)
        if name in self.fail:
            raise OSError(name)

    def commit(self, n):
        self._call("commit")

    def rollback(self):
        self._call("rollback")

    def snapshot(self):
        return "before"

    def restore(self, snapshot):
        self._call(f"restore {snapshot}")


def test_transaction_moves_all_or_none():
    """Catches a part that stays behind when another one fails."""
    target, drafter, chain = Part(), Part(), Part()
    with Transaction(target, drafter, chain) as transaction:
        transaction.commit(2)
    assert (target.calls, drafter.calls, chain.calls) == (["commit"], ["commit"], [])
    with pytest.raises(KeyboardInterrupt), Transaction(target, drafter, chain):
        raise KeyboardInterrupt
    assert target.calls[-1] == drafter.calls[-1] == "rollback"
    assert chain.calls == ["restore before"]
    target, drafter, chain = Part(["commit", "rollback"]), Part(), Part()
    transaction = Transaction(target, drafter, chain)
    transaction.begin()
    with pytest.raises(OSError, match="rollback"):
        transaction.commit(1)
    assert drafter.calls == ["rollback"] and chain.calls == ["restore before"]
    assert not transaction.open
    transaction.rollback()
    with pytest.raises(RuntimeError, match="begin"):
        transaction.commit(1)
    transaction.begin()
    with pytest.raises(RuntimeError, match="open"):
        transaction.begin()


def test_a_drafter_keeps_only_rows_of_the_session():
    """Catches rows of another prompt, or of another session, that condition an answer."""
    drafter = Oracle(IDS)
    guard = GuardedDrafter(drafter, 50)
    guard.observe((1, 2, 3, 4))
    guard.commit(3)
    assert guard.rewind(3, [1, 2, 9, 4]) == 2 and drafter.length == 2
    guard.observe((9, 4))
    guard.commit(2)
    assert guard.rewind(4, [1, 2, 9, 4, 5]) == 4
    assert guard.rewind(4, [7, 2, 9, 4]) == 0
    drafter.observe((1, 2))
    drafter.commit(2)  # by somebody else
    assert guard.rewind(2, [1, 2, 3]) == 0 and drafter.length == 0
