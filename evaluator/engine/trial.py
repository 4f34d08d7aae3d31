"""What a session has to do before it counts as opened: run, in float32 with the right scores, and fill its memory."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.engine.runtime import reason_of
from prelunet.evaluator.engine.tolerances import deviation, tolerance_of
from prelunet.evaluator.errors import EnvironmentFault, PreluNetError

if TYPE_CHECKING:  # which calls this when it opens a file
    from prelunet.evaluator.engine.session import Session

log = logging.getLogger(__name__)


def check_it_runs(session: "Session", name: str) -> None:
    """Run one canvas of the smallest size; a GPU that computes in float32 must give the scores that the file states.

    A provider may round products to TF32 that it was told not to. name: of the model, for errors.
    Raises EnvironmentFault when the model does not run, or when its scores are off by more than float32 allows.
    """
    contract = session.contract
    compared = session.placement.device == "cuda" and session.circumstances.precision == "fp32"
    if not (compared and contract.golden):
        if compared:
            log.warning("%s carries no golden images, so float32 is not checked on this GPU", name)
        _run_black(session, name, 1, contract.min_side)
        return
    golden = contract.golden[0]
    with _errors(session, name, 1, golden.height, golden.width):
        outputs = session.run(
            golden_image(golden.height, golden.width)[None], np.array([[golden.height, golden.width]])
        )
    found = deviation("alone", (golden.height, golden.width), outputs, 0, golden.scores, golden.logits)
    if not found.passed:
        allowed = tolerance_of("fp32")
        raise EnvironmentFault(
            f"--device cuda: in fp32 the scores of {name} for its golden image are off by {found.scores:.1e} and the "
            f"logits by {found.logits:.1e} of the largest; {allowed.scores:g} and {allowed.logits:g} are allowed. If "
            "`prelunet verify MODEL.onnx --device cpu` finds the file good, this GPU does not compute in float32: "
            "--precision tf32 says so"
        )


def run_largest(session: "Session", name: str) -> None:
    """Run a batch of the largest canvases, so that a GPU's memory is taken in regions into which all others fit.

    Raises EnvironmentFault when the model does not run; name: of the model, for errors.
    """
    contract, rules = session.contract, session.rules
    side = max(contract.default_scales)
    windows = math.prod(contract.window_grid(side, side))
    _run_black(session, name, rules.most_rows(side**2, windows), side)


def _run_black(session: "Session", name: str, rows: int, side: int) -> None:
    with _errors(session, name, rows, side, side):
        session.run(np.zeros((rows, side, side, 3), np.uint8), np.full((rows, 2), side, np.int64))


@contextmanager
def _errors(session: "Session", name: str, rows: int, height: int, width: int) -> Iterator[None]:
    try:
        yield
    except PreluNetError:
        raise
    except Exception as error:  # the runtime's own classes
        raise EnvironmentFault(
            f"model {name} loads but does not run on {session.circumstances.provider} with {rows} canvases of "
            f"{height}x{width} ({type(error).__name__}: {reason_of(error)}). Try: prelunet verify MODEL.onnx"
        ) from error
