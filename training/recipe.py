"""Recipes: how a net is trained, as typed data read from TOML (training/recipes/*.toml).

Every number of a training run is in its recipe; the recipe is stored in the run folder and in every checkpoint.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from prelunet.evaluator.architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    MAX_SIDE,
    Activation,
    Architecture,
    architecture,
)
from prelunet.evaluator.contract import center_scale
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.files import require_regular_file
from prelunet.training.net.initialization import FIRST_LAYERS, RULES, FirstLayer, Initialization, Rule

RatePolicy = Literal["at", "plateau"]
MeanKind = Literal["image", "channel"]
TrainingPrecision = Literal["fp32", "bf16"]

MAX_BATCH = 65_536
MAX_STEPS = 10**9
MAX_FACTOR = 1e12  # of weights in an update: without sense long before, and torch takes no more than float32 has
_MAX_BITS = 1000  # of a whole number: from 1024 on no float has it, and beyond 4300 digits Python writes none out
CHOICES: dict[str, tuple[str, ...]] = {  # key → what it may be
    "architecture": tuple(ARCHITECTURES),
    "activation": ACTIVATIONS,
    "rate_policy": get_args(RatePolicy),
    "mean": get_args(MeanKind),
    "init": RULES,
    "first_layer": FIRST_LAYERS,
    "precision": get_args(TrainingPrecision),
}
# How a run is carried out: none of these changes what is learned, but for the order of sums, so a run may go on with
# others. Not evaluate_every: the measurements decide where a plateau's rate falls, and which checkpoint is the best.
EXECUTION_KEYS = ("save_every", "keep_every", "channels_last", "compile", "accumulate")


@dataclass(frozen=True)
class Recipe:
    """How a net is trained; each key's meaning is its line in `prelunet train --help`.

    Defaults are the paper's (PReLU-nets, section 4 "Training"), but two: the colour change is off, and the rate falls
    where the recipe says, nowhere if it is silent. The length of a run is given as steps or as epochs, one of the two.
    """

    architecture: Annotated[str, "Name of the net."]
    crop: Annotated[int, "Side of the random crop, pixels."]
    scales: Annotated[
        tuple[int, int], "Lowest and highest shorter side of a training image, pixels; each equally likely."
    ]
    batch: Annotated[int, "Images of a step, over all processes."]
    rate: Annotated[float, "Learning rate at the beginning."]
    evaluate_every: Annotated[int, "Steps between two measurements on val/."]
    save_every: Annotated[int, "Steps between two saved states."]
    steps: Annotated[int | None, "Length of the run, in steps."] = None
    epochs: Annotated[float | None, "Length of the run, in passes over train/; instead of steps."] = None
    rate_policy: Annotated[RatePolicy, "When the rate falls: 'at' the parts of rate_drops, or when val/ stalls."] = "at"
    rate_drops: Annotated[tuple[float, ...], "at: parts of the run, 0 to 1, after each of which the rate falls."] = ()
    rate_factor: Annotated[float, "What the rate is multiplied by when it falls."] = 0.1
    patience: Annotated[int, "plateau: measurements without a lower top-1 error after which the rate falls."] = 4
    most_drops: Annotated[int, "plateau: how often the rate falls at most."] = 2
    activation: Annotated[Activation, "Of the convolutions, fc1 and fc2."] = "prelu"
    momentum: Annotated[float, "Momentum of stochastic gradient descent."] = 0.9
    weight_decay: Annotated[float, "Of weights and biases, never of slopes."] = 5e-4
    dropout: Annotated[float, "Probability of dropping an output of fc1 and fc2."] = 0.5
    mirror: Annotated[bool, "Mirror half of the views."] = True
    color: Annotated[float, "Standard deviation of the colour change's coefficients; 0 for none."] = 0.0
    mean: Annotated[MeanKind, "What is subtracted: the mean of each pixel, or of each channel."] = "image"
    init: Annotated[Rule, "How convolutions begin: fan-out is Eq. 14, fan-in Eq. 10."] = "fan-out"
    init_std: Annotated[float, "gaussian: standard deviation of the convolutions."] = 0.01
    first_layer: Annotated[FirstLayer, "conv1 with the factor 1/2, or without it, as its input is an image."] = "half"
    fc_stds: Annotated[tuple[float, float, float], "Standard deviations of fc1, fc2, fc3."] = (0.01, 0.01, 0.001)
    precision: Annotated[TrainingPrecision, "Of forward and backward; weights and updates stay fp32."] = "fp32"
    channels_last: Annotated[bool, "Keep channels last in memory."] = True
    compile: Annotated[bool, "Compile the net with torch.compile."] = False
    accumulate: Annotated[int, "Parts of a batch that are computed one after another; less memory."] = 1
    keep_every: Annotated[
        int | None, "Steps between two checkpoints that are kept; none but last and best if unset."
    ] = None
    max_refused: Annotated[float, "Part of the images that may break before the training stops."] = 0.1
    seed: Annotated[int, "Of weights, order, views and dropout."] = 0

    def __post_init__(self) -> None:
        faults = [text for broken, text in self._rules() if broken]
        if faults:
            raise UsageError(f"this recipe cannot be used: {'; '.join(faults)}. Mend the recipe or the option")
        self.build_architecture()  # which refuses crops that leave no window
        self.initialization()  # which refuses deviations without sense

    def _rules(self) -> Iterator[tuple[bool, str]]:
        for key, choices in CHOICES.items():
            value = getattr(self, key)
            yield value not in choices, f"no {key} '{value}'; there are {', '.join(choices)}"
        yield from self._rules_of_views()
        yield from self._rules_of_length()
        yield from self._rules_of_numbers()

    def _rules_of_views(self) -> Iterator[tuple[bool, str]]:
        low, high = self.scales
        yield not self.crop <= low <= high, f"scales {low} to {high} should rise from the crop, {self.crop}, or above"
        yield high > MAX_SIDE, f"scales {low} to {high} should be at most {MAX_SIDE}"
        yield not 0 <= self.color < 10, f"color {self.color} should be from 0 to below 10"

    def _rules_of_length(self) -> Iterator[tuple[bool, str]]:
        counts = [
            value for value in (self.steps, self.evaluate_every, self.save_every, self.keep_every) if value is not None
        ]
        drops = self.rate_drops
        yield self.steps is None and self.epochs is None, "steps or epochs should be given, one of the two"
        yield (
            self.steps is not None and self.epochs is not None,
            f"steps {self.steps} and epochs {self.epochs} were both given: leave one of them out",
        )
        yield (
            not 1 <= min(counts) <= max(counts) <= MAX_STEPS,
            f"steps, evaluate_every, save_every and keep_every should be at least 1 and at most {MAX_STEPS}",
        )
        yield (
            self.epochs is not None and not 0 < self.epochs <= MAX_STEPS,
            f"epochs {self.epochs} should be above 0 and at most {MAX_STEPS}",
        )
        yield (
            any(not 0 < part < 1 for part in drops) or list(drops) != sorted(set(drops)),
            f"rate_drops {list(drops)} should rise between 0 and 1: they are parts of the run",
        )
        yield (
            self.rate_policy == "plateau" and bool(drops),
            f"rate_drops {list(drops)} belong to the rate_policy 'at', not to 'plateau': leave them out (in a file "
            "their line, on the command line --rate-drops), or take the rate_policy 'at'",
        )
        yield self.patience < 1, f"patience {self.patience} should be at least 1"
        yield self.most_drops < 0, f"most_drops {self.most_drops} should not be negative"

    def _rules_of_numbers(self) -> Iterator[tuple[bool, str]]:
        yield not 1 <= self.batch <= MAX_BATCH, f"batch {self.batch} should be at least 1 and at most {MAX_BATCH}"
        yield not 0 < self.rate <= MAX_FACTOR, f"rate {self.rate} should be above 0 and at most {MAX_FACTOR:g}"
        yield not 0 < self.rate_factor <= 1, f"rate_factor {self.rate_factor} should be above 0 and at most 1"
        yield not 0 <= self.momentum < 1, f"momentum {self.momentum} should be from 0 to below 1"
        yield (
            not 0 <= self.weight_decay <= MAX_FACTOR,
            f"weight_decay {self.weight_decay} should be from 0 to {MAX_FACTOR:g}",
        )
        yield not 0 <= self.dropout < 1, f"dropout {self.dropout} should be from 0 to below 1"
        yield (
            not 1 <= self.accumulate <= self.batch,
            f"accumulate {self.accumulate} should be at least 1 and at most the batch, {self.batch}",
        )
        yield not 0 <= self.max_refused <= 1, f"max_refused {self.max_refused} should be from 0 to 1"
        yield self.seed < 0, f"seed {self.seed} should not be negative"

    def in_steps(self, images: int) -> "Recipe":
        """Return the recipe with its length in steps, for a training set of so many images, halves rounded up."""
        if self.epochs is None:
            return self
        return replace(self, steps=max(1, int(self.epochs * images / self.batch + 0.5)), epochs=None)

    @property
    def total_steps(self) -> int:
        """Return the steps of the run; `in_steps` has made them of epochs."""
        assert self.steps is not None, "the length is in epochs: in_steps first"
        return self.steps

    def build_architecture(self) -> Architecture:
        """Return the architecture that is trained."""
        return architecture(self.architecture, activation=self.activation, crop=self.crop)

    def initialization(self) -> Initialization:
        """Return how the weights begin."""
        return Initialization(self.init, self.init_std, self.first_layer, self.fc_stds)

    @property
    def evaluation_scale(self) -> int:
        """Return the scale of the `center` protocol: round(crop·256/224), Table 3's training-time check."""
        return center_scale(self.crop)

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as plain data for the run folder and checkpoints; keys that are not set are left out."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with prelunet, sorted."""
    folder = resources.files("prelunet.training") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def read_recipe(name_or_file: str) -> Recipe:
    """Read a recipe by its name, or from a file whose name ends in `.toml`.

    Raises UsageError for an unknown name or key, a missing key, a value of another type or outside its range.
    """
    if name_or_file.endswith(".toml"):
        path = Path(name_or_file)
        require_regular_file(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read ({error}). Give the path of a recipe, or a name") from error
    elif name_or_file in recipe_names():
        text = (resources.files("prelunet.training") / "recipes" / f"{name_or_file}.toml").read_text(encoding="utf-8")
    else:
        raise UsageError(
            f"no recipe '{name_or_file}'. There are: {', '.join(recipe_names())}; or give a file FILE.toml"
        )
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{name_or_file}: not TOML ({error})") from error
    except ValueError as error:  # Python reads no whole number of more than 4300 digits
        raise UsageError(f"{name_or_file}: a whole number in it has thousands of digits. Mend the recipe") from error
    return recipe_from_values(values, name_or_file)


def recipe_from_values(values: Mapping[str, Any], where: str) -> Recipe:
    """Build a recipe from TOML or JSON values; `where` names their source in errors."""
    kinds = {key.name: key.type for key in fields(Recipe)}
    unknown = sorted(set(values) - set(kinds))
    if unknown:
        raise UsageError(f"{where}: no key {', '.join(unknown)} in a recipe. There are: {', '.join(kinds)}")
    missing = [key.name for key in fields(Recipe) if key.default is MISSING and key.name not in values]
    if missing:
        raise UsageError(f"{where}: the recipe lacks {', '.join(missing)}. Add what is missing")
    return Recipe(**{key: check_type(value, kinds[key], f"{where}: {key}") for key, value in values.items()})


def check_type(value: Any, kind: Any, where: str) -> Any:
    """Check a value against the type of its field; whole numbers pass as floats, nothing else is converted."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise UsageError(f"{where} should be a number that can be meant, not one of more than 300 digits")
    if isinstance(kind, UnionType):  # `int | None`
        return None if value is None else check_type(value, get_args(kind)[0], where)
    if get_origin(kind) is tuple:
        item, *rest = get_args(kind)
        if not isinstance(value, list) or (rest != [...] and len(value) != 1 + len(rest)):
            raise UsageError(
                f"{where} should be a list{'' if rest == [...] else f' of {1 + len(rest)}'}, not {_format_value(value)}"
            )
        return tuple(check_type(one, item, where) for one in value)
    if kind is float and type(value) is int:
        return float(value)
    plain = kind if isinstance(kind, type) else str  # a Literal; Recipe itself checks which
    if type(value) is not plain:
        raise UsageError(f"{where} should be of type {plain.__name__}, not {_format_value(value)}")
    return value


def _format_value(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # of thousands of digits, which 0x brings past the reader
        return "what holds a number beyond all measure"


def fit_to_crop(recipe: Recipe, crop: int) -> Recipe:
    """Return the recipe for another crop, with everything that hangs on it in proportion.

    Scales grow with the crop. The batch shrinks with it, so that the cost of a step grows with the crop and not with
    its square; the rate shrinks with the batch (Goyal et al. 2017, "linear scaling rule"). A length in steps stays; of
    an epoch there are more steps then, and a recipe in epochs measures as often in each as before.
    """
    ratio = crop / recipe.crop
    low, high = (int(scale * ratio + 0.5) for scale in recipe.scales)
    batch = max(1, int(recipe.batch / ratio + 0.5))
    more = 1.0 if recipe.epochs is None else recipe.batch / batch
    every = max(1, int(recipe.evaluate_every * more + 0.5))
    kept = None if recipe.keep_every is None else max(1, int(recipe.keep_every * more + 0.5))
    rate = recipe.rate * batch / recipe.batch
    return replace(recipe, crop=crop, scales=(low, high), batch=batch, rate=rate, evaluate_every=every, keep_every=kept)


def automatic_crop(median_shorter_side: float, stride: int) -> int:
    """Return 7/8 of the median shorter side (224 of 256, as in the paper), rounded to the net's stride, halves up."""
    return max(1, int(median_shorter_side * 7 / 8 / stride + 0.5)) * stride


# The learning rate over a run.


def rate_at(recipe: Recipe, step: int, drops: int = 0) -> float:
    """Return the learning rate of a step, counted from 0.

    drops: how often the error has stalled until then (`count_plateaus`), for the rate_policy `plateau`. The paper
    lowers the rate twice by ten "when the error plateaus" (PReLU-nets, section 4); with `at` the places are fixed.
    """
    if recipe.rate_policy == "at":
        drops = sum(step >= part * recipe.total_steps for part in recipe.rate_drops)
    return recipe.rate * recipe.rate_factor ** min(drops, _max_drops(recipe))


def _max_drops(recipe: Recipe) -> int:
    return recipe.most_drops if recipe.rate_policy == "plateau" else len(recipe.rate_drops)


def count_plateaus(errors: Sequence[float], patience: int) -> int:
    """Return how often the error on val/ has stalled, given its measurements in their order.

    It stalls when none of `patience` measurements in a row is below the lowest one before them; counting begins anew
    after that, from the next measurement on.
    """
    found, lowest, waited = 0, float("inf"), 0
    for error in errors:
        if error < lowest:
            lowest, waited = error, 0
        else:
            waited += 1
        if waited == patience:
            found, lowest, waited = found + 1, float("inf"), 0
    return found
