"""Every key of a recipe is an option of `prelunet train`."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from prelunet.evaluator.cli import run as run_program
from prelunet.evaluator.errors import UsageError
from prelunet.training.recipe import Recipe, read_recipe
from prelunet.training.verbs.recipe_options import override_keys

SMALL = read_recipe("small")

# key → text on the command line, and its value; none is the value in the recipe
VALUES: dict[str, tuple[Any, Any]] = {
    "architecture": ("E", "E"),
    "crop": ("224", 224),
    "scales": ("230,310", (230, 310)),
    "batch": ("65", 65),
    "steps": ("17", 17),
    "epochs": ("2.5", 2.5),
    "rate": ("0.02", 0.02),
    "rate_policy": ("plateau", "plateau"),
    "rate_drops": ("0.25,0.5", (0.25, 0.5)),
    "rate_factor": ("0.2", 0.2),
    "patience": ("7", 7),
    "most_drops": ("3", 3),
    "evaluate_every": ("11", 11),
    "evaluation_scale": ("300", 300),
    "save_every": ("12", 12),
    "keep_every": ("13", 13),
    "activation": ("lrelu", "lrelu"),
    "momentum": ("0.8", 0.8),
    "weight_decay": ("1e-3", 1e-3),
    "decay_biases": (False, False),
    "decay_slopes": (True, True),
    "bias_rate": ("2", 2.0),
    "dropout": ("0.4", 0.4),
    "mirror": (False, False),
    "color": ("0.1", 0.1),
    "mean": ("channel", "channel"),
    "init": ("xavier", "xavier"),
    "init_std": ("0.02", 0.02),
    "first_layer": ("exact", "exact"),
    "fc_stds": ("0.1,0.2,0.3", (0.1, 0.2, 0.3)),
    "precision": ("bf16", "bf16"),
    "channels_last": (False, False),
    "compile": (True, True),
    "accumulate": ("2", 2),
    "max_refused": ("0.5", 0.5),
    "seed": ("5", 5),
}
REQUIRED_WITH = {  # other keys that a value requires
    "architecture": {"crop": "224", "scales": "256,256"},
    "crop": {"scales": "230,310"},
    "rate_policy": {"rate_drops": ""},
}


@pytest.mark.parametrize("name", [key.name for key in fields(Recipe)])
def test_each_key_can_be_overridden(name: str) -> None:
    given, meant = VALUES[name]
    others = REQUIRED_WITH.get(name, {})
    recipe = override_keys(SMALL, {name: given, **others})
    assert getattr(recipe, name) == meant != getattr(SMALL, name)
    untouched = {key.name for key in fields(Recipe)} - {name, *others, "steps", "epochs"}
    assert all(getattr(recipe, key) == getattr(SMALL, key) for key in untouched)


def test_a_length_in_epochs_replaces_one_in_steps_and_vice_versa() -> None:
    recipe = override_keys(SMALL, {"epochs": "3"})
    assert (recipe.epochs, recipe.steps) == (3.0, None)
    assert override_keys(recipe, {"steps": "4"}) == replace(SMALL, steps=4)
    with pytest.raises(UsageError, match=r"steps 4 and epochs 3\.0 exclude each other"):
        override_keys(SMALL, {"epochs": "3", "steps": "4"})


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("batch", "many", "--batch many: Expected `int`"),
        ("batch", "2.5", "--batch 2.5: Expected `int`"),
        ("rate", "fast", "--rate fast: Expected `float`"),
        ("scales", "28", "--scales 28: Expected `array` of length 2"),
        ("fc_stds", "1,2,x", "--fc-stds 1,2,x: Expected `float`"),
        ("init", "he", "unknown init 'he'; choose one of fan-out"),
    ],
)
def test_an_invalid_value_is_refused_with_the_name_of_its_option(key: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        override_keys(SMALL, {key: text})


def test_the_help_describes_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["train", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for key in fields(Recipe):
        flag = key.name.replace("_", "-")
        assert f"--{flag} " in out
    assert "--mirror / --no-mirror" in out
    assert "Momentum of stochastic gradient descent. At least 0 and below 1. [default: 0.9]" in out


def test_an_option_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(["train", "--recipe", "demo", "--out", "x", "--learning-rate", "1"]) == 2
    assert "--learning-rate" in capsys.readouterr().err
