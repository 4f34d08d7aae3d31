"""Runs in a process of their own that is killed in the middle."""

import os
import pkgutil
import signal
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from prelunet.training.data.image_cache import ImageCache
from prelunet.training.loop.execution import Execution
from prelunet.training.loop.train import train
from prelunet.training.recipe import Recipe
from tests.training.distributed.gloo import run_to_the_end


def train_until_killed(recipe: Recipe, data: Path, folder: Path, function: str, call: int, workers: int = 0) -> None:
    """Train in a process that is killed at the given call of a function. workers: processes that decode, 0 for none."""
    threads = torch.get_num_threads()  # the same as here, as the checkpoints record it
    (ended,) = run_to_the_end(1, _train, recipe, data, folder, f"prelunet.training.{function}", call, workers, threads)
    assert ended.exit_code == -signal.SIGKILL, ended.error


def _train(  # noqa: PLR0917 - passed to another process
    recipe: Recipe, data: Path, folder: Path, function: str, call: int, workers: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    original, calls = pkgutil.resolve_name(function), count(1)

    def killed(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    memory = {"memory": 0} if workers else {}  # without memory for images, worker processes decode
    with (
        patch(function, killed),
        patch("prelunet.training.loop.trainer.ImageCache", partial(ImageCache, **memory)),
    ):
        train(recipe, data, folder, execution=Execution(workers=workers))
