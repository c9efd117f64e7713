"""The reach of a draft, measured: a window that is not the file's is named, however it came about."""


import pytest

from cudflash.reach_check import WINDOW_REACH, check_reach
from cudflash.verify import Verifier
from tests.helpers.speculation import draft_engine

WINDOW = 32  # of v1-muse-swa


@pytest.mark.parametrize("settings", [{}, {"draft_sink": 0}, {"draft_sink": 8}], ids=str)
def test_a_sound_window_is_not_named(settings):
    """Catches a false alarm at the edge of the window or of the pinned rows."""
    assert check_reach(draft_engine("v1-muse-swa", **settings)) is None


def test_nothing_is_concluded_where_a_layer_sees_everything():
    """Catches a reach that is compared with a window that no file states."""
    assert check_reach(draft_engine("v1-qwen3-full")) is None


@pytest.mark.parametrize("window, seen", [(16, 16), (31, 31), (33, 33), (64, 64)])
def test_an_overridden_window_is_measured(window, seen):
    """Catches a check that asks the configuration instead of the draft."""
    found = check_reach(draft_engine("v1-muse-swa", draft_window=window, draft_sink=8))
    assert found.name == WINDOW_REACH and found.numbers["stated"] == WINDOW
    assert found.numbers["reach"] == seen


def test_no_window_at_all_is_measured():
    """Catches a draft that sees everything where its file says that it must not."""
    found = check_reach(draft_engine("v1-muse-swa", draft_window=0))
    assert found.numbers["reach"] > 2 * WINDOW and "at least" in found.sentence


@pytest.mark.parametrize("window", [WINDOW // 2, WINDOW // 4])
def test_a_silently_halved_window_is_named_by_verify(window, monkeypatch):
    """Catches the fault that acceptance does not show: the configuration says what the file says, the
    spans that the kernels read do not. Everything else of verify passes."""
    one = draft_engine("v1-muse-swa")
    from cudflash.model.draft_context import DraftContext

    sound = DraftContext.span_terms

    def halved(stated, causal, n_rows):
        return sound(window if stated == WINDOW else stated, causal, n_rows)

    monkeypatch.setattr(DraftContext, "span_terms", staticmethod(halved))
    report = Verifier(one, max_tokens=12).run([list(range(3, 60))], scripted=False)
    assert report.passed
    found = {finding["name"]: finding for finding in report.findings}
    assert found[WINDOW_REACH]["numbers"]["reach"] == window
