"""Recipes are read without conversions, or refused with the reason."""

from dataclasses import fields, replace
from importlib import resources
from pathlib import Path

import pytest

from prelunet.evaluator.errors import UsageError
from prelunet.training.loop.trainer import count_plateaus, rate_at
from prelunet.training.recipe import (
    Recipe,
    automatic_crop,
    changes_for_crop,
    read_recipe,
    recipe_from_values,
    recipe_names,
)

SMALL = read_recipe("small")


def test_every_built_in_recipe_can_be_read() -> None:
    assert "demo" in recipe_names()
    for name in recipe_names():
        assert isinstance(read_recipe(name), Recipe)


def test_a_recipe_round_trips_through_json() -> None:
    for name in recipe_names():
        recipe = read_recipe(name)
        assert recipe_from_values(recipe.to_json(), "run") == recipe


def test_each_recipe_starts_with_its_command_time_and_result() -> None:
    for name in recipe_names():
        lines = (
            (resources.files("prelunet.training") / "recipes" / f"{name}.toml").read_text(encoding="utf-8").splitlines()
        )
        head = "\n".join(lines[: lines.index("")])
        assert f"prelunet train --recipe {name} " in head
        assert "# Time: " in head
        assert "# Result: " in head or "# Expected result: " in head
        assert read_recipe(name).architecture in {name, "demo"}


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_the_recipes_of_the_large_nets_follow_the_paper(name: str) -> None:
    recipe = read_recipe(name)  # PReLU-nets, section 4 "Training"
    assert (recipe.crop, recipe.scales, recipe.mirror, recipe.mean) == (224, (256, 512), True, "image")
    assert (recipe.batch, recipe.momentum, recipe.weight_decay, recipe.dropout) == (128, 0.9, 0.0005, 0.5)
    assert [rate_at(recipe.in_steps(100), 0, drops) for drops in (0, 1, 2, 3)] == pytest.approx(
        [1e-2, 1e-3, 1e-4, 1e-4]
    )
    assert (recipe.decay_biases, recipe.decay_slopes, recipe.bias_rate) == (False, False, 2)  # their Caffe files
    assert (recipe.epochs, recipe.color, recipe.init, recipe.first_layer) == (80, 0.1, "fan-out", "half")


def test_epochs_are_passes_over_the_images_of_train_in_whole_steps() -> None:
    recipe = replace(SMALL, steps=None, epochs=2.5, batch=64)
    assert recipe.in_steps(1000).steps == 39  # 2500/64 = 39.06
    assert recipe.in_steps(1014).steps == 40  # 39.6
    assert recipe.in_steps(3).steps == 1
    assert recipe.in_steps(1000).total_steps == 39
    assert SMALL.in_steps(1000) == SMALL


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'architecture = "demo"\ncrop = 12\nscales = [12, 15]\nbatch = 4\nsteps = 9\nrate = 1\nrate_drops = []\n'
        "evaluate_every = 3\nsave_every = 2\n"
    )
    recipe = read_recipe(str(path))
    assert recipe.rate == 1.0
    assert isinstance(recipe.rate, float)
    assert recipe.dropout == 0.5  # the paper's, by default
    assert recipe.weight_decay == 5e-4
    assert recipe.scales == (12, 15)


def test_an_unknown_recipe_is_refused_with_the_valid_names() -> None:
    with pytest.raises(UsageError, match=r"no recipe 'dmeo'.*demo"):
        read_recipe("dmeo")


def test_a_missing_file_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: cannot be read"):
        read_recipe("nowhere.toml")


def test_invalid_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("rate = = 3")
    with pytest.raises(UsageError, match="invalid TOML"):
        read_recipe(str(path))


def test_deeply_nested_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("scales = " + "[" * 100_000)
    with pytest.raises(UsageError, match="invalid TOML"):
        read_recipe(str(path))


def test_numbers_at_their_limits_are_accepted() -> None:
    assert recipe_from_values({**SMALL.to_json(), "rate": 10**12, "weight_decay": 1e12}, "x").rate == 1e12


def test_the_largest_supported_scales_are_accepted() -> None:
    assert replace(SMALL, crop=4096, scales=(4096, 4096)).build_architecture().crop == 4096
    with pytest.raises(UsageError, match=r"scales 4097 to 4097 should ascend .* to at most 4096"):
        replace(SMALL, crop=4097, scales=(4097, 4097))


def test_slopes_that_are_not_learned_cannot_be_decayed() -> None:
    with pytest.raises(UsageError, match="decay_slopes needs slopes that are learned, but the activation is relu"):
        replace(SMALL, activation="relu", decay_slopes=True)


def test_a_misspelled_key_is_refused_with_all_valid_ones() -> None:
    with pytest.raises(UsageError, match="unknown recipe key learning_rate") as caught:
        recipe_from_values({**SMALL.to_json(), "learning_rate": 0.1}, "x.toml")
    for field in fields(Recipe):
        assert field.name in str(caught.value)


def test_missing_keys_are_named() -> None:
    values = SMALL.to_json()
    del values["batch"], values["rate"]
    with pytest.raises(UsageError, match="no value for batch, rate"):
        recipe_from_values(values, "x.toml")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("steps", 10.5, "steps: Expected `int | null`, got `float`"),
        ("steps", True, "steps: Expected `int"),
        ("rate", "0.1", "rate: Expected `float`, got `str`"),
        ("rate", 10**400, "rate: Number out of range"),
        ("scales", [28], "scales: Expected `array` of length 2, got 1"),
        ("scales", 28, "scales: Expected `array`, got `int`"),
        ("rate_drops", [0.5, "x"], "rate_drops: Expected `float`, got `str`"),
        ("mirror", 1, "mirror: Expected `bool`"),
        ("steps", 0, "should be at least 1"),
        ("rate", 0.0, "rate 0.0 should be above 0"),
        ("rate", float("nan"), "rate nan should be above 0"),
        ("rate", 1e300, r"rate 1e\+300 should be above 0 and at most 1e\+12"),
        ("rate", float("inf"), "rate inf should be above 0 and at most"),
        ("rate", 1.01e12, r"at most 1e\+12"),
        ("rate_drops", [0.8, 0.5], "should ascend between 0 and 1"),
        ("rate_drops", [1500], "should ascend between 0 and 1"),
        ("momentum", 1.0, "momentum 1.0"),
        ("dropout", 1.0, "dropout 1.0"),
        ("weight_decay", -1.0, "weight_decay -1.0"),
        ("weight_decay", 1e308, r"weight_decay 1e\+308 should be at least 0 and at most 1e\+12"),
        ("weight_decay", 1.01e12, r"at most 1e\+12"),
        ("weight_decay", float("nan"), "weight_decay nan should be at least 0"),
        ("scales", [36, 28], "scales 36 to 28 should ascend"),
        ("scales", [20, 36], r"should ascend from the crop \(28\)"),
        ("activation", "swish", "unknown activation 'swish'; choose one of prelu, prelu-shared, relu, lrelu"),
        ("architecture", "D", "unknown architecture 'D'. Valid architectures: A, B, C"),
        ("crop", 8, "too small"),
        ("seed", -1, "seed -1"),
        ("bias_rate", -1.0, "bias_rate -1.0"),
        ("evaluation_scale", 27, r"evaluation_scale 27 should be from the crop \(28\) to 4096"),
        ("epochs", 3, r"steps 2200 and epochs 3\.0 exclude each other: remove one of them"),
        ("steps", None, "either steps or epochs is required"),
        ("rate_policy", "cosine", "unknown rate_policy 'cosine'; choose one of at, plateau"),
        ("rate_policy", "plateau", "apply to the rate_policy 'at', not to 'plateau': remove them"),
        ("patience", 0, "patience 0 should be at least 1"),
        ("most_drops", -1, "most_drops -1"),
        ("mean", "none", "unknown mean 'none'; choose one of image, channel"),
        ("init", "msra", "unknown init 'msra'; choose one of fan-out, fan-in"),
        ("first_layer", "exactly", "unknown first_layer 'exactly'"),
        ("init_std", 0.0, "standard deviation of the weights 0.0"),
        ("fc_stds", [0.01, 0.01], "fc_stds: Expected `array` of length 3, got 2"),
        ("precision", "fp16", "unknown precision 'fp16'; choose one of fp32, tf32, bf16"),
        ("color", -0.1, "color -0.1 should be at least 0 and below 10"),
        ("accumulate", 0, "accumulate 0 should be at least 1"),
        ("accumulate", 65, "accumulate 65 should be at most the batch, 64"),
        ("max_refused", 1.5, "max_refused 1.5"),
        ("keep_every", 0, "keep_every 0 should be at least 1"),
        (
            "scales",
            [28, 1_000_000],
            r"scales 28 to 1000000 should ascend from the crop \(28\) or above to at most 4096",
        ),
        ("scales", [28, 4097], "at most 4096"),
        ("crop", 0, "from 1 to 4096 px, not 0"),
        ("batch", 1_000_000_000, "batch 1000000000 should be at least 1 and at most 65536"),
        ("batch", 0, "batch 0 should be at least 1"),
        ("steps", 10**30, "at most 1000000000"),
        ("save_every", 10**10, "at most 1000000000"),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipe_from_values({**SMALL.to_json(), key: value}, "x.toml")


def test_the_rate_drops_after_each_stated_fraction_of_the_run() -> None:
    recipe = replace(SMALL, steps=10, rate=0.5, rate_drops=(0.35, 0.8), rate_factor=0.1)
    rates = [rate_at(recipe, step) for step in range(10)]
    assert rates == pytest.approx([0.5] * 4 + [0.05] * 4 + [0.005] * 2, rel=1e-12)


def test_a_plateau_is_patience_evaluations_without_a_lower_error() -> None:
    assert count_plateaus([], 2) == 0
    assert count_plateaus([9, 8, 7, 6], 2) == 0
    assert count_plateaus([9, 8, 8.5], 2) == 0
    assert count_plateaus([9, 8, 8.5, 8], 2) == 1  # an equal error is not lower
    assert count_plateaus([9, 8, 8.5, 7.9, 8], 2) == 0  # interrupted by a lower one
    assert count_plateaus([9, 8, 8.5, 9, 10, 11, 12], 2) == 2  # counting restarts with 10
    assert count_plateaus([9, 8, 8.5, 9, 10, 11], 2) == 1
    assert count_plateaus([5, 5, 5, 5], 1) == 2


def test_each_plateau_drops_the_rate_up_to_most_drops() -> None:
    recipe = replace(SMALL, rate_policy="plateau", rate_drops=(), rate=0.5, rate_factor=0.1, most_drops=2)
    assert [rate_at(recipe, 7, drops) for drops in range(4)] == pytest.approx([0.5, 0.05, 0.005, 0.005])


def test_another_number_of_steps_keeps_the_shape_of_the_schedule() -> None:
    long, short = SMALL, replace(SMALL, steps=SMALL.total_steps // 10)
    assert [rate_at(short, step) for step in range(short.total_steps)] == [
        rate_at(long, 10 * step) for step in range(short.total_steps)
    ]


@pytest.mark.parametrize(
    ("median", "stride", "crop"), [(80, 4, 72), (32, 4, 28), (256, 16, 224), (81, 4, 72), (2, 4, 4)]
)
def test_the_automatic_crop_is_seven_eighths_rounded_to_the_stride(median: float, stride: int, crop: int) -> None:
    assert automatic_crop(median, stride) == crop


def test_another_crop_changes_scales_batch_and_rate_but_not_the_steps() -> None:
    recipe = replace(SMALL, crop=28, scales=(28, 36), batch=64, rate=0.01)
    assert changes_for_crop(recipe, 56) == {"crop": 56, "scales": (56, 72), "batch": 32, "rate": 0.005}
    assert changes_for_crop(recipe, 56, keep_batch=True) == {"crop": 56, "scales": (56, 72)}


def test_a_recipe_in_epochs_evaluates_as_often_per_epoch_with_another_crop() -> None:
    recipe = replace(
        SMALL, crop=28, scales=(28, 36), batch=64, steps=None, epochs=3.0, evaluate_every=100, keep_every=50
    )
    changes = changes_for_crop(recipe, 56)
    assert (changes["batch"], changes["evaluate_every"], changes["keep_every"]) == (32, 200, 100)
    assert "evaluate_every" not in changes_for_crop(recipe, 56, keep_batch=True)  # an epoch has as many steps as before


def test_fitting_a_recipe_to_its_own_crop_changes_nothing() -> None:
    assert replace(SMALL, **changes_for_crop(SMALL, SMALL.crop)) == SMALL
