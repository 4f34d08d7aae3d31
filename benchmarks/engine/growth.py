"""How cost grows: with the image's area and elongation, with scales and classes, and with the size of the dataset.

    python -m benchmarks.engine.growth [--output benchmarks/results/growth.json]   measure what the file lacks
    python -m benchmarks.engine.growth --draw docs/performance                     draw the file and print its tables

Uses model A with random weights and, for the dataset, the demo net, with every engine of the CPU in turn. Each point is
written as soon as it is measured, and the same command resumes an interrupted one (runner.py). On two otherwise idle
cores all parts take about twelve minutes.

- area:       one view and its mirror image of a 4:3 photo, from 224 pixels to 1024
- elongation: shorter side 256, from square to 1:4
- scales:     1, 2, 3 and 6 scales
- memory:     `validate` of photos of 12 million pixels, half of them 1:4, with its own estimate; one process per point
- classes:    10 to 21,841 (all of ImageNet); one process per point
- dataset:    `validate` of 100 to 10,000 small images, with --most-images 50000 also 50,000; one process per point
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common.results import RESULTS, circumstances, cpu, digest_of, shuffled
from benchmarks.common.rig import Rig
from benchmarks.common.runner import Case, Runner, command_line
from benchmarks.engine.competitors import CompetitorPrecision
from benchmarks.engine.growth_plots import draw, tables
from benchmarks.engine.interleaved import deviation, timed, windows_of, within
from benchmarks.engine.isolated import run_isolated
from prelunet.evaluator.architectures import parameter_shapes
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.load import open_with_placement
from prelunet.evaluator.engine.session import Device, Placement, Session
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.protocols import build_protocol
from prelunet.training.data.splits import embedded_dataset_path

PACKAGES = ("prelunet", "onnxruntime", "onnxruntime-gpu", "openvino", "numpy", "pillow")  # that can change a number
MEASURED = ("evaluator/engine", "evaluator/imaging", "evaluator/validation", "export",
            "benchmarks/engine/growth.py", "benchmarks/engine/isolated.py")  # fmt: skip
NET = "A"
PHOTO = (375, 500)  # height and width of about half of ImageNet's photos
AREA_SCALES = (224, 256, 320, 384, 480, 640, 1024)
LARGE_PHOTOS = ((3000, 4000), (1732, 6928))
MEMORY_SCALES = ((224, 8), (384, 4), (640, 2))  # scale, copies of each photo: enough to fill a batch
ELONGATED_SCALE, ELONGATIONS = 256, (1.0, 1.5, 2.0, 3.0, 4.0)
SCALES = ((256,), (256, 384), (256, 384, 480), (224, 256, 300, 360, 448, 560))  # multi-scale's, spp-net's
CLASSES_SCALE, CLASSES = 384, (10, 100, 1_000, 10_000, 21_841)
IMAGES = (100, 1_000, 10_000, 50_000)
DATASET_PROTOCOL = "multi-scale"  # hundreds of shapes: memory that a runtime keeps for each would show
MIN_ROUNDS, MAX_ROUNDS, ROUND_SECONDS = 2, 7, 5.0  # rounds of all engines on a point, and a time limit

Json = dict[str, Any]


ENGINES: Mapping[str, tuple[Device, CompetitorPrecision]] = {
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


@dataclass
class GrowthBench:
    """State shared by the parts. engines: names of the available ones; folder: of model files."""

    tiny: bool
    folder: Path
    engines: Sequence[str]
    most_images: int
    _sessions: dict[str, Session] = field(default_factory=dict)

    def sampled(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values to measure: all, or in a rehearsal the first and the last."""
        return (values[0], values[-1]) if self.tiny else values

    def nets(self, classes: int = 0, *, demo: bool = False) -> Nets:
        """Return model files with a number of classes; demo: of the demo net."""
        return Nets("cpu", self.tiny or demo, self.folder / str(classes), count=classes)

    @property
    def sessions(self) -> Mapping[str, Session]:
        """Return a session of each engine on model A; all stay open together."""
        if not self._sessions:
            path = self.nets().model_file(NET)
            self._sessions = {name: open_with_placement(path, Placement(*ENGINES[name])) for name in self.engines}
        return self._sessions

    def close(self) -> None:
        """Release the memory of the sessions before memory is measured."""
        self._sessions = {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or draw; return 0, or 1 if a point failed, or 3 if the time limit left some out."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "growth.json", limit=900)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"parts to measure, of: {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="ENGINE",
                        help=f"engines, of: {', '.join(map(repr, ENGINES))}")  # fmt: skip
    parser.add_argument("--draw", type=Path, metavar="DIR", help="draw into DIR and print the tables")
    parser.add_argument("--most-images", type=int, default=IMAGES[-2],
                        help=f"size of the largest dataset; {IMAGES[-1]:,} takes minutes longer")  # fmt: skip
    options = parser.parse_args(words)
    if options.draw:
        data = json.loads(options.output.read_text(encoding="utf-8"))
        draw(data, options.draw)
        print(tables(data))
        return 0
    with tempfile.TemporaryDirectory(prefix="prelunet-growth-") as folder:
        engines, found = _engines(Path(folder), options.engines)
        bench = GrowthBench(options.tiny, Path(folder), engines, options.most_images)
        facts = {"device": cpu(), "tiny": options.tiny, "source": digest_of(*MEASURED), "engines": found}
        runner = Runner(
            options.output, "growth", {**circumstances(__file__, options, PACKAGES, words), **facts}, options.limit
        )
        for part in options.parts:
            print(part)
            if part in ISOLATED_PARTS:
                bench.close()
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


def area(bench: GrowthBench) -> Iterator[Case]:
    """Pairs of mirrored views of one photo at growing scales."""
    for scale in bench.sampled(AREA_SCALES):
        yield Case({"scale": scale}, partial(_timed, bench, (scale,), PHOTO), scale**2 / 16_000)


def elongation(bench: GrowthBench) -> Iterator[Case]:
    """Pairs of mirrored views of one scale and growing length."""
    for times in bench.sampled(ELONGATIONS):
        photo = (ELONGATED_SCALE, round(ELONGATED_SCALE * times))
        yield Case({"times": times}, partial(_timed, bench, (ELONGATED_SCALE,), photo), 40)


def scales(bench: GrowthBench) -> Iterator[Case]:
    """One photo at an increasing number of scales."""
    for several in bench.sampled(SCALES):
        yield Case({"scales": list(several)}, partial(_timed, bench, several, PHOTO), 40)


def _timed(bench: GrowthBench, of_scales: Sequence[int], photo: tuple[int, int]) -> Json:
    """Time the engines in turn on a photo; lengths refer to crops of 224 pixels."""
    nets = bench.nets()
    image = golden_image(*map(nets.px, photo))
    protocol = build_protocol("dense-" + "-".join(str(nets.px(scale)) for scale in of_scales),
                             next(iter(bench.sessions.values())).contract)  # fmt: skip
    answers = {
        name: lambda session=session: classify_images(session, [image], protocol)[0].scores
        for name, session in bench.sessions.items()
    }
    taken, deviations = interleave(answers, bench.tiny)
    height, width = image.shape[:2]
    sizes = [resized_size(height, width, nets.px(scale)) for scale in of_scales]
    return {"seconds": taken, "deviations": deviations, **_amount(nets, [size for size in sizes for _ in "pm"])}


def interleave(
    answers: Mapping[str, Callable[[], np.ndarray]], tiny: bool
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Call each function once untimed, then all in turn, each round in another order.

    Returns the seconds of each call, and the `deviation` of each function's scores from those of the first. Raises
    RuntimeError if rounding cannot explain a deviation.
    """
    scores = {name: answer() for name, answer in answers.items()}
    expected = next(iter(scores.values()))
    deviations = {name: deviation(found, expected) for name, found in scores.items()}
    for name, off in deviations.items():
        if not within(off, ENGINES[name][1]):
            raise RuntimeError(f"{name}: scores deviate from those of {next(iter(scores))} by {off:.1e} of the largest")
    taken: dict[str, list[float]] = {name: [] for name in answers}
    begun = time.perf_counter()
    for number in range(MIN_ROUNDS if tiny else MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - begun > ROUND_SECONDS:
            break
        for name in shuffled(answers, number):
            taken[name].append(round(timed(answers[name])[0], 5))
    return taken, deviations


def _amount(nets: Nets, sizes: Sequence[tuple[int, int]]) -> Json:
    """Return the amount of work for views of these sizes. GFLOP: two per multiply-add."""
    net = nets.net(NET)
    windows, shapes = windows_of(net, sizes), parameter_shapes(net, nets.classes)
    of_window = sum(math.prod(shapes[f"{layer}.weight"]) for layer in ("fc1", "fc2", "fc3"))
    return {
        "pixels": sum(height * width for height, width in sizes),
        "views": [list(size) for size in sizes],
        "windows": windows,
        "gflop": round(nets.flop(NET, sizes) / 1e9, 4),
        "head_gflop": round(2 * windows * of_window / 1e9, 4),
    }


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
    path, scale = nets.model_file(NET), nets.px(CLASSES_SCALE)
    height, width = map(nets.px, PHOTO)
    found = run_engine_isolated(
        engine, "classify", path, protocol=f"dense-{scale}", height=height, width=width, calls=3
    )
    size = resized_size(height, width, scale)
    seconds = found["seconds"][1:]  # the first call is a warm-up
    file_mb = round(path.stat().st_size / 2**20, 1)
    return {**found, "seconds": seconds, "file_mb": file_mb, **_amount(nets, [size, size])}


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
    part.__name__: part for part in (area, elongation, scales, memory, classes, dataset)
}

ISOLATED_PARTS = ("memory", "classes", "dataset")

if __name__ == "__main__":
    sys.exit(main())
