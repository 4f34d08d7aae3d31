"""One point of growth.py alone in a process of its own, so that its memory is its own.

    python benchmarks/growth_alone.py '{"task": "classify" or "validate", ...}'

prints one line of JSON. Memory is in MB, as the kernel tells it; a peak is that since the step before.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evaluator.contract import golden_image
from evaluator.datasets import open_dataset
from evaluator.datasets.sample import Dataset, Reader, Sample
from evaluator.datasets.selection import select
from evaluator.engine.classify import classify_images, plan_views
from evaluator.engine.footprint import batch_bytes
from evaluator.engine.memory import BASE, LOADING, SETTLED
from evaluator.engine.session import Placement, Session, open_placed
from evaluator.imaging.views import make_views
from evaluator.protocols import Protocol, make_protocol
from evaluator.validation.run import describe_dataset, run_info
from evaluator.validation.validate import validate
from machine import memory_mb


def main() -> None:
    """Do what the argument says and print what it took."""
    task = json.loads(sys.argv[1])
    model = Path(task["model"])
    session = open_placed(model, Placement(task["device"], task["precision"]))
    loaded = {"loading_mb": memory_mb(peak=True), "settled_mb": memory_mb(peak=False)}
    found = {"classify": _classify, "validate": _validate}[task["task"]](session, task)
    print(json.dumps({**loaded, **found}))


def _classify(session: Session, task: Mapping[str, Any]) -> dict[str, Any]:
    """Classify one image of task["height"] x task["width"] pixels task["calls"] times, and again with its windows."""
    protocol = make_protocol(task["protocol"], session.contract)
    image = golden_image(task["height"], task["width"])
    _forget_peak()
    seconds = []
    for _ in range(task["calls"]):
        begun = time.perf_counter()
        classify_images(session, [image], protocol)
        seconds.append(round(time.perf_counter() - begun, 4))
    peak = memory_mb(peak=True)
    _forget_peak()
    classified = classify_images(session, [image], protocol, keep_windows=True)[0]
    windows = [view.window_scores for view in classified.views if view.window_scores is not None]
    return {
        "seconds": seconds,
        "peak_mb": peak,
        "peak_with_windows_mb": memory_mb(peak=True),
        "window_scores_mb": round(sum(scores.nbytes for scores in windows) / 2**20, 2),
        **_predicted(session, image.shape[:2], protocol, Path(task["model"]).stat().st_size),
    }


def _predicted(session: Session, sides: tuple[int, int], protocol: Protocol, file_bytes: int) -> dict[str, int]:
    """Return what evaluator/engine/memory.py and footprint.py expect: at most so many MB."""
    runtime = "openvino" if session.placement.device == "openvino" else "cpu"
    views = make_views(golden_image(*sides), protocol)
    batches = plan_views(session, views).batches
    batch = max(batch_bytes(session.contract, b.rows, b.height, b.width, runtime=runtime) for b in batches)
    settled = BASE + SETTLED[runtime] * file_bytes
    needs = {
        "loading": BASE + LOADING * file_bytes,
        "settled": settled,
        "peak": settled + batch + sum(view.image.nbytes for view in views),
    }
    return {"rows": max(b.rows for b in batches), **{f"predicted_{key}_mb": _mb(need) for key, need in needs.items()}}


def _validate(session: Session, task: Mapping[str, Any]) -> dict[str, Any]:
    """Validate task["images"] images into a run folder that is thrown away."""
    dataset = repeated(open_dataset(Path(task["data"]), split="val", class_names=None), task["images"])
    info = run_info(
        session, Path(task["model"]).name, describe_dataset(dataset), make_protocol(task["protocol"], session.contract)
    )
    _forget_peak()
    with tempfile.TemporaryDirectory(prefix="prelunet-growth-") as folder:
        begun = time.perf_counter()
        run = validate([session], dataset, info, Path(folder) / "run")
        seconds = time.perf_counter() - begun
        written = sum(file.stat().st_size for file in run.folder.iterdir())
    refused = sum(line.refused is not None for line in run.predictions)
    return {
        "seconds": round(seconds, 3),
        "peak_mb": memory_mb(peak=True),
        "list_bytes_an_image": round(_list_bytes(dataset.samples) / task["images"]),
        "written_bytes_an_image": round(written / task["images"]),
        "refused": refused,
    }


def _list_bytes(samples: Sequence[Sample]) -> int:
    """Return what a list of samples takes with their names; labels are few and shared."""
    each = (sys.getsizeof(sample) + sys.getsizeof(sample.file) + sys.getsizeof(sample.size) for sample in samples)
    return sys.getsizeof(samples) + sum(each)


@dataclass(frozen=True)
class _Copies:
    """Reads `copy/name` as `name`."""

    reader: Reader

    def read(self, file: str) -> bytes:
        """Return the bytes of the original."""
        return self.reader.read(file.partition("/")[2])


def repeated(dataset: Dataset, images: int) -> Dataset:
    """Return a dataset of so many images: copies of the given ones under other names, or an even choice of them.

    images: a multiple of the given ones, or fewer: each size has the same mix of shapes.
    """
    given = len(dataset.samples)
    if images < given:
        dataset = select(dataset, limit=images, classes=())
    elif images % given:
        raise SystemExit(f"{images} images are no multiple of {given}, so the mix of shapes would change")
    copies = max(1, images // given)
    samples = [
        Sample(f"{copy:04}/{sample.file}", sample.label, sample.size)
        for copy in range(copies)
        for sample in dataset.samples
    ]
    return replace(dataset, samples=samples, reader=_Copies(dataset.reader), place=None)


def _forget_peak() -> None:
    """Let the kernel count the peak of this process from here on (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _mb(value: float) -> int:
    return round(value / 2**20)


if __name__ == "__main__":
    main()
