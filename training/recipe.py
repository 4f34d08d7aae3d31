"""Recipes: how a net is trained, as typed data read from TOML (training/recipes/*.toml).

Every number of a training run is in its recipe; the recipe is stored in the run folder and in every checkpoint.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin

from evaluator.contract import center_scale
from evaluator.errors import UsageError
from training.architectures import ACTIVATIONS, MAX_SIDE, Activation, Architecture, architecture

MAX_BATCH = 65_536
MAX_STEPS = 10**9


@dataclass(frozen=True)
class Recipe:
    """How a net is trained. Defaults are the paper's (PReLU-nets, section 4 "Training"); lengths in pixels.

    scales: lowest and highest shorter side of a training image, each equally likely; crop: side of a random crop;
    rate_drops: parts of the run, 0 to 1, after each of which the rate is multiplied by rate_factor;
    weight_decay: of weights and biases, never of slopes; evaluate_every, save_every: steps.
    """

    architecture: str
    crop: int
    scales: tuple[int, int]
    batch: int
    steps: int
    rate: float
    rate_drops: tuple[float, ...]
    evaluate_every: int
    save_every: int
    activation: Activation = "prelu"
    rate_factor: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    dropout: float = 0.5
    mirror: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        faults = [text for broken, text in self._rules() if broken]
        if faults:
            raise UsageError(f"this recipe cannot be used: {'; '.join(faults)}. Mend the recipe or the option")
        self.net()  # which refuses unknown architectures and crops that leave no window

    def _rules(self) -> tuple[tuple[bool, str], ...]:
        low, high = self.scales
        drops = self.rate_drops
        counts = (self.steps, self.evaluate_every, self.save_every)
        return (
            (self.activation not in ACTIVATIONS, f"activation '{self.activation}' is not one of {ACTIVATIONS}"),
            (not self.crop <= low <= high, f"scales {low} to {high} should rise from the crop, {self.crop}, or above"),
            (high > MAX_SIDE, f"scales {low} to {high} should be at most {MAX_SIDE}"),
            (not 1 <= self.batch <= MAX_BATCH, f"batch {self.batch} should be at least 1 and at most {MAX_BATCH}"),
            (
                not 1 <= min(counts) <= max(counts) <= MAX_STEPS,
                f"steps, evaluate_every and save_every should be at least 1 and at most {MAX_STEPS}",
            ),
            (not 0 < self.rate < float("inf"), f"rate {self.rate} should be above 0"),
            (not 0 < self.rate_factor <= 1, f"rate_factor {self.rate_factor} should be above 0 and at most 1"),
            (
                any(not 0 < part < 1 for part in drops) or list(drops) != sorted(set(drops)),
                f"rate_drops {list(drops)} should rise between 0 and 1: they are parts of the run",
            ),
            (not 0 <= self.momentum < 1, f"momentum {self.momentum} should be from 0 to below 1"),
            (not 0 <= self.weight_decay < float("inf"), f"weight_decay {self.weight_decay} should not be negative"),
            (not 0 <= self.dropout < 1, f"dropout {self.dropout} should be from 0 to below 1"),
            (self.seed < 0, f"seed {self.seed} should not be negative"),
        )

    def net(self) -> Architecture:
        """Return the architecture that is trained."""
        return architecture(self.architecture, activation=self.activation, crop=self.crop)

    @property
    def evaluation_scale(self) -> int:
        """Return the scale of the `center` protocol: round(crop·256/224), Table 3's training-time check."""
        return center_scale(self.crop)

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as plain data for the run folder and checkpoints."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with prelunet, sorted."""
    folder = resources.files("training") / "recipes"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def read_recipe(name_or_file: str) -> Recipe:
    """Read a recipe by its name, or from a file whose name ends in `.toml`.

    Raises UsageError for an unknown name or key, a missing key, a value of another type or outside its range.
    """
    if name_or_file.endswith(".toml"):
        path = Path(name_or_file)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read ({error}). Give the path of a recipe, or a name") from error
    elif name_or_file in recipe_names():
        text = (resources.files("training") / "recipes" / f"{name_or_file}.toml").read_text(encoding="utf-8")
    else:
        raise UsageError(
            f"no recipe '{name_or_file}'. There are: {', '.join(recipe_names())}; or give a file FILE.toml"
        )
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{name_or_file}: not TOML ({error})") from error
    return recipe_from_values(values, name_or_file)


def recipe_from_values(values: Mapping[str, Any], where: str) -> Recipe:
    """Build a recipe from TOML or JSON values; `where` names their source in errors."""
    kinds = {field.name: field.type for field in fields(Recipe)}
    unknown = sorted(set(values) - set(kinds))
    if unknown:
        raise UsageError(f"{where}: no key {', '.join(unknown)} in a recipe. There are: {', '.join(kinds)}")
    try:
        return Recipe(**{key: _typed(value, kinds[key], f"{where}: {key}") for key, value in values.items()})
    except TypeError as error:  # Python names the missing fields
        missing = [name for name in kinds if name not in values and f"'{name}'" in str(error)]
        raise UsageError(f"{where}: the recipe lacks {', '.join(missing)}. Add what is missing") from error


def _typed(value: Any, kind: Any, where: str) -> Any:
    """Check a value against the type of its field; whole numbers pass as floats, nothing else is converted."""
    if get_origin(kind) is tuple:
        item, *rest = get_args(kind)
        if not isinstance(value, list) or (rest != [...] and len(value) != 1 + len(rest)):
            raise UsageError(
                f"{where} should be a list{'' if rest == [...] else f' of {1 + len(rest)}'}, not {value!r}"
            )
        return tuple(_typed(one, item, where) for one in value)
    if kind is float and type(value) is int:
        return float(value)
    plain = kind if isinstance(kind, type) else str  # a Literal; Recipe itself checks which
    if type(value) is not plain:
        raise UsageError(f"{where} should be of type {plain.__name__}, not {value!r}")
    return value


def fit_to_crop(recipe: Recipe, crop: int) -> Recipe:
    """Return the recipe for another crop, with everything that hangs on it in proportion.

    Scales grow with the crop. The batch shrinks with it, so that the cost of a step grows with the crop and not with
    its square, and the steps stay; the rate shrinks with the batch (Goyal et al. 2017, "linear scaling rule").
    """
    ratio = crop / recipe.crop
    low, high = (int(scale * ratio + 0.5) for scale in recipe.scales)
    batch = max(1, int(recipe.batch / ratio + 0.5))
    rate = recipe.rate * batch / recipe.batch
    return replace(recipe, crop=crop, scales=(low, high), batch=batch, rate=rate)


def automatic_crop(median_shorter_side: float, stride: int) -> int:
    """Return 7/8 of the median shorter side (224 of 256, as in the paper), rounded to the net's stride, halves up."""
    return max(1, int(median_shorter_side * 7 / 8 / stride + 0.5)) * stride
