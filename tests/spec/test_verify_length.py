"""Legal verify lengths and the arithmetic of budgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudflash.errors import UsageError
from cudflash.spec.verify_length import (
    check_verify_length,
    cut_after_stop,
    default_verify_length,
    draft_budget,
    legal_lengths,
    round_down,
)


@pytest.mark.parametrize("length", [3, 7, 15])
def test_legal_lengths_pass(length):
    """Catches a legal length refused, also at the smallest block that holds it."""
    assert check_verify_length(length) == check_verify_length(length, length + 1) == length


@pytest.mark.parametrize("length", [-1, 0, 1, 2, 4, 8, 14, 16, 3.0, True, "7", None])
def test_other_lengths_are_refused(length):
    """Catches a length that reaches the device although no pass of that width is planned."""
    with pytest.raises(UsageError, match="expected 3, 7 or 15; pass one of them"):
        check_verify_length(length)


@pytest.mark.parametrize(("length", "block"), [(15, 15), (15, 8), (7, 7), (3, 3)])
def test_lengths_longer_than_the_block_are_refused(length, block):
    """Catches drafts that the block does not have: at most B - 1."""
    with pytest.raises(UsageError, match=f"block( has|.*) {block}"):
        check_verify_length(length, block)


def test_a_block_of_three_rows_has_no_legal_length():
    """Catches a silent fallback for a draft that cannot be used."""
    assert legal_lengths(3) == () and legal_lengths(4) == (3,)
    for function in (default_verify_length, lambda b: round_down(7, b)):
        with pytest.raises(UsageError, match="3 rows, expected at least 4"):
            function(3)


@pytest.mark.parametrize(
    ("length", "block", "taken"),
    [(3, None, 3), (6, None, 3), (7, None, 7), (14, 16, 7), (99, 16, 15), (15, 8, 7), (7, 5, 3)],
)
def test_rounding_down_says_so(length, block, taken):
    """Catches rounding up, and rounding in silence."""
    value, note = round_down(length, block)
    assert value == taken and bool(note) == (length != taken)
    assert not note or (f"{length} rounded down to {taken}" in note)


@pytest.mark.parametrize("length", [2, 0, -5, "7"])
def test_nothing_to_round_down_to(length):
    """Catches a length below 3 that becomes 3, which is rounding up."""
    with pytest.raises(UsageError, match="at least 3"):
        round_down(length)


def test_default_is_seven_where_the_block_allows():
    """Catches a default longer than the block."""
    assert [default_verify_length(b) for b in (None, 16, 8, 7, 4)] == [7, 7, 7, 3, 3]


@given(
    st.sampled_from([3, 7, 15]), st.integers(1, 40), st.integers(1, 40),
    st.none() | st.integers(1, 20),
)  # fmt: skip
def test_budget_never_exceeds_what_can_be_emitted(length, room, left, most):
    """Catches drafts beyond the limit or the context, and needless shortening."""
    n = draft_budget(length, room, left, most)
    assert 0 <= n <= length and n + 1 <= max(room, 1) and n + 1 <= max(left, 1)
    assert most is None or n <= most
    assert n in (length, room - 1, left - 1, most)


def test_cut_after_stop():
    """Catches drafts kept after the first stop token, and the stop token itself dropped."""
    assert cut_after_stop([7, 8, 2, 9, 11], {2, 5}) == 3
    assert cut_after_stop([7, 5, 9], {2, 5}) == 2
    assert cut_after_stop([7, 5, 9], set()) == 3
    assert cut_after_stop([], {2}) == 0
