"""How memory grows: with the scale, with the number of classes and with the size of the dataset.

    python -m benchmarks.engine.growth [--output benchmarks/results/growth.json]   measure what the file lacks

Uses model A with random weights and, for the dataset, the demo net, with every engine of the CPU, each point in its own
process. A point is written as soon as it is measured, and the same command resumes an interrupted one (runner.py).
tests/engine/test_memory.py compares the bounds on memory with these results.

- memory:  `validate` of photos of 12 million pixels, half of them 1:4, with its own estimate
- classes: 10 to 21,841 (all of ImageNet)
- dataset: `validate` of 100 to 10,000 small images, with --most-images 50000 also 50,000
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.common.results import RESULTS, circumstances, cpu, digest_of
from benchmarks.common.rig import Rig
from benchmarks.common.runner import Case, Runner, command_line
from benchmarks.engine.isolated import run_isolated
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.engine.load import open_with_placement
from prelunet.evaluator.engine.session import Device, Placement, Precision
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.training.data.splits import embedded_dataset_path

PACKAGES = ("prelunet", "onnxruntime", "onnxruntime-gpu", "openvino", "numpy", "pillow")  # that can change a number
MEASURED = ("evaluator/engine", "evaluator/imaging", "evaluator/validation", "export",
            "benchmarks/engine/growth.py", "benchmarks/engine/isolated.py")  # fmt: skip
NET = "A"
PHOTO = (375, 500)  # height and width of about half of ImageNet's photos
LARGE_PHOTOS = ((3000, 4000), (1732, 6928))
MEMORY_SCALES = ((224, 8), (384, 4), (640, 2))  # scale, copies of each photo: enough to fill a batch
CLASSES_SCALE, CLASSES = 384, (10, 100, 1_000, 10_000, 21_841)
IMAGES = (100, 1_000, 10_000, 50_000)
DATASET_PROTOCOL = "multi-scale"  # hundreds of shapes: memory that a runtime keeps for each would show

Json = dict[str, Any]


ENGINES: Mapping[str, tuple[Device, Precision]] = {
    "onnxruntime fp32": ("cpu", "fp32"),
    "OpenVINO fp32": ("openvino", "fp32"),
    "OpenVINO bf16": ("openvino", "bf16"),
}


@dataclass
class Nets(Rig):
    """Model files with any number of classes. count: 0 for the rig's default."""

    count: int = 0

    @property
    def classes(self) -> int:
        """Return the number of classes of all nets."""
        return self.count or super().classes


@dataclass(frozen=True)
class GrowthBench:
    """State shared by the parts. engines: names of the available ones; folder: of model files."""

    tiny: bool
    folder: Path
    engines: Sequence[str]
    most_images: int

    def sampled(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values to measure: all, or in a rehearsal the first and the last."""
        return (values[0], values[-1]) if self.tiny else values

    def nets(self, classes: int = 0, *, demo: bool = False) -> Nets:
        """Return model files with a number of classes; demo: of the demo net."""
        return Nets("cpu", self.tiny or demo, self.folder / str(classes), count=classes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; return 0, or 1 if a point failed, or 3 if the time limit left some out."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "growth.json", limit=900)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"parts to measure, of: {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="ENGINE",
                        help=f"engines, of: {', '.join(map(repr, ENGINES))}")  # fmt: skip
    parser.add_argument("--most-images", type=int, default=IMAGES[-2],
                        help=f"size of the largest dataset; {IMAGES[-1]:,} takes minutes longer")  # fmt: skip
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="prelunet-growth-") as folder:
        engines, found = _engines(Path(folder), options.engines)
        bench = GrowthBench(options.tiny, Path(folder), engines, options.most_images)
        facts = {"device": cpu(), "tiny": options.tiny, "source": digest_of(*MEASURED), "engines": found}
        runner = Runner(
            options.output, "growth", {**circumstances(__file__, options, PACKAGES, words), **facts}, options.limit
        )
        for part in options.parts:
            print(part)
            runner.run(replace(case, settings={"part": part, **case.settings}) for case in PARTS[part](bench))
    return runner.finish()


def _engines(folder: Path, names: Sequence[str]) -> tuple[list[str], Json]:
    """Return the engines available here, and for each name its circumstances or why it is unavailable."""
    path = Nets("cpu", tiny=True, files=folder).model_file(NET)
    found: Json = {}
    for name in names:
        try:
            found[name] = open_with_placement(path, Placement(*ENGINES[name])).circumstances.to_json()
        except EnvironmentFault as error:
            found[name] = f"not measured: {error}"
    return [name for name in names if not isinstance(found[name], str)], found


def memory(bench: GrowthBench) -> Iterator[Case]:
    """Each engine in its own process, validating large photos at growing scales."""
    for scale, copies in bench.sampled(MEMORY_SCALES):
        for engine in bench.engines:
            work = partial(_large_photos, bench, engine, scale, copies)
            yield Case({"scale": scale, "engine": engine}, work, scale**2 / 5000)


def _large_photos(bench: GrowthBench, engine: str, scale: int, copies: int) -> Json:
    nets, photos = bench.nets(), bench.folder / "photos"
    for number, (height, width) in enumerate(LARGE_PHOTOS):  # one JPEG for each size, each a class
        file = photos / f"n{number:08}" / "photo.jpg"
        if not file.exists():
            file.parent.mkdir(parents=True)
            Image.fromarray(golden_image(nets.px(height), nets.px(width))).save(file, quality=92)
    images = copies * len(LARGE_PHOTOS)
    return run_engine_isolated(
        engine, "validate", nets.model_file(NET), protocol=f"dense-{nets.px(scale)}", data=str(photos), images=images
    )


def classes(bench: GrowthBench) -> Iterator[Case]:
    """Each engine in its own process, on nets with growing numbers of classes; one model file exists at a time."""
    for count in bench.sampled(CLASSES):
        for engine in bench.engines:
            yield Case({"classes": count, "engine": engine}, partial(_of_classes, bench, engine, count))
        for file in (bench.folder / str(count)).glob("*.onnx"):
            file.unlink()


def _of_classes(bench: GrowthBench, engine: str, count: int) -> Json:
    nets = bench.nets(count)
    path, (height, width) = nets.model_file(NET), map(nets.px, PHOTO)
    protocol = f"dense-{nets.px(CLASSES_SCALE)}"
    found = run_engine_isolated(engine, "classify", path, protocol=protocol, height=height, width=width)
    return {**found, "file_mb": round(path.stat().st_size / 2**20, 1)}


def dataset(bench: GrowthBench) -> Iterator[Case]:
    """Validate with each engine in its own process; the largest dataset with the first engine only."""
    for images in IMAGES:
        for engine in bench.engines if images < IMAGES[-1] else bench.engines[:1]:
            if images <= bench.most_images:
                yield Case(
                    {"images": images, "engine": engine}, partial(_validation, bench, engine, images), 5 + images / 150
                )


def _validation(bench: GrowthBench, engine: str, images: int) -> Json:
    model, data = bench.nets(demo=True).model_file(NET), str(embedded_dataset_path())
    return run_engine_isolated(engine, "validate", model, protocol=DATASET_PROTOCOL, data=data, images=images)


def run_engine_isolated(engine: str, task: str, model: Path, **details: Any) -> Json:
    """Run a task of isolated.py on an engine and return its result."""
    device, precision = ENGINES[engine]
    return run_isolated({"task": task, "model": str(model), "device": device, "precision": precision, **details})


PARTS: Mapping[str, Callable[[GrowthBench], Iterator[Case]]] = {
    part.__name__: part for part in (memory, classes, dataset)
}

if __name__ == "__main__":
    sys.exit(main())
