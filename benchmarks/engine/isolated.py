"""Run one task in its own process, to measure its memory and start time.

    python -m benchmarks.engine.isolated '{"task": "competitor" or "classify" or "validate", ...}'

prints one line of JSON; `run_isolated` calls it for run.py and growth.py. Memory is in MB as the kernel reports it:
`loading` is the peak until the model is open, `settled` the memory then, `peak` the peak of the work that follows.
Each task imports what it needs, so that tasks without torch do not pay for it.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

BEGUN = time.perf_counter()  # before the other imports, which count as start time

if TYPE_CHECKING:
    from prelunet.evaluator.datasets.dataset import Dataset, Reader
    from prelunet.evaluator.engine.session import Session

Json = dict[str, Any]


def run_isolated(task: Mapping[str, Any]) -> Json:
    """Run a task and return its result; raises RuntimeError with the end of its stderr."""
    from benchmarks.common.results import environment

    command = [sys.executable, "-m", "benchmarks.engine.isolated", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if done.returncode:
        raise RuntimeError(f"failed in its own process: {done.stderr.strip()[-500:]}")
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the task of the argument and print its result."""
    task = json.loads(sys.argv[1])
    print(json.dumps({"competitor": competitor, "classify": classify, "validate": validate}[task["task"]](task)))


def competitor(task: Mapping[str, Any]) -> Json:
    """Open a competitor and run it on one image at one scale, plain and mirrored.

    task: name, folder and threads of its `BenchmarkNet`, height, width, scale.
    """
    from benchmarks.engine.competitors import COMPETITORS, BenchmarkNet, NotAvailable
    from prelunet.evaluator.contract import golden_image
    from prelunet.evaluator.protocols import EvaluationProtocol

    protocol = EvaluationProtocol("largest view", "dense", (task["scale"],), mirror=True)
    try:
        opened = COMPETITORS[task["name"]].open(BenchmarkNet(Path(task["folder"]), task["threads"]))
        ready = time.perf_counter() - BEGUN
        opened.answer(golden_image(task["height"], task["width"]), protocol)
    except NotAvailable as error:
        return {"not_available": str(error)}
    return {"load_seconds": round(ready, 2), "peak_memory_mb": _peak_mb()}


def classify(task: Mapping[str, Any]) -> Json:
    """Classify one image; task: model, device, precision, protocol, height, width."""
    from prelunet.evaluator.contract import golden_image
    from prelunet.evaluator.engine.classify import classify_images
    from prelunet.evaluator.protocols import build_protocol

    session, loaded = _load(task)
    image = golden_image(task["height"], task["width"])
    classify_images(session, [image], build_protocol(task["protocol"], session.contract))
    return {**loaded, "peak_mb": _peak_mb()}


def validate(task: Mapping[str, Any]) -> Json:
    """Validate images into a temporary run folder, and return the memory estimate beside the measurement.

    task: model, device, precision, protocol, data, images.
    """
    from prelunet.evaluator.datasets import open_dataset
    from prelunet.evaluator.protocols import build_protocol
    from prelunet.evaluator.validation.evaluate_model import estimate_run_memory
    from prelunet.evaluator.validation.run import build_run_info, describe_dataset
    from prelunet.evaluator.validation.validate import validate as run_validation

    session, loaded = _load(task)
    dataset = repeated(open_dataset(Path(task["data"]), split="val", wnids=None), task["images"])
    protocol = build_protocol(task["protocol"], session.contract)
    info = build_run_info(session, Path(task["model"]).name, describe_dataset(dataset), protocol)
    need = estimate_run_memory(session, protocol, info.chunk, dataset)
    with tempfile.TemporaryDirectory(prefix="prelunet-alone-") as folder:
        begun = time.perf_counter()
        run = run_validation([session], dataset, info, Path(folder) / "run")
        seconds = time.perf_counter() - begun
        written = sum(file.stat().st_size for file in (Path(folder) / "run").iterdir())
    # of the list of samples with their names; labels are few and shared
    each = (sys.getsizeof(one) + sys.getsizeof(one.file) + sys.getsizeof(one.size) for one in dataset.samples)
    list_bytes = sys.getsizeof(dataset.samples) + sum(each)
    estimated_bytes = {
        "loading": need.base + need.loading,
        "settled": need.base + need.weights,
        "peak": replace(need, loading=0).total,
    }
    return {
        **loaded,
        "seconds": round(seconds, 3),
        "peak_mb": _peak_mb(),
        **{f"foretold_{key}_mb": round(value / 2**20) for key, value in estimated_bytes.items()},
        "list_bytes_an_image": round(list_bytes / task["images"]),
        "written_bytes_an_image": round(written / task["images"]),
        "refused": sum(line.refused is not None for line in run.predictions),
    }


def _load(task: Mapping[str, Any]) -> "tuple[Session, Json]":
    from benchmarks.common.results import resident_mb
    from prelunet.evaluator.engine.load import open_with_placement
    from prelunet.evaluator.engine.session import Placement

    session = open_with_placement(Path(task["model"]), Placement(task["device"], task["precision"]))
    loaded = {"loading_mb": _peak_mb(), "settled_mb": round(resident_mb())}
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak: proc(5)
    return session, loaded


def _peak_mb() -> int:
    from prelunet.evaluator.profiling.profile import peak_memory

    return round(peak_memory() / 2**20)


@dataclass(frozen=True)
class _Copies:
    """Reads `copy/name` as `name`."""

    reader: "Reader"

    def read(self, file: str) -> bytes:
        """Return the bytes of the original."""
        return self.reader.read(file.partition("/")[2])


def repeated(dataset: "Dataset", images: int) -> "Dataset":
    """Return a dataset of `images` images: copies of the samples under other names, or an even selection of them.

    images: a multiple of the number of samples, or less, so that every size has the same mix of shapes.
    """
    from prelunet.evaluator.datasets import Sample, select

    count = len(dataset.samples)
    if images < count:
        dataset = select(dataset, limit=images, classes=())
    elif images % count:
        raise SystemExit(f"{images} images are not a multiple of {count}, so the mix of shapes would change")
    samples = [
        Sample(f"{copy:04}/{sample.file}", sample.label, sample.size)
        for copy in range(max(1, images // count))
        for sample in dataset.samples
    ]
    return replace(dataset, samples=samples, reader=_Copies(dataset.reader), spec=None)


if __name__ == "__main__":
    main()
