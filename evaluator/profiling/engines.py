"""Compare the ways to compute a model on this CPU with the one in use: speed, and how many answers change."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from ..engine.classify import average_image, run_views
from ..engine.load import open_with_placement
from ..engine.runtimes import RUNTIMES, Device
from ..engine.runtimes.base import Precision
from ..engine.session import Session
from ..errors import PreluNetError
from ..imaging.views import ViewImage
from ..protocols import EvaluationProtocol

_ENGINES: Mapping[tuple[Device, Precision], None] = {
    (cast(Device, device), precision): None
    for device, runtime in RUNTIMES.items() if not runtime.gpu
    for precisions in runtime.precisions.values() for precision in precisions
}  # fmt: skip
_ROUNDS = 2


@dataclass(frozen=True)
class EngineComparison:
    """A device and precision compared with the session in use, on the same images in turn.

    times_as_fast: speed relative to that session; images: their number; other_first_answers: for how many of them the
    best class differs.
    """

    device: Device
    precision: Precision
    times_as_fast: float
    images: int
    other_first_answers: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "times_as_fast": round(self.times_as_fast, 3)}

    def __str__(self) -> str:
        factor = float(f"{self.times_as_fast:.2g}")  # 230, not 2.3e+02
        return (
            f"--device {self.device} --precision {self.precision}: {factor:g} times as fast here, other "
            f"first answers for {self.other_first_answers:,} of {self.images:,} images"
        )


def compare_engines(
    session: Session, path: Path, images: Sequence[Sequence[ViewImage]], protocol: EvaluationProtocol
) -> Iterator[EngineComparison]:
    """Yield a comparison for each other engine of this CPU that runs the model file; none for a session on a GPU.

    path: of the file; images: the views of each image, which are computed together. Engines that are not installed, or
    cannot compute this file on this CPU, or in another precision only, are left out.
    """
    _first_answers(session, images[:1], protocol)  # a first call may take far longer
    for device, precision in () if session.circumstances.on_gpu else _ENGINES:
        if (device, precision) == (session.placement.device, session.circumstances.precision):
            continue
        placement = replace(session.placement, device=device, precision=precision)
        try:
            other = open_with_placement(path, placement, digest=session.model_sha256)
            _first_answers(other, images[:1], protocol)
        except PreluNetError:
            continue
        seconds = {session: 0.0, other: 0.0}
        answers: dict[Session, list[int]] = {}
        for turn in range(_ROUNDS):
            for one in (session, other) if turn % 2 else (other, session):
                begun = time.perf_counter()
                answers[one] = _first_answers(one, images, protocol)
                seconds[one] += time.perf_counter() - begun
        different = sum(a != b for a, b in zip(answers[session], answers[other], strict=True))
        yield EngineComparison(device, precision, seconds[session] / seconds[other], len(images), different)


def _first_answers(session: Session, images: Sequence[Sequence[ViewImage]], protocol: EvaluationProtocol) -> list[int]:
    results = iter(run_views(session, [view for of_image in images for view in of_image]))
    return [average_image(protocol, [next(results) for _ in of_image]).top(1)[0][0] for of_image in images]
