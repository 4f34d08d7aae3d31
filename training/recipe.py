"""Recipes: the configuration of a training run, as typed data read from TOML (training/recipes/*.toml).

A recipe contains every number of a run. It is stored in the run folder and in every checkpoint.
"""

import json
import operator
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from ..evaluator.architectures import MAX_SIDE, Activation, Architecture, architecture
from ..evaluator.contract import center_scale
from ..evaluator.errors import UsageError
from ..evaluator.files import read_toml
from .net.architecture_file import ARCHITECTURE_HELP, find_architecture
from .net.initialization import FirstLayer, Initialization, Rule

RatePolicy = Literal["at", "plateau"]
MeanKind = Literal["image", "channel"]
# tf32 is a precision and no switch of its own: it rounds the factors of products to 10 bits, which changes what is
# learned and not only the order of sums, so a run cannot resume with it or without it.
TrainingPrecision = Literal["fp32", "tf32", "bf16"]

_STEPS: dict[str, float] = {"at least": 1, "at most": 10**9}
LIMITS: dict[str, dict[str, float]] = {  # key → valid range, for errors and --help
    "batch": {"at least": 1, "at most": 65_536},
    "rate": {"above": 0, "at most": 1e12},  # far beyond any useful value; torch accepts the range of float32
    "evaluate_every": _STEPS,
    "save_every": _STEPS,
    "steps": _STEPS,
    "epochs": {"above": 0, "at most": 10**9},
    "rate_factor": {"above": 0, "at most": 1},
    "patience": {"at least": 1},
    "most_drops": {"at least": 0},
    "momentum": {"at least": 0, "below": 1},
    "weight_decay": {"at least": 0, "at most": 1e12},
    "bias_rate": {"at least": 0, "at most": 100},
    "dropout": {"at least": 0, "at most": 0.99},
    "color": {"at least": 0, "below": 10},
    "accumulate": {"at least": 1},
    "keep_every": _STEPS,
    "max_refused": {"at least": 0, "at most": 1},
    "seed": {"at least": 0},
}
_COMPARISONS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
# Keys that do not affect what is learned, except through the order of sums, so a run may resume with other values.
# Without evaluate_every: the evaluations determine where the plateau policy lowers the rate, and the best checkpoint.
EXECUTION_KEYS = ("save_every", "keep_every", "channels_last", "compile", "accumulate")


@dataclass(frozen=True)
class Recipe:
    """Configuration of a training run; `prelunet train --help` describes each key.

    The defaults are the paper's (PReLU-nets, section 4 "Training"), with two exceptions: color augmentation is off, and
    the rate drops only where the recipe says so. The length of a run is given either in steps or in epochs.
    """

    architecture: Annotated[str | Architecture, ARCHITECTURE_HELP]
    crop: Annotated[int, "Side of the random crop, in pixels."]
    scales: Annotated[tuple[int, int], "Range of the shorter side of a training image, in pixels, sampled uniformly."]
    batch: Annotated[int, "Batch size over all processes, in images."]
    rate: Annotated[float, "Initial learning rate."]
    evaluate_every: Annotated[int, "Steps between evaluations on val/."]
    save_every: Annotated[int, "Steps between saved states."]
    steps: Annotated[int | None, "Length of the run, in steps."] = None
    epochs: Annotated[float | None, "Length of the run, in passes over train/; replaces steps."] = None
    rate_policy: Annotated[
        RatePolicy,
        "When the learning rate drops: at the fractions in rate_drops (at) or when the error on val/ stalls (plateau).",
    ] = "at"
    rate_drops: Annotated[
        tuple[float, ...], "Policy at: fractions of the run, 0 to 1, after which the learning rate drops."
    ] = ()
    rate_factor: Annotated[float, "Factor by which each drop multiplies the learning rate."] = 0.1
    patience: Annotated[
        int, "Policy plateau: evaluations without a lower top-1 error before the learning rate drops."
    ] = 4
    most_drops: Annotated[int, "Policy plateau: maximum number of learning-rate drops."] = 2
    activation: Annotated[Activation, "Activation of the convolutions, fc1 and fc2."] = "prelu"
    momentum: Annotated[float, "Momentum of stochastic gradient descent."] = 0.9
    weight_decay: Annotated[float, "Weight decay."] = 5e-4
    decay_biases: Annotated[bool, "Apply weight decay to biases too."] = True
    decay_slopes: Annotated[bool, "Apply weight decay to PReLU's slopes too."] = False
    bias_rate: Annotated[float, "Factor that multiplies the learning rate of biases."] = 1.0
    dropout: Annotated[float, "Dropout probability of the outputs of fc1 and fc2."] = 0.5
    mirror: Annotated[bool, "Mirror half of the views."] = True
    color: Annotated[float, "Standard deviation of the color augmentation's coefficients; 0 turns it off."] = 0.0
    mean: Annotated[MeanKind, "Mean to subtract: per pixel (image) or per channel."] = "image"
    init: Annotated[
        Rule,
        "Initialization of the convolutions: fan-out is Eq. 14, fan-in Eq. 10; xavier-all sets the fc layers too.",
    ] = "fan-out"
    init_std: Annotated[float, "Standard deviation of the convolutions for init gaussian."] = 0.01
    first_layer: Annotated[
        FirstLayer, "Initialize conv1 with the factor 1/2 (half), or without it (exact), as its input is an image."
    ] = "half"
    fc_stds: Annotated[
        tuple[float, float, float], "Standard deviations of fc1, fc2, fc3, unless init is xavier-all."
    ] = (0.01, 0.01, 0.001)
    precision: Annotated[
        TrainingPrecision,
        "Precision of the forward and backward pass; weights and updates stay fp32. tf32 needs a GPU.",
    ] = "fp32"
    channels_last: Annotated[bool, "Store tensors with channels last."] = True
    compile: Annotated[bool, "Compile the net with torch.compile."] = False
    accumulate: Annotated[int, "Micro-batches per batch, computed one after another to save memory."] = 1
    evaluation_scale: Annotated[
        int | None,
        "Shorter side at which val/ is evaluated, on the central crop, and the mean is computed; by default 8/7 of the "
        "crop, within the scales.",
    ] = None
    keep_every: Annotated[
        int | None, "Steps between checkpoints that are kept permanently; by default only last and best are kept."
    ] = None
    max_refused: Annotated[float, "Fraction of the images that may become unreadable before the training stops."] = 0.1
    seed: Annotated[int, "Random seed of weights, image order, views and dropout."] = 0

    def __post_init__(self) -> None:
        if faults := [*self._invalid_values(), *self._contradictions()]:
            raise UsageError(f"invalid recipe: {'; '.join(faults)}. Fix the recipe or the option")
        self.build_architecture()  # raises for crops that leave no window
        self.initialization()  # raises for invalid deviations

    def _invalid_values(self) -> Iterator[str]:
        for key, choices in CHOICES.items():
            if (value := getattr(self, key)) not in choices:
                yield f"unknown {key} '{value}'; choose one of {', '.join(choices)}"
        for key, limits in LIMITS.items():
            value = getattr(self, key)
            if value is not None and not all(_COMPARISONS[name](value, limit) for name, limit in limits.items()):
                yield f"{key} {value} should be {format_limits(limits)}"

    def _contradictions(self) -> Iterator[str]:
        low, high = self.scales
        if not self.crop <= low <= high <= MAX_SIDE:
            yield f"scales {low} to {high} should ascend from the crop ({self.crop}) or above to at most {MAX_SIDE}"
        if not self.crop <= (self.evaluation_scale or self.crop) <= MAX_SIDE:
            yield f"evaluation_scale {self.evaluation_scale} should be from the crop ({self.crop}) to {MAX_SIDE}"
        if self.decay_slopes and not self.activation.startswith("prelu"):
            yield f"decay_slopes needs slopes that are learned, but the activation is {self.activation}: remove it"
        if self.accumulate > self.batch:
            yield f"accumulate {self.accumulate} should be at most the batch, {self.batch}"
        if self.steps is None and self.epochs is None:
            yield "either steps or epochs is required"
        if self.steps is not None and self.epochs is not None:
            yield f"steps {self.steps} and epochs {self.epochs} exclude each other: remove one of them"
        drops = list(self.rate_drops)
        if any(not 0 < part < 1 for part in drops) or drops != sorted(set(drops)):
            yield f"rate_drops {drops} should ascend between 0 and 1: they are fractions of the run"
        if self.rate_policy == "plateau" and drops:
            yield (
                f"rate_drops {drops} apply to the rate_policy 'at', not to 'plateau': remove them (the line in the "
                "file, or the option --rate-drops), or set the rate_policy to 'at'"
            )

    def in_steps(self, images: int) -> "Recipe":
        """Return the recipe with its length in steps for a training set of `images` images; halves round up."""
        if self.epochs is None:
            return self
        return replace(self, steps=max(1, int(self.epochs * images / self.batch + 0.5)), epochs=None)

    @property
    def total_steps(self) -> int:
        """Return the number of steps; convert epochs with `in_steps` first."""
        assert self.steps is not None, "the length is in epochs: call in_steps first"
        return self.steps

    def build_architecture(self) -> Architecture:
        return architecture(self.architecture, activation=self.activation, crop=self.crop)

    def initialization(self) -> Initialization:
        return Initialization(self.init, self.init_std, self.first_layer, self.fc_stds)

    @property
    def central_scale(self) -> int:
        """Return the scale of evaluations during training and of the mean image, in pixels."""
        return self.evaluation_scale or center_scale(self.crop, self.scales)

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as plain data for the run folder and checkpoints, without unset keys."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        if isinstance(self.architecture, Architecture):  # itself, as its file may change or disappear
            values["architecture"] = self.build_architecture().to_json()
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


CHOICES: dict[str, tuple[str, ...]] = {  # key → valid values
    key.name: get_args(kind) for key in fields(Recipe) if get_origin(kind := get_args(key.type)[0]) is Literal
}


def with_newer_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored recipe with the defaults of keys that it lacks, as those of earlier versions do."""
    defaults = {key.name: key.default for key in fields(Recipe) if key.default not in (MISSING, None)}
    return {**json.loads(json.dumps(defaults)), **recipe}


def format_limits(limits: Mapping[str, float]) -> str:
    """Return an entry of LIMITS in words, as in `above 0 and at most 1`."""
    return " and ".join(f"{name} {limit:{'g' if type(limit) is float else ''}}" for name, limit in limits.items())


def recipe_names() -> list[str]:
    folder = resources.files("prelunet.training") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def read_recipe(name_or_file: str) -> Recipe:
    """Read a built-in recipe by name, or a recipe from a file whose name ends in `.toml`.

    Raises UsageError for an unknown name or key, a missing key, or a value of the wrong type or out of range.
    """
    path = Path(name_or_file)
    if path.suffix == ".toml":
        values = read_toml(path, "Give the path or the name of a recipe")
    elif name_or_file in recipe_names():
        text = (resources.files("prelunet.training") / "recipes" / f"{name_or_file}.toml").read_text(encoding="utf-8")
        values = tomllib.loads(text)
    else:
        raise UsageError(
            f"no recipe '{name_or_file}'. Choose one of {', '.join(recipe_names())}, or give a file FILE.toml"
        )
    return recipe_from_values(values, name_or_file, path.parent)


def recipe_from_values(values: Mapping[str, Any], where: str, folder: Path = Path()) -> Recipe:
    """Build a recipe from TOML or JSON values.

    where: their source, for error messages; folder: to which the path of an architecture is relative.
    """
    valid = [key.name for key in fields(Recipe)]
    unknown = sorted(set(values) - set(valid))
    if unknown:
        raise UsageError(f"{where}: unknown recipe key {', '.join(unknown)}. Valid keys: {', '.join(valid)}")
    missing = [key.name for key in fields(Recipe) if key.default is MISSING and key.name not in values]
    if missing:
        raise UsageError(f"{where}: the recipe has no value for {', '.join(missing)}. Add the missing keys")
    checked = {key: convert_value(key, value, f"{where}: {key}") for key, value in values.items()}
    return Recipe(**{**checked, "architecture": find_architecture(checked["architecture"], folder)})


def convert_value(key: str, value: Any, where: str, *, from_text: bool = False) -> Any:
    """Return the value of a key in the type of its field; integers become floats if necessary.

    where: names key or option, for errors; from_text: whether numbers are given as text. Raises UsageError for a value
    of another type; those in CHOICES, and the architecture, are checked later.
    """
    (kind,) = (field.type for field in fields(Recipe) if field.name == key)
    try:
        return msgspec.convert(value, str if key in CHOICES or key == "architecture" else kind, strict=not from_text)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}. Give a value of that type") from error


def changes_for_crop(recipe: Recipe, crop: int, *, keep_batch: bool = False) -> dict[str, Any]:
    """Return the keys of a recipe that another crop changes, with dependent ones scaled in proportion.

    Scales grow with the crop. Unless `keep_batch`, the batch shrinks, so that the cost of a step grows with the crop
    and not with its square. The rate shrinks with the batch (Goyal et al. 2017, "linear scaling rule"). A length in
    steps is kept. With a smaller batch an epoch has more steps, so a recipe in epochs raises evaluate_every and
    keep_every to match.
    """
    ratio = crop / recipe.crop
    changes: dict[str, Any] = {"crop": crop, "scales": tuple(int(scale * ratio + 0.5) for scale in recipe.scales)}
    if recipe.evaluation_scale is not None:
        changes["evaluation_scale"] = int(recipe.evaluation_scale * ratio + 0.5)
    if keep_batch:
        return changes
    batch = max(1, int(recipe.batch / ratio + 0.5))
    changes |= {"batch": batch, "rate": recipe.rate * batch / recipe.batch}
    if recipe.epochs is not None:
        for key in ("evaluate_every", "keep_every"):
            if (steps := getattr(recipe, key)) is not None:
                changes[key] = max(1, int(steps * recipe.batch / batch + 0.5))
    return changes


def automatic_crop(median_shorter_side: float, stride: int) -> int:
    """Return 7/8 of the median shorter side (as 224 of 256 in the paper), rounded half up to a multiple of `stride`."""
    return max(1, int(median_shorter_side * 7 / 8 / stride + 0.5)) * stride
