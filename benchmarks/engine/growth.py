"""How cost grows: with the image's area and elongation, with scales and classes, and with the size of the dataset.

    python -m benchmarks.engine.growth [--output benchmarks/results/growth.json]     measures what is not in the file
    yet python -m benchmarks.engine.growth --draw docs/performance      measures nothing: draws the file and prints its
    tables

Model A with random weights and, for the dataset, the demo's net; every engine that the CPU has, in turn. Each point is
written as soon as it is measured, and the same command goes on where it was stopped (results.py). Alone on two cores
all parts take about twelve minutes.

- area:       one view and its mirror image of a 4:3 photo, from 224 pixels to 1024
- elongation: shorter side 256, from square to 1:4
- scales:     1, 2, 3 and 6 of them
- memory:     `validate` of photos of 12 million pixels, half of them 1:4, beside what it foretells; each point alone
- classes:    10 to 21,841 (all of ImageNet), each point alone in a process
- dataset:    `validate` of 100 to 10,000 small images, each alone; 50,000 too with --most-images 50000
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common.results import ROOT, Results, cpu, digest_of, header, shuffled
from benchmarks.common.rig import Rig
from benchmarks.engine.competitors import CompetitorPrecision
from benchmarks.engine.growth_plots import draw, tables
from benchmarks.engine.interleaved import deviation, gflop_of, timed, windows_of, within
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
OUTPUT = ROOT / "benchmarks" / "results" / "growth.json"
NET = "A"
PHOTO = (375, 500)  # height and width of about half of ImageNet's photos
AREA_SCALES = (224, 256, 320, 384, 480, 640, 1024)
LARGE_PHOTOS = ((3000, 4000), (1732, 6928))
MEMORY_SCALES = ((224, 8), (384, 4), (640, 2))  # and how many of each photo: enough to fill a batch
ELONGATED_SCALE, ELONGATIONS = 256, (1.0, 1.5, 2.0, 3.0, 4.0)
SCALES = ((256,), (256, 384), (256, 384, 480), (224, 256, 300, 360, 448, 560))  # multi-scale's, spp-net's
CLASSES_SCALE, CLASSES = 384, (10, 100, 1_000, 10_000, 21_841)
IMAGES = (100, 1_000, 10_000, 50_000)
DATASET_PROTOCOL = "multi-scale"  # hundreds of shapes: what a runtime keeps of each would show
MIN_ROUNDS, MAX_ROUNDS, ROUND_SECONDS = 2, 7, 5.0  # rounds of all engines on a point: until that long, or MOST

Json = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """One way to run a model on a CPU."""

    name: str
    device: Device
    precision: CompetitorPrecision


ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("onnxruntime fp32", "cpu", "fp32"),
        Engine("OpenVINO fp32", "openvino", "fp32"),
        Engine("OpenVINO bf16", "openvino", "bf16"),
    )
}


@dataclass
class Nets(Rig):
    """Model files of any number of classes. count: 0 for the rig's own."""

    count: int = 0

    @property
    def classes(self) -> int:
        """Return the number of classes of all nets."""
        return self.count or super().classes


@dataclass
class GrowthBench:
    """What the parts share. engines: those that came up; folder: of model files."""

    tiny: bool
    folder: Path
    engines: Sequence[Engine]
    most_images: int
    _sessions: dict[str, Session] = field(default_factory=dict)

    def some(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values at which a part measures: all, or in a rehearsal the first and the last."""
        return (values[0], values[-1]) if self.tiny else values

    def nets(self, classes: int = 0, *, demo: bool = False) -> Nets:
        """Return model files of a number of classes; demo: of the demo's net."""
        return Nets("cpu", self.tiny or demo, self.folder / str(classes), count=classes)

    @property
    def sessions(self) -> Mapping[str, Session]:
        """Return a session of each engine on model A; they stay open together."""
        if not self._sessions:
            path = self.nets().model_file(NET)
            self._sessions = {
                engine.name: open_with_placement(path, Placement(engine.device, engine.precision))
                for engine in self.engines
            }
        return self._sessions

    def close(self) -> None:
        """Give the memory of the sessions back before memory is measured."""
        self._sessions = {}


@dataclass(frozen=True)
class Point:
    """One measurement. seconds: how long it may take, as far as one can tell."""

    settings: Mapping[str, Any]
    work: Callable[[], Json]
    seconds: float = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or draw; return 1 when a point failed, 3 when there was no time for all."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _options(words)
    if options.draw:
        data = json.loads(options.output.read_text(encoding="utf-8"))
        draw(data, options.draw)
        print(tables(data))
        return 0
    with tempfile.TemporaryDirectory(prefix="prelunet-growth-") as folder:
        engines, found = _engines(Path(folder), options.engines)
        bench = GrowthBench(options.tiny, Path(folder), engines, options.most_images)
        facts = {"device": cpu(), "tiny": options.tiny, "source": digest_of(*MEASURED), "engines": found}
        circumstances = {**header(__file__, words, PACKAGES), **facts}
        results = Results(options.output, "growth", circumstances, options.limit)
        for part in options.parts:
            print(f"{part} ({results.elapsed:.0f} s)")
            if part in ISOLATED_PARTS:
                bench.close()
            for point in PARTS[part](bench):
                results.measure({"part": part, **point.settings}, point.work, point.seconds)
    if results.skipped:
        print(f"no time for {len(results.skipped)} points: the same command goes on with them")
    return 1 if results.failed else 3 if results.skipped else 0


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART",
                        help=f"some of: {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES), metavar="ENGINE",
                        help=f"some of: {', '.join(map(repr, ENGINES))}")  # fmt: skip
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file of all parts")
    parser.add_argument("--draw", type=Path, metavar="DIR", help="draw the file into a folder and print its tables")
    parser.add_argument("--tiny", action="store_true", help="the demo's net and small pictures: a rehearsal in seconds")
    parser.add_argument("--most-images", type=int, default=IMAGES[-2],
                        help=f"of the largest dataset; {IMAGES[-1]:,} take minutes more")  # fmt: skip
    parser.add_argument("--limit", type=float, default=900, help="seconds after which no new point is begun")
    return parser.parse_args(words)


def _engines(folder: Path, names: Sequence[str]) -> tuple[list[Engine], Json]:
    """Return the engines that come up here, and what each of these names says of itself, or why it does not."""
    path = Nets("cpu", tiny=True, files=folder).model_file(NET)
    engines: list[Engine] = []
    found: Json = {}
    for engine in (ENGINES[name] for name in names):
        try:
            found[engine.name] = open_with_placement(
                path, Placement(engine.device, engine.precision)
            ).circumstances.to_json()
        except EnvironmentFault as error:
            found[engine.name] = f"not measured: {error}"
        else:
            engines.append(engine)
    return engines, found


def area(bench: GrowthBench) -> Iterator[Point]:
    """Pairs of mirrored views of one photo at growing scales."""
    for scale in bench.some(AREA_SCALES):
        yield _timed(bench, {"scale": scale}, (scale,), PHOTO, seconds=scale**2 / 16_000)


def elongation(bench: GrowthBench) -> Iterator[Point]:
    """Pairs of one scale and growing length."""
    for times in bench.some(ELONGATIONS):
        photo = (ELONGATED_SCALE, round(ELONGATED_SCALE * times))
        yield _timed(bench, {"times": times}, (ELONGATED_SCALE,), photo)


def scales(bench: GrowthBench) -> Iterator[Point]:
    """One photo at more and more scales."""
    for several in bench.some(SCALES):
        yield _timed(bench, {"scales": list(several)}, several, PHOTO)


def _timed(
    bench: GrowthBench, settings: Json, of_scales: Sequence[int], photo: tuple[int, int], seconds: float = 40
) -> Point:
    """Time the engines in turn on a photo; all lengths as for crops of 224 pixels."""

    def work() -> Json:
        nets = bench.nets()
        image = golden_image(*map(nets.px, photo))
        protocol = build_protocol("dense-" + "-".join(str(nets.px(scale)) for scale in of_scales),
                                 next(iter(bench.sessions.values())).contract)  # fmt: skip
        answers = {
            name: lambda session=session: classify_images(session, [image], protocol)[0].scores
            for name, session in bench.sessions.items()
        }
        taken, deviations = interleave(answers, bench.tiny)
        sizes = [resized_size(*image.shape[:2], nets.px(scale)) for scale in of_scales]
        return {"seconds": taken, "deviations": deviations, **_amount(nets, [size for size in sizes for _ in "pm"])}

    return Point(settings, work, seconds)


def interleave(
    answers: Mapping[str, Callable[[], np.ndarray]], tiny: bool
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Call each once untimed, then all in turn, each round in another order.

    Returns seconds of each call, and the `deviation` of each one's scores from the first one's. RuntimeError where that
    is more than rounding explains.
    """
    scores = {name: answer() for name, answer in answers.items()}
    expected = next(iter(scores.values()))
    deviations = {name: deviation(found, expected) for name, found in scores.items()}
    for name, off in deviations.items():
        if not within(off, ENGINES[name].precision):
            raise RuntimeError(f"{name}: scores are off by {off:.1e} of the largest that {next(iter(scores))} gives")
    taken: dict[str, list[float]] = {name: [] for name in answers}
    begun = time.perf_counter()
    for number in range(MIN_ROUNDS if tiny else MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - begun > ROUND_SECONDS:
            break
        for name in shuffled(answers, number):
            taken[name].append(round(timed(answers[name])[0], 5))
    return taken, deviations


def _amount(nets: Nets, sizes: Sequence[tuple[int, int]]) -> Json:
    """Return how much is to be computed for views of these sizes. GFLOP: two for each multiply-add."""
    net = nets.net(NET)
    windows, shapes = windows_of(net, sizes), parameter_shapes(net, nets.classes)
    of_window = sum(math.prod(shapes[f"{layer}.weight"]) for layer in ("fc1", "fc2", "fc3"))
    return {
        "pixels": sum(height * width for height, width in sizes),
        "views": [list(size) for size in sizes],
        "windows": windows,
        "gflop": round(gflop_of(net, sizes, nets.classes), 4),
        "head_gflop": round(2 * windows * of_window / 1e9, 4),
    }


def memory(bench: GrowthBench) -> Iterator[Point]:
    """Each engine alone, validating large photos at growing scales."""
    for scale, each in bench.some(MEMORY_SCALES):
        for engine in bench.engines:
            yield _large_photos(bench, engine, scale, each)


def _large_photos(bench: GrowthBench, engine: Engine, scale: int, each: int) -> Point:
    def work() -> Json:
        nets = bench.nets()
        sizes = [(nets.px(height), nets.px(width)) for height, width in LARGE_PHOTOS]
        task = {"task": "validate", "protocol": f"dense-{nets.px(scale)}", "data": str(photos(bench.folder, sizes))}
        task |= {"model": str(nets.model_file(NET)), "images": each * len(sizes)}
        return run_engine_isolated(engine, task)

    return Point({"scale": scale, "engine": engine.name}, work, seconds=scale**2 / 5000)


def photos(folder: Path, sizes: Sequence[tuple[int, int]]) -> Path:
    """Return a folder with a JPEG of each size, each a class, which are made unless they are there."""
    dataset = folder / "photos"
    for number, (height, width) in enumerate(sizes):
        file = dataset / f"n{number:08}" / "photo.jpg"
        if not file.exists():
            file.parent.mkdir(parents=True)
            Image.fromarray(golden_image(height, width)).save(file, quality=92)
    return dataset


def classes(bench: GrowthBench) -> Iterator[Point]:
    """Each engine alone, on nets of growing numbers of classes; a file is thrown away before the next is made."""
    for count in bench.some(CLASSES):
        for engine in bench.engines:
            yield _of_classes(bench, engine, count)
        for file in (bench.folder / str(count)).glob("*.onnx"):
            file.unlink()


def _of_classes(bench: GrowthBench, engine: Engine, count: int) -> Point:
    def work() -> Json:
        nets = bench.nets(count)
        path, scale = nets.model_file(NET), nets.px(CLASSES_SCALE)
        height, width = map(nets.px, PHOTO)
        task = {"task": "classify", "protocol": f"dense-{scale}", "height": height, "width": width, "calls": 3}
        found = run_engine_isolated(engine, {**task, "model": str(path)})
        size = resized_size(height, width, scale)
        seconds = found["seconds"][1:]  # the first call is a warm-up
        file_mb = round(path.stat().st_size / 2**20, 1)
        return {**found, "seconds": seconds, "file_mb": file_mb, **_amount(nets, [size, size])}

    return Point({"classes": count, "engine": engine.name}, work)


def dataset(bench: GrowthBench) -> Iterator[Point]:
    """Validate with each engine alone; the largest dataset with the first one only."""
    for images in IMAGES:
        for engine in bench.engines if images < IMAGES[-1] else bench.engines[:1]:
            if images <= bench.most_images:
                yield _validation(bench, engine, images)


def _validation(bench: GrowthBench, engine: Engine, images: int) -> Point:
    def work() -> Json:
        model = str(bench.nets(demo=True).model_file(NET))
        task = {"task": "validate", "protocol": DATASET_PROTOCOL, "data": str(embedded_dataset_path())}
        return run_engine_isolated(engine, {**task, "model": model, "images": images})

    return Point({"images": images, "engine": engine.name}, work, seconds=5 + images / 150)


def run_engine_isolated(engine: Engine, task: Mapping[str, Any]) -> Json:
    """Return what isolated.py says of a task on an engine."""
    return run_isolated({**task, "device": engine.device, "precision": engine.precision})


PARTS: Mapping[str, Callable[[GrowthBench], Iterator[Point]]] = {
    part.__name__: part for part in (area, elongation, scales, memory, classes, dataset)
}

ISOLATED_PARTS = ("memory", "classes", "dataset")

if __name__ == "__main__":
    sys.exit(main())
