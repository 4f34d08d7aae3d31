"""The options that `prelunet serve` reads, without serving."""

from collections.abc import Callable
from typing import Any

import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.serving.lifecycle import ServeResult
from prelunet.evaluator.serving.options import ServeOptions
from prelunet.evaluator.verbs import serve as serve_verb

Served = Callable[..., ServeOptions]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Return a function that runs the verb and returns its options, without serving."""
    seen: list[ServeOptions] = []

    async def serve(options: ServeOptions, _report: Any) -> ServeResult:
        seen.append(options)
        return ServeResult()

    def options_of(*arguments: str) -> ServeOptions:
        assert run(["serve", *arguments]) == 0
        return seen.pop()

    monkeypatch.setattr(serve_verb, "choose_processes", lambda _: 1)
    monkeypatch.setattr(serve_verb, "serve_until_stopped", serve)
    monkeypatch.setattr(serve_verb, "configure_logging", lambda *_: None)  # it would replace the tests' handlers
    monkeypatch.setattr(serve_verb, "require_files", lambda _: None)
    return options_of
