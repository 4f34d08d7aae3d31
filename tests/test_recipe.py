"""Recipes are read as they stand, or refused with what is wrong."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from evaluator.errors import UsageError
from training.recipe import (
    Recipe,
    automatic_crop,
    fit_to_crop,
    read_recipe,
    recipe_from_values,
    recipe_names,
)
from training.schedule import rate_at

DEMO = read_recipe("demo")


def test_every_recipe_that_comes_with_prelunet_can_be_read() -> None:
    assert "demo" in recipe_names()
    for name in recipe_names():
        assert isinstance(read_recipe(name), Recipe)


def test_a_recipe_survives_the_way_through_json() -> None:
    assert recipe_from_values(DEMO.to_json(), "run") == DEMO


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'architecture = "demo"\ncrop = 12\nscales = [12, 15]\nbatch = 4\nsteps = 9\nrate = 1\nrate_drops = []\n'
        "evaluate_every = 3\nsave_every = 2\n"
    )
    recipe = read_recipe(str(path))
    assert recipe.rate == 1.0
    assert isinstance(recipe.rate, float)
    assert recipe.dropout == 0.5  # the paper's, where the file is silent
    assert recipe.weight_decay == 5e-4
    assert recipe.scales == (12, 15)


def test_an_unknown_recipe_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no recipe 'dmeo'.*demo"):
        read_recipe("dmeo")


def test_a_missing_file_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: cannot be read"):
        read_recipe("nowhere.toml")


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("rate = = 3")
    with pytest.raises(UsageError, match="not TOML"):
        read_recipe(str(path))


def test_a_file_nested_beyond_all_measure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("scales = " + "[" * 100_000)
    with pytest.raises(UsageError, match="not TOML"):
        read_recipe(str(path))


def test_the_largest_images_that_are_meant_can_be_trained_on() -> None:
    assert replace(DEMO, crop=4096, scales=(4096, 4096)).net().crop == 4096
    with pytest.raises(UsageError, match=r"scales 4097 to 4097 should be at most 4096"):
        replace(DEMO, crop=4097, scales=(4097, 4097))


def test_a_misspelt_key_is_refused_with_all_valid_ones() -> None:
    with pytest.raises(UsageError, match="no key learning_rate in a recipe") as caught:
        recipe_from_values({**DEMO.to_json(), "learning_rate": 0.1}, "x.toml")
    for field in fields(Recipe):
        assert field.name in str(caught.value)


def test_missing_keys_are_named() -> None:
    values = DEMO.to_json()
    del values["batch"], values["rate"]
    with pytest.raises(UsageError, match="lacks batch, rate"):
        recipe_from_values(values, "x.toml")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("steps", 10.5, "steps should be of type int"),
        ("steps", True, "steps should be of type int"),
        ("rate", "0.1", "rate should be of type float"),
        ("scales", [28], "scales should be a list of 2"),
        ("scales", 28, "scales should be a list of 2"),
        ("rate_drops", [0.5, "x"], "rate_drops should be of type float"),
        ("mirror", 1, "mirror should be of type bool"),
        ("steps", 0, "should be at least 1"),
        ("rate", 0.0, "rate 0.0 should be above 0"),
        ("rate", float("nan"), "rate nan should be above 0"),
        ("rate_drops", [0.8, 0.5], "should rise between 0 and 1"),
        ("rate_drops", [1500], "should rise between 0 and 1"),
        ("momentum", 1.0, "momentum 1.0"),
        ("dropout", 1.0, "dropout 1.0"),
        ("weight_decay", -1.0, "weight_decay -1.0"),
        ("scales", [36, 28], "scales 36 to 28 should rise"),
        ("scales", [20, 36], "should rise from the crop, 28"),
        ("activation", "swish", "activation 'swish' is not one of"),
        ("architecture", "D", "no architecture 'D'"),
        ("crop", 8, "too small"),
        ("seed", -1, "seed -1"),
        ("scales", [28, 1_000_000], "scales 28 to 1000000 should be at most 4096"),
        ("scales", [28, 4097], "at most 4096"),
        ("crop", 0, "a whole number from 1 to 4096, not 0"),
        ("batch", 1_000_000_000, "batch 1000000000 should be at least 1 and at most 65536"),
        ("batch", 0, "batch 0 should be at least 1"),
        ("steps", 10**30, "at most 1000000000"),
        ("save_every", 10**10, "at most 1000000000"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipe_from_values({**DEMO.to_json(), key: value}, "x.toml")


def test_the_rate_falls_after_each_stated_part_of_the_run() -> None:
    recipe = replace(DEMO, steps=10, rate=0.5, rate_drops=(0.35, 0.8), rate_factor=0.1)
    rates = [rate_at(recipe, step) for step in range(10)]
    assert rates == pytest.approx([0.5] * 4 + [0.05] * 4 + [0.005] * 2, rel=1e-12)


def test_another_number_of_steps_keeps_the_shape_of_the_schedule() -> None:
    long, short = DEMO, replace(DEMO, steps=DEMO.steps // 10)
    assert [rate_at(short, step) for step in range(short.steps)] == [
        rate_at(long, 10 * step) for step in range(short.steps)
    ]


@pytest.mark.parametrize(
    ("median", "stride", "crop"), [(80, 4, 72), (32, 4, 28), (256, 16, 224), (81, 4, 72), (2, 4, 4)]
)
def test_the_automatic_crop_is_seven_eighths_rounded_to_the_stride(median: float, stride: int, crop: int) -> None:
    assert automatic_crop(median, stride) == crop


def test_another_crop_takes_scales_batch_and_rate_with_it_but_not_the_steps() -> None:
    recipe = replace(DEMO, crop=28, scales=(28, 36), batch=64, rate=0.01)
    fitted = fit_to_crop(recipe, 56)
    assert fitted == replace(recipe, crop=56, scales=(56, 72), batch=32, rate=0.005)


def test_fitting_a_recipe_to_its_own_crop_changes_nothing() -> None:
    assert fit_to_crop(DEMO, DEMO.crop) == DEMO


def test_a_crop_too_small_for_the_net_is_refused() -> None:
    with pytest.raises(UsageError, match="too small"):
        fit_to_crop(DEMO, 8)
