"""`prelunet verify`: check a model on this machine with its golden images."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..engine.load import open_with_placement
from ..engine.session import Placement, Session
from ..engine.verify import Deviation, require_verified, tolerance_of
from ..engine.verify import verify as verify_session
from ..terminal import echo, table_lines
from .options import Only, derive_options


@derive_options
def verify(
    *,
    model: Annotated[Path, typer.Argument(help="Model file.")],
    placement: Annotated[Placement, Only("device", "precision", "threads")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a model's golden images on this machine and print the deviation from a float64 reference.

    Exits 6 if a score deviates by more than the tolerance.
    """
    session = open_with_placement(model, placement, check=False)  # it is compared below
    deviations = verify_session(session)
    try:
        _print(session, deviations, as_json=as_json)
    finally:  # also if the reader of stdout has closed it
        bounds = require_verified(str(model), session, deviations)
    if not as_json:
        echo(f"{model}: verified on {session.circumstances}: deviation at most {bounds}")
        if (calibration := session.contract.calibration) is not None and (cost := calibration.cost) is not None:
            echo(
                f"int8 itself moves the scores of these images by up to {cost.scores:g}, logits by {cost.logits:g} of "
                "the largest. They are no photos; what it costs on yours: prelunet compare"
            )


def _print(session: Session, deviations: Sequence[Deviation], *, as_json: bool) -> None:
    """Print the deviations."""
    if as_json:
        result = {
            "model": session.model_sha256,
            "circumstances": session.circumstances.to_json(),
            "passed": all(d.passed for d in deviations),
            "tolerance": asdict(tolerance_of(session)),
            "deviations": [each.to_json() for each in deviations],
        }
        echo(json.dumps(result))
    else:
        rows = [("image", "run", "deviation of scores", "of logits (of largest)", "")]
        for d in deviations:
            verdict = "ok" if d.passed else "WRONG"
            rows.append((f"{d.height}x{d.width}", d.case, f"{d.scores:.1e}", f"{d.logits:.1e}", verdict))
        echo("\n".join([str(session.circumstances), *table_lines(rows, right_aligned=())]))
