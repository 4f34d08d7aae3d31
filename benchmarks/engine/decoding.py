"""Compare ways of decoding and resizing: milliseconds per photo, and deviations of pixels and scores from ours.

    python -m benchmarks.engine.decoding --data DIR [--model MODEL.onnx] --output benchmarks/results/decoding.json

DIR holds photos; without --data synthetic pictures are used (photos.py). Two kinds of JPEG are made from them: 500x375
at quality 95, like most of ImageNet, and 4000x3000 at quality 92, like a camera's. Larger photos are shrunk and
cropped, smaller ones are extended by their mirror images, so that the detail stays as fine as it was.

Each way differs in one respect from ours, which is `decode_image` and `resize_to_scales`. Decoders other than Pillow
are measured if installed (none is a dependency of this project). Deviations are grey levels of 0-255 after resizing.
With --model: the largest deviation of a score at the model's own scales, and the number of photos with another class.
Times of one thread are CPU times (time.thread_time), those of several threads (in brackets) wall-clock times.
"""

import argparse
import importlib
import io
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.common.photos import load_photos
from benchmarks.common.results import cpu, header, markdown, write_result
from prelunet.evaluator.engine.classify import average_image, run_views
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.imaging.canvas import pack
from prelunet.evaluator.imaging.decode import decode_image, decode_rgb, image_size
from prelunet.evaluator.imaging.resize import DecodedImage, resize_to_scales, resized_size
from prelunet.evaluator.imaging.views import ViewImage
from prelunet.evaluator.protocols import build_protocol

Pixels = np.ndarray
Way = Callable[[bytes, Sequence[int]], dict[int, Pixels]]  # a JPEG and scales → scale: uint8 (h, w, 3)

BILINEAR = Image.Resampling.BILINEAR
KINDS = {"500x375": (375, 500, 95), "4000x3000": (3000, 4000, 92)}  # height, width, JPEG quality
SCALES = {"dense-256": (256,), "multi-scale": (256, 384, 480)}
NEEDS = {"dense-256": 2500, "multi-scale": 50_000 / 480}  # photos/s: A on a large GPU, roughly; C in 8 minutes
DECODERS = {"simplejpeg": "simplejpeg", "imagecodecs": "imagecodecs", "cv2": "opencv-python-headless"}
MIN_SIDE = 250  # pixels; smaller photos would repeat too often at 500x375


def main() -> None:
    """Measure and write the result."""
    options = _options()
    sources = [photo.pixels for photo in load_photos(options.data) if min(photo.pixels.shape[:2]) >= MIN_SIDE]
    if not sources:
        raise SystemExit(f"--data {options.data}: no photo whose sides have at least {MIN_SIDE} pixels")
    ways = _ways()
    results: dict[str, Any] = {}
    for kind, (height, width, quality) in KINDS.items():
        few = options.photos if height * width < 1e6 else options.large_photos
        jpegs = [_jpeg(source, height, width, quality) for source in sources[:few]]
        repeats = options.repeats if height * width < 1e6 else options.large_repeats
        results[kind] = {
            "photos": len(jpegs),
            "kilobytes": round(statistics.mean(map(len, jpegs)) / 1000),
            "stages": _stages(jpegs[0], repeats),
            "ways": _compare(ways, jpegs, repeats, options.threads),
        }
        if options.model:
            for name, effect in _scores(ways, jpegs, options.model).items():
                results[kind]["ways"][name] |= effect
    _report(options, sources, results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of photos; default: synthetic pictures")
    parser.add_argument("--model", type=Path, help="trained model, to measure the effect on scores")
    parser.add_argument("--photos", type=int, default=12, help="number of photos of 500x375")
    parser.add_argument("--large-photos", type=int, default=4, help="number of photos of 4000x3000")
    parser.add_argument("--repeats", type=int, default=15, help="repeats of the small photos")
    parser.add_argument("--large-repeats", type=int, default=3, help="repeats of the large photos")
    parser.add_argument("--threads", type=int, default=2, help="for multithreaded times; 0 skips them")
    parser.add_argument("--output", type=Path, help="JSON file to write; a table is written beside it")
    return parser.parse_args()


def _jpeg(photo: Pixels, height: int, width: int, quality: int) -> bytes:
    """Encode a photo as a JPEG of a size, shrunk and cropped or extended as the module describes."""
    factor = min(1.0, max(height / photo.shape[0], width / photo.shape[1]))
    image = Image.fromarray(photo).resize(
        (max(1, round(photo.shape[1] * factor)), max(1, round(photo.shape[0] * factor))), Image.Resampling.LANCZOS
    )
    shrunk = np.asarray(image)[:height, :width]
    missing = ((0, height - shrunk.shape[0]), (0, width - shrunk.shape[1]), (0, 0))
    file = io.BytesIO()
    Image.fromarray(np.pad(shrunk, missing, mode="symmetric")).save(file, "JPEG", quality=quality)
    return file.getvalue()


def _ways() -> dict[str, Way]:
    """Return all ways that can be measured here, ours first."""
    ways: dict[str, Way] = {
        "ours": lambda data, scales: _to_scales(decode_image(data), scales),
        "a copy and an image per scale": _copying,
        "an array in between": lambda data, scales: _to_scales(decode_rgb(data), scales),
        "smaller scales from the largest": _cascade,
    }
    ways |= {f"draft, at least {gap}x": partial(_draft, gap=gap) for gap in (1, 2, 3)}
    ways |= {f"reducing_gap {gap}": partial(_reduced, gap=gap) for gap in (1, 2, 3)}
    modules = {name: _module(name) for name in DECODERS}
    if (simplejpeg := modules["simplejpeg"]) is not None:
        ways["simplejpeg"] = lambda data, scales: _to_scales(simplejpeg.decode_jpeg(data), scales)
        ways["simplejpeg, fast"] = lambda data, scales: _to_scales(
            simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True), scales
        )
    if (imagecodecs := modules["imagecodecs"]) is not None:
        ways["imagecodecs"] = lambda data, scales: _to_scales(imagecodecs.jpeg8_decode(data), scales)
    if (cv2 := modules["cv2"]) is not None:
        cv2.setNumThreads(1)
        ways["OpenCV decodes"] = lambda data, scales: _to_scales(_opencv(cv2, data), scales)
        ways["OpenCV decodes and resizes"] = partial(_opencv_resized, cv2)
    return ways


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _to_scales(image: DecodedImage, scales: Sequence[int]) -> dict[int, Pixels]:
    return {scale: pixels for scale, (pixels, _) in resize_to_scales(image, scales).items()}


def _columns_rows(image: Image.Image, scale: int) -> tuple[int, int]:
    rows, columns = resized_size(image.height, image.width, scale)
    return columns, rows


def _copying(data: bytes, scales: Sequence[int]) -> dict[int, Pixels]:
    """Work as this project did at first: convert images that are already RGB, and build one image per scale."""
    image_size(data)  # the checks before decoding
    image = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
    return {scale: _to_scales(image, (scale,))[scale] for scale in scales}


def _cascade(data: bytes, scales: Sequence[int]) -> dict[int, Pixels]:
    """Resize all pixels to the largest scale, and that to the others."""
    image = decode_image(data)
    largest = _to_scales(image, (max(scales),))[max(scales)]
    small = Image.fromarray(largest)
    others = {
        scale: np.array(small.resize(_columns_rows(image, scale), BILINEAR)) for scale in scales if scale < max(scales)
    }
    return {max(scales): largest} | others


def _draft(data: bytes, scales: Sequence[int], gap: int) -> dict[int, Pixels]:
    """Let the JPEG decoder shrink by 2, 4 or 8, to at least `gap` times the largest scale."""
    image = Image.open(io.BytesIO(data))
    sizes = {scale: _columns_rows(image, scale) for scale in scales}
    _, box = image.draft("RGB", tuple(gap * side for side in sizes[max(scales)]))
    image.load()
    right, bottom = (min(edge, side) for edge, side in zip(box[2:], image.size, strict=True))
    return {scale: np.array(image.resize(size, BILINEAR, (0, 0, right, bottom))) for scale, size in sizes.items()}


def _reduced(data: bytes, scales: Sequence[int], gap: int) -> dict[int, Pixels]:
    """Let Pillow average blocks of pixels first, to at least `gap` times the scale."""
    image = decode_image(data)
    return {scale: np.array(image.resize(_columns_rows(image, scale), BILINEAR, reducing_gap=gap)) for scale in scales}


def _opencv(cv2: ModuleType, data: bytes) -> Pixels:
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)


def _opencv_resized(cv2: ModuleType, data: bytes, scales: Sequence[int]) -> dict[int, Pixels]:
    image = _opencv(cv2, data)
    resized = {}
    for scale in scales:
        rows, columns = resized_size(*image.shape[:2], scale)
        method = cv2.INTER_AREA if rows < image.shape[0] else cv2.INTER_LINEAR  # INTER_LINEAR never widens
        resized[scale] = cv2.resize(image, (columns, rows), interpolation=method)
    return resized


def _milliseconds(work: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    """Return the milliseconds of a call; by default CPU time of this thread, so that other load matters little."""
    start = clock()
    work()
    return 1000 * (clock() - start)


def _stages(data: bytes, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each step of our path for one photo."""
    image = Image.open(io.BytesIO(data))
    image.load()
    array = np.array(image)
    stages: dict[str, Callable[[], object]] = {
        "header and checks": lambda: image_size(data),
        "header and pixels": lambda: Image.open(io.BytesIO(data)).load(),
        "image to array": lambda: np.array(image),
        "array to image": lambda: Image.fromarray(array),
    }
    for scale in SCALES["multi-scale"]:
        size = _columns_rows(image, scale)
        small = image.resize(size, BILINEAR)
        pixels = np.array(small)
        shape = pixels.shape[:2]
        stages |= {
            f"resize to {scale}": partial(image.resize, size, BILINEAR),
            f"{scale}: image to array": partial(np.array, small),
            f"{scale}: pack plain": partial(pack, [pixels], *shape),
            f"{scale}: pack mirrored": partial(pack, [pixels[:, ::-1]], *shape),
        }
    taken: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(max(repeats, 5) + 1):
        for name, work in stages.items():
            taken[name].append(_milliseconds(work))
    return {name: round(statistics.median(values[1:]), 3) for name, values in taken.items()}


def _compare(ways: dict[str, Way], jpegs: Sequence[bytes], repeats: int, threads: int) -> dict[str, dict[str, Any]]:
    """Run all ways in turn, in one thread and in several; the comparison of pixels before is the warm-up."""
    rows: dict[str, dict[str, Any]] = {name: _deviation(ways["ours"], way, jpegs) for name, way in ways.items()}
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        for protocol, scales in SCALES.items():
            alone: dict[str, list[float]] = {name: [] for name in ways}
            together: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(repeats):
                for name, way in ways.items():
                    run = partial(way, scales=scales)
                    alone[name] += [_milliseconds(partial(run, data)) for data in jpegs]
                    if threads:
                        all_photos = _milliseconds(lambda run=run: list(pool.map(run, jpegs)), time.perf_counter)
                        together[name].append(all_photos / len(jpegs))
            for name in ways:
                rows[name][protocol] = {
                    "ms": round(statistics.median(alone[name]), 3),
                    "ms_in_threads": round(statistics.median(together[name]), 3) if threads else None,
                    "cores": round(NEEDS[protocol] * statistics.median(alone[name]) / 1000, 2),
                }
    return rows


def _deviation(ours: Way, way: Way, jpegs: Sequence[bytes]) -> dict[str, Any]:
    """Return the largest and the mean deviation over photos and scales, and the share of deviating values."""
    largest, means, shares = 0, [], []
    for data in jpegs:
        expected, actual = ours(data, SCALES["multi-scale"]), way(data, SCALES["multi-scale"])
        for scale, pixels in expected.items():
            difference = np.abs(pixels.astype(np.int16) - actual[scale])
            largest = max(largest, int(difference.max()))
            means.append(difference.mean())
            shares.append((difference > 0).mean())
    return {
        "largest": largest,
        "mean": round(float(np.mean(means)), 4),
        "share": round(float(np.mean(shares)), 4),
    }


def _scores(ways: dict[str, Way], jpegs: Sequence[bytes], model: Path) -> dict[str, dict[str, Any]]:
    """Classify the photos at the model's own scales in each way and compare the scores with ours."""
    session = open_session(model, "cpu")
    protocol = build_protocol("multi-scale", session.contract)
    scores: dict[str, Pixels] = {}
    for name, way in ways.items():
        rows = []
        for data in jpegs:
            pixels = way(data, protocol.scales)
            views = [
                ViewImage(view, pixels[view.scale][:, ::-1] if view.mirrored else pixels[view.scale], capped=False)
                for view in protocol.views
            ]
            rows.append(average_image(protocol, run_views(session, views)).scores)
        scores[name] = np.stack(rows)
    return {
        name: {
            "scores_off": float(f"{np.abs(own - scores['ours']).max():.2g}"),
            "other_class": int((own.argmax(1) != scores["ours"].argmax(1)).sum()),
        }
        for name, own in scores.items()
    }


def _report(options: argparse.Namespace, sources: Sequence[Pixels], results: dict[str, Any]) -> None:
    """Print the tables and write both files."""
    sides = [f"{min(values)}-{max(values)}" for values in zip(*(source.shape[:2] for source in sources), strict=True)]
    origin = "real photos" if options.data else "made pictures"
    table = "\n\n".join(_table(kind, result) for kind, result in results.items())
    table = f"{len(sources)} {origin}, heights {sides[0]}, widths {sides[1]}; {cpu()}\n\n{table}"
    print(table)
    words = (["--data", "DIR"] if options.data else []) + (["--model", "MODEL"] if options.model else [])
    result = {
        **header(__file__, words, ("prelunet", "numpy", "pillow", *DECODERS.values())),
        "load_at_the_end": [round(load, 2) for load in os.getloadavg()],
        "repeats": {"500x375": options.repeats, "4000x3000": options.large_repeats},
        "threads": options.threads,
        "sources": {"what": origin, "count": len(sources), "heights": sides[0], "widths": sides[1]},
        "scales": SCALES,
        "photos_per_second_for_cores": {name: round(rate, 1) for name, rate in NEEDS.items()},
        "results": results,
    }
    write_result(options.output, result, table + "\n")


def _table(kind: str, result: dict[str, Any]) -> str:
    """Return the ways, and the stages of ours, as Markdown tables."""
    title = (
        f"{kind}, {result['photos']} photos of {result['kilobytes']} kB on average; milliseconds per photo "
        "(in brackets: in several threads at once, where measured)"
    )
    columns = ("way", *SCALES, "ratio", "deviation: largest", "mean", "share", "scores", "other class")
    ours = result["ways"]["ours"]
    rows = []
    for name, row in result["ways"].items():
        times = [f"{row[p]['ms']:.2f}" + (f" ({t:.2f})" if (t := row[p]["ms_in_threads"]) else "") for p in SCALES]
        ratio = row["multi-scale"]["ms"] / ours["multi-scale"]["ms"]
        deviations = [row[key] for key in ("largest", "mean", "share")]
        rows.append([name, *times, f"{ratio:.2f}", *deviations, row.get("scores_off"), row.get("other_class")])
    needs = (f"{rate:.0f} photos/s of {name} take {ours[name]['cores']:.1f} cores" for name, rate in NEEDS.items())
    stages = markdown(("stage of ours", "ms"), result["stages"].items())
    return f"{title}\n\n{markdown(columns, rows)}\n\nOurs: {', '.join(needs)}.\n\n{stages}"


if __name__ == "__main__":
    main()
