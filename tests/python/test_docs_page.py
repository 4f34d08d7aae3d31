"""docs/python.md: its examples run from top to bottom, and print what the page shows."""

import doctest
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import prelunet
from prelunet.evaluator.contract import ClassEntry
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.net.checkpoints import write_checkpoint
from tests.helpers.discriminating_nets import discriminating_checkpoint, noise

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
FIRST, *EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
NAMES = ("cat", "dog", "fox", "owl", "ox", "yak", "ant")
IMAGES = 28


def test_the_page_runs_and_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    classes = tuple(ClassEntry(f"n{7 * index:08}", name) for index, name in enumerate(NAMES))
    checkpoint = discriminating_checkpoint("demo", classes=len(NAMES), seed=5)
    write_checkpoint(Path("net"), replace(checkpoint, classes=classes))
    export_checkpoint(Path("net"), Path("net.onnx"))
    Image.fromarray(noise(90, 120, seed=2)).save("photo.jpg")
    namespace = {"prelunet": prelunet}
    assert PAGE.startswith(f"# prelunet in Python\n\n```python\n{FIRST}```\n")
    exec(FIRST, namespace)

    for number in range(IMAGES):  # labeled as the net sees them, except every seventh
        tint = np.random.default_rng(number).uniform(0, 1, 3)
        image = Image.fromarray((noise(40 + number, 50, seed=number) * tint).astype(np.uint8))
        found = namespace["net"].classify(image).predictions[number % 7 == 6]
        Path("val", found.wnid).mkdir(parents=True, exist_ok=True)
        image.save(Path("val", found.wnid, f"{number:02}.png"))

    test = doctest.DocTestParser().get_doctest("".join(EXAMPLES), {}, "docs/python.md", "docs/python.md", 0)
    failed, run = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test)
    assert (failed, run) == (0, sum(each.count(">>> ") for each in EXAMPLES))
    assert Image.open("where.png").width > 600
