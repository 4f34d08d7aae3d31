"""`prelunet serve` whose session can be slowed down, broken or made to leak, by a file that is read before each batch.

    python -m benchmarks.reliability.fault_injection CONTROL.json serve --model NAME=MODEL.onnx ...

Everything else is the program as it is. The file holds an object, and may be replaced while the server runs:

    hold     batches wait until the file says otherwise
    delay    seconds that each batch takes longer
    fault    what happens to a batch that shows a picture of nothing but MARK:
             "error" an exception of the runtime's, "memory" too little of it, "nan" scores that are none, "lost" a
             device that gives nothing but errors; "sticky": every batch fails, the black canvas too
    rows     so many canvases at most fit into the device's memory
    leak     so many copies of every picture that is decoded are kept
    dies_at_width  the process dies when it decodes a picture of this width
    arrival  (at the start only) seconds for the message of a call, where the server has them fixed
    gpu      (at the start only) batches are formed by the rules of a GPU, of so many pixels at most, and staged ahead
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prelunet.evaluator.cli import main
from prelunet.evaluator.engine.memory import gpu_rules
from prelunet.evaluator.engine.session import Outputs, Session
from prelunet.evaluator.errors import DeviceLost, OutOfMemory
from prelunet.evaluator.serving import classifier, models
from prelunet.evaluator.verbs import serve

MARK = 77  # every value of the picture that a fault is for
GPU_PIXELS = 2**15  # of a batch by the rules of a GPU: few enough for a CPU to warm up every rung
SWITCH_PIXELS = 2**18  # how much a change of shape costs the device that there is not

_kept: list[Any] = []


class ControlFile:
    """The file, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at = 0
        self._told: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Return what the file holds."""
        changed = self._path.stat().st_mtime_ns
        if changed != self._read_at:
            self._told, self._read_at = json.loads(self._path.read_text(encoding="utf-8")), changed
        return self._told


class FaultySession:
    """Stands between the server and one session: staging notes the canvases, computing does what the file says."""

    def __init__(self, session: Session, control: ControlFile) -> None:
        self._stage, self._compute = session.stage, session.compute
        self._control = control
        told = control()
        if most := told.get("gpu"):
            rules = gpu_rules(session.contract, None)
            session.rules = replace(rules, max_pixels=most, max_windows=most // 16, switch_pixels=SWITCH_PIXELS)
            session.placement = replace(session.placement, device="cuda")
        session.stage, session.compute = self.stage, self.compute  # type: ignore[method-assign]

    def stage(self, images: Any, sizes: Any) -> Any:
        """Stage a batch, with what it shows."""
        return self._stage(images, sizes), images, sizes

    def compute(self, staged: Any) -> Outputs:
        """Compute a batch, or fail as the file says."""
        inner, images, sizes = staged
        while (told := self._control()).get("hold"):
            time.sleep(0.005)
        time.sleep(told.get("delay", 0))
        marked = [
            place
            for place, (height, width) in enumerate(sizes)
            if (images[place, :height, :width] == MARK).all()
        ]  # fmt: skip
        fault = told.get("fault")
        if fault == "sticky":
            raise RuntimeError("a fault that stays was asked for")
        if len(images) > told.get("rows", len(images)) or (fault == "memory" and marked):
            raise OutOfMemory("a lack of memory was asked for")
        if fault == "lost" and marked:
            raise DeviceLost("the loss of the device was asked for")
        if fault == "error" and marked:
            raise RuntimeError("an error was asked for")
        outputs = self._compute(inner)
        return _without_numbers(outputs, marked) if fault == "nan" and marked else outputs


def _without_numbers(outputs: Outputs, marked: list[int]) -> Outputs:
    scores, logits = np.array(outputs.scores), np.array(outputs.logits)
    scores[marked] = logits[marked] = np.nan
    return replace(outputs, scores=scores, logits=logits)


def _faulty_decoder(decode: Callable[..., Any], control: ControlFile) -> Callable[..., Any]:
    def decode_faulty(*arguments: Any, **options: Any) -> Any:
        image, told = decode(*arguments, **options), control()
        _kept.extend(np.array(image) for _ in range(told.get("leak", 0)))
        if image.width == told.get("dies_at_width"):
            os.kill(os.getpid(), signal.SIGKILL)  # as after a fault in C, but it leaves no core file
        return image

    return decode_faulty


def write_control(path: Path, **told: Any) -> None:
    """Replace what the file says; the next batch obeys."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(told), encoding="utf-8")
    new.replace(path)


def _main() -> None:
    control = ControlFile(Path(sys.argv.pop(1)))
    open_with_placement = models.open_with_placement

    def opened(*arguments: Any, **options: Any) -> Session:
        session = open_with_placement(*arguments, **options)
        FaultySession(session, control)
        return session

    models.open_with_placement = opened  # type: ignore[attr-defined]
    if (message_timeout := control().get("arrival")) is not None:
        serve.ServerLimits = partial(serve.ServerLimits, message_timeout=message_timeout)  # type: ignore[attr-defined]
    classifier.decode_image = _faulty_decoder(classifier.decode_image, control)  # type: ignore[attr-defined]
    main()


if __name__ == "__main__":
    _main()
