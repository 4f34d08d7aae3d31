"""diagnosis.jsonl, written by `train --diagnose` and read by `prelunet inspect RUN`: one line per evaluation.

Does not import torch, so that a run folder can be inspected without it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...evaluator.errors import UsageError, from_os_error
from ..run_state.metrics_log import read_log
from ..run_state.run_folder import DIAGNOSIS_FILE

DEFAULT_IMAGES = 256  # on which layers are measured by default
SIGNIFICANT_DIGITS = 6  # more would only reflect a machine's summation order


@dataclass(frozen=True)
class LayerResponse:
    """Statistics of a layer on a set of images. Its response is the output before the activation (y_l of the paper).

    mean, variance: of the response over images, channels and positions; the response of fc3 is the logits.
    gradient_variance: of the gradient of an image's own loss (cross-entropy) with respect to its response, over
    images, channels and positions.
    never_positive: fraction of the channels (units for fc1 and fc2), 0 to 1, whose response is nowhere above 0 on any
    of the images. With ReLU these are dead: they output 0 and learn nothing. With PReLU and leaky ReLU they use only
    their negative side and so are linear on these images. None for fc3, which has no activation.
    slope: mean of the learned slopes; None if none is learned.
    """

    layer: str
    mean: float
    variance: float
    gradient_variance: float
    never_positive: float | None
    slope: float | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data; non-finite numbers become None, since JSON cannot represent them."""
        return {"layer": self.layer, **{key: _plain(value) for key, value in vars(self).items() if key != "layer"}}


def read_layer_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run folder's diagnosis.jsonl, at least one: `step`, and `layers` as from `to_json`.

    An incomplete last line is ignored. Raises UsageError if the file is missing or has no complete line, RunFolderError
    if a line is damaged.
    """
    path = folder / DIAGNOSIS_FILE
    try:
        entries = read_log(path)
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder}: no {DIAGNOSIS_FILE}, so there is no history to show. `prelunet train --diagnose` writes it. To "
            "measure one checkpoint: prelunet inspect CKPT --data DIR"
        ) from error
    except OSError as error:
        raise from_os_error(error) from error
    if not entries:
        raise UsageError(f"{path}: empty: the run has not been evaluated yet. Try again after an evaluation")
    return entries


def _plain(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def std(layer: Mapping[str, Any], key: str) -> float | None:
    """Return the square root of the variance that a layer's data has under `key`, or None."""
    variance = layer[key]
    return None if variance is None else math.sqrt(max(variance, 0.0))
