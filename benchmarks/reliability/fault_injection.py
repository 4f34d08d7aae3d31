"""Run `prelunet serve` with injected delays, faults and leaks, controlled by a file that is read before each batch.

    python -m benchmarks.reliability.fault_injection CONTROL.json serve --model NAME=MODEL.onnx ...

Everything else is the unmodified program. The file holds a JSON object and may be replaced while the server runs:

    hold     true: batches wait
    delay    seconds added to each batch
    fault    what happens to a batch with a picture whose values are all MARK: "error": the runtime raises; "memory":
             out of memory; "nan": its scores are NaN; "lost": the device is lost. "sticky": every batch fails, also
             the black canvas
    rows     maximum number of canvases that fit into the device's memory
    leak     number of copies of each decoded picture that are kept
    dies_at_width  the process dies when it decodes a picture of this width
    arrival  (read only at the start) timeout of a call's message in seconds, which the server otherwise fixes
    gpu      (read only at the start) form batches by the rules of a GPU, with this limit of pixels, and stage ahead
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from msgspec import structs

from prelunet.evaluator.cli import main
from prelunet.evaluator.engine.load import open_with_placement
from prelunet.evaluator.engine.memory import gpu_rules
from prelunet.evaluator.engine.session import Outputs, Session
from prelunet.evaluator.errors import DeviceLost, OutOfMemory
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.serving import decoding, lifecycle, models
from prelunet.evaluator.serving.options import ServeOptions
from prelunet.evaluator.verbs import serve

MARK = 77  # every value of the picture that triggers the fault
GPU_PIXELS = 2**15  # of a batch under the rules of a GPU: few enough for a CPU to warm up every shape bucket
SWITCH_PIXELS = 2**18  # cost of a change of shape on the simulated GPU

_kept: list[Any] = []


class ControlFile:
    """The control file, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_at = 0
        self._faults: dict[str, Any] = {}

    def __call__(self) -> dict[str, Any]:
        """Return the contents of the file."""
        changed = self._path.stat().st_mtime_ns
        if changed != self._read_at:
            self._faults, self._read_at = json.loads(self._path.read_text(encoding="utf-8")), changed
        return self._faults


class FaultySession:
    """Wraps one session: staging keeps the canvases, computing injects the faults."""

    def __init__(self, session: Session, control: ControlFile) -> None:
        self._stage, self._compute = session.stage, session.compute
        self._control = control
        if max_pixels := control().get("gpu"):
            rules = gpu_rules(session.contract, None)
            session.rules = replace(
                rules, max_pixels=max_pixels, max_windows=max_pixels // 16, switch_pixels=SWITCH_PIXELS
            )
            session.placement = replace(session.placement, device="cuda")
        session.stage, session.compute = self.stage, self.compute  # type: ignore[method-assign]

    def stage(self, images: Any, sizes: Any) -> Any:
        """Stage a batch; keep its images and sizes beside it."""
        return self._stage(images, sizes), images, sizes

    def compute(self, staged: Any, *, in_lane: bool = False) -> Outputs:
        """Compute a batch, or fail as the control file demands."""
        inner, images, sizes = staged
        while (faults := self._control()).get("hold"):
            time.sleep(0.005)
        time.sleep(faults.get("delay", 0))
        marked = [
            place
            for place, (height, width) in enumerate(sizes)
            if (images[place, :height, :width] == MARK).all()
        ]  # fmt: skip
        fault = faults.get("fault")
        if fault == "sticky":
            raise RuntimeError("injected sticky fault")
        if len(images) > faults.get("rows", len(images)) or (fault == "memory" and marked):
            raise OutOfMemory("injected out-of-memory fault")
        if fault == "lost" and marked:
            raise DeviceLost("injected device loss")
        if fault == "error" and marked:
            raise RuntimeError("injected error")
        outputs = self._compute(inner, in_lane=in_lane)
        if fault != "nan" or not marked:
            return outputs
        scores, logits = np.array(outputs.scores), np.array(outputs.logits)
        scores[marked] = logits[marked] = np.nan
        return structs.replace(outputs, scores=scores, logits=logits)


def write_control(path: Path, **faults: Any) -> None:
    """Replace the contents of the control file; they apply from the next batch."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(faults), encoding="utf-8")
    new.replace(path)


def _main() -> None:
    control = ControlFile(Path(sys.argv.pop(1)))

    def opened(*arguments: Any, **options: Any) -> Session:
        session = open_with_placement(*arguments, **options)
        FaultySession(session, control)
        return session

    def decoded(*arguments: Any, **options: Any) -> Any:
        image, faults = decode_image(*arguments, **options), control()
        _kept.extend(np.array(image) for _ in range(faults.get("leak", 0)))
        if image.width == faults.get("dies_at_width"):
            os.kill(os.getpid(), signal.SIGKILL)  # like a crash in C, but without a core file
        return image

    replaced: list[tuple[ModuleType, str, Any]] = [
        (models, "open_with_placement", opened),
        (decoding, "decode_image", decoded),
    ]
    if (message_timeout := control().get("arrival")) is not None:

        def serve_with_timeout(options: ServeOptions, report: Callable[[str], None]) -> Any:
            limits = replace(options.limits, message_timeout=message_timeout)
            return lifecycle.serve(replace(options, limits=limits), report)

        replaced.append((serve, "serve_until_stopped", serve_with_timeout))
    for module, name, replacement in replaced:
        assert hasattr(module, name), f"{module.__name__} has no {name} any more"
        setattr(module, name, replacement)
    main()


if __name__ == "__main__":
    _main()
