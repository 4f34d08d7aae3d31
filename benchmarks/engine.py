"""Dense evaluation side by side, on the CPU, with the same weights and pixels; scores of all competitors compared.

    python benchmarks/engine.py --architecture A --protocol dense-256

Competitors:
- naive:  every window's pixels cropped out of the resized image and classified one by one in torch (batches of 16);
          other scores near the border, since a crop sees zeros where a window sees its neighbours
- torch:  convolutions once over the whole image, every window of the map pooled and classified, float32
- onnx:   the exported file through `classify_images`, as server and `validate` run it

They run in turn, `--repeats` times; medians and ratios are printed and written as JSON.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evaluator.complexity import multiply_adds
from evaluator.contract import ClassEntry, golden_image
from evaluator.engine.classify import classify_images
from evaluator.engine.session import Session, open_session
from evaluator.imaging.views import make_views
from evaluator.protocols import Protocol, make_protocol
from export.exporting import export_checkpoint
from machine import cpu, machine
from training.architectures import architecture
from training.checkpoints import Checkpoint, write_checkpoint
from training.dense import dense_windows, subtract_mean
from training.initialization import initial_tensors
from training.network import PreluNet, network_from_checkpoint

Answer = Callable[[], np.ndarray]


def main() -> None:
    """Run the competitors and write the result."""
    options = _options()
    checkpoint = _checkpoint(options.architecture)
    image = golden_image(options.height, options.width)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net"
        write_checkpoint(path.with_suffix(".safetensors"), checkpoint)
        export_checkpoint(path.with_suffix(".safetensors"), path.with_suffix(".onnx"))
        session = open_session(path.with_suffix(".onnx"), "cpu")
        protocol = make_protocol(options.protocol, session.contract)
        net = network_from_checkpoint(checkpoint)
        competitors: dict[str, Answer] = {
            "naive": lambda: _naive(net, checkpoint, image, protocol, session),
            "torch": lambda: _torch(net, checkpoint, image, protocol),
            "onnx": lambda: classify_images(session, [image], protocol)[0].scores,
        }
        seconds, scores = _in_turn(competitors, options.repeats)
    _report(options, session, protocol, seconds, scores)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="A")
    parser.add_argument("--protocol", default="dense-256")
    parser.add_argument("--height", type=int, default=375, help="of the picture, pixels")
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def _checkpoint(name: str) -> Checkpoint:
    """Make an initialised net; speed does not depend on the weights."""
    net, classes = architecture(name), tuple(ClassEntry(f"n{i:08d}", f"class {i}") for i in range(1000))
    mean = np.array((123.68, 116.78, 103.94), np.float32)
    return Checkpoint(net, classes, mean, initial_tensors(net, len(classes), seed=0))


def _naive(
    net: PreluNet, checkpoint: Checkpoint, image: np.ndarray, protocol: Protocol, session: Session
) -> np.ndarray:
    """Crop every window's pixels and classify the crops."""
    crop, stride = net.architecture.crop, net.architecture.trunk_stride
    views = []
    for view in make_views(image, protocol):
        rows, columns = session.contract.window_grid(*view.image.shape[:2])
        tops, lefts = (
            [min(stride * i, side - crop) for i in range(count)]
            for count, side in zip((rows, columns), view.image.shape[:2], strict=True)
        )
        crops = np.stack([view.image[t : t + crop, x : x + crop] for t in tops for x in lefts])
        scores = []
        with torch.inference_mode():
            for start in range(0, len(crops), 16):
                batch = subtract_mean(torch.from_numpy(crops[start : start + 16]), torch.from_numpy(checkpoint.mean))
                scores.append(net(batch).softmax(1).numpy())
        views.append(np.concatenate(scores).mean(axis=0))
    return np.mean(views, axis=0)


def _torch(net: PreluNet, checkpoint: Checkpoint, image: np.ndarray, protocol: Protocol) -> np.ndarray:
    """Evaluate densely in torch."""
    views = [dense_windows(net, view.image, checkpoint.mean)[0] for view in make_views(image, protocol)]
    return np.mean([scores.mean(axis=(0, 1)) for scores in views], axis=0)


def _in_turn(competitors: dict[str, Answer], repeats: int) -> tuple[dict[str, list[float]], dict[str, np.ndarray]]:
    """Time the competitors in turn, so that a slow minute of the machine meets all of them; one warm-up each."""
    scores = {name: answer() for name, answer in competitors.items() if name != "naive"}  # naive warms up by its size
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for _ in range(repeats):
        for name, answer in competitors.items():
            start = time.perf_counter()
            scores[name] = answer()
            seconds[name].append(time.perf_counter() - start)
    return seconds, scores


def _report(
    options: argparse.Namespace,
    session: Session,
    protocol: Protocol,
    seconds: dict[str, list[float]],
    scores: dict[str, np.ndarray],
) -> None:
    """Print the table and write the JSON file."""
    net = architecture(options.architecture)
    sizes = [view.image.shape[:2] for view in make_views(golden_image(options.height, options.width), protocol)]
    operations = sum(2 * multiply_adds(net.to_json(), *size, 1000) for size in sizes)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows: list[dict[str, Any]] = [
        {
            "competitor": name,
            "seconds": [round(value, 4) for value in seconds[name]],
            "median": round(medians[name], 4),
            "times_faster_than_naive": round(medians["naive"] / medians[name], 2),
            "gflop_per_second": None if name == "naive" else round(operations / medians[name] / 1e9, 1),
            "scores_off_from_torch": float(np.abs(scores[name] - scores["torch"]).max()),
        }
        for name in seconds
    ]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python benchmarks/engine.py " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "versions": {**session.circumstances.versions, "torch": torch.__version__},
        "net": options.architecture,
        "protocol": protocol.to_json(),
        "picture": [options.height, options.width],
        "gflop": round(operations / 1e9, 1),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "results": rows,
    }
    print(f"{options.architecture}, {protocol.name}, one picture of {options.height}x{options.width}, {cpu()}")
    print(f"{'':8}{'median s':>10}{'x naive':>10}{'GFLOP/s':>10}{'off from torch':>16}")
    for row in rows:
        rate = "" if row["gflop_per_second"] is None else f"{row['gflop_per_second']:.0f}"
        off = f"{row['scores_off_from_torch']:.0e}"
        print(f"{row['competitor']:8}{row['median']:10.3f}{row['times_faster_than_naive']:10.1f}{rate:>10}{off:>16}")
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written: {options.output}")


if __name__ == "__main__":
    main()
