"""The cards of evaluations and comparisons in a browser, as a notebook shows them."""

from collections.abc import Callable
from pathlib import Path

import pytest

import prelunet
from prelunet.evaluator.python.evaluation import write_evaluation
from tests.reporting.browser.browsing import HOSTILE, LAPTOP, PHONE, MonitoredPage

pytestmark = pytest.mark.browser

Visit = Callable[..., MonitoredPage]


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_hostile_names_are_only_text_and_the_cards_fit_the_screen(
    visit: Visit, hostile: Path, tmp_path: Path, size: tuple[int, int]
) -> None:
    evaluation = write_evaluation(hostile.parents[1])
    comparison = prelunet.compare(evaluation, evaluation, output=tmp_path)
    page = tmp_path / "cards.html"
    head = "<!doctype html><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    page.write_text(head + evaluation._repr_html_() + comparison._repr_html_())
    watched = visit(page, size=size)
    assert watched.page.evaluate("window.hacked") is None
    assert watched.overflow() == 0
    names = watched.page.locator("th").all_inner_texts()
    assert HOSTILE[0] in names
    assert HOSTILE[1] in names
