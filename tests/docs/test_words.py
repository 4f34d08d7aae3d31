"""README and docs are short enough to be read."""

import re
from pathlib import Path

import pytest

from tests.helpers.doc_pages import DOCS, PAGES, README, name_of, sentences


def words(page: Path) -> int:
    """Count the words that a reader sees, code and tables included."""
    return len(re.sub("<!--.*?-->", "", page.read_text()).split())


def test_the_readme_has_at_most_900_words() -> None:
    assert words(README) <= 900


def test_the_docs_have_at_most_18000_words() -> None:
    counts = {name_of(page): words(page) for page in DOCS}
    assert sum(counts.values()) <= 18_000, counts


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_sentences_of_18_words_on_average_at_most(page: Path) -> None:
    lengths = [len(re.findall(r"\S*\w\S*", sentence)) for sentence in sentences(page)]
    longest = sorted(sentences(page), key=lambda sentence: -len(sentence.split()))[:3]
    assert sum(lengths) / len(lengths) <= 18, longest
