"""Compare the scores of adopted nets with those of their makers' own pipelines, on the same image files.

    python -m benchmarks.parity.run --makers PYTHON [--only WORD] [--output FILE] [--work DIR]

PYTHON belongs to an environment with requirements.txt. There each net's maker preprocesses and scores the test images;
here `prelunet adopt` takes its file with the options that its code states, and `prelunet validate` scores the same
files. README.md has the tolerances. With --work, what the makers answered is kept and used again.

Exit codes: 0 each net is equal or refused and each wrong option is noticed, 1 otherwise.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.results import RESULTS, circumstances, environment, significant, write_result
from benchmarks.common.runner import command_line
from benchmarks.parity.images import IMAGES, write_images
from benchmarks.parity.makers.run import FAMILIES
from benchmarks.parity.table import table
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.protocols import build_protocol, default_protocol_name

Array = npt.NDArray[Any]
PACKAGES = ("prelunet", "onnxruntime", "numpy", "pillow")
MAKERS = ("torch", "torchvision", "timm", "transformers", "keras", "tensorflow_cpu", "tf2onnx", "onnxruntime", "pillow",
          "numpy", "opencv-python-headless")  # fmt: skip
# By what the maker resizes with: largest difference of a pixel in grey levels, and of a score. Where the maker uses
# Pillow, pixels are the same; the hundredth is float32. Other resizers round otherwise, by one grey level.
TOLERANCES = {"Pillow": (0.01, 1e-5), "tensors": (1.01, 1e-3), "OpenCV": (1.01, 1e-3), "TensorFlow": (1.01, 1e-3)}
SPREAD = 10  # tolerances that the scores of different images must be apart, or their agreement shows nothing
PRELUNET = (str(Path(sys.executable).with_name("prelunet")),)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "parity.json")
    parser.add_argument("--makers", type=Path, required=True, help="Python of the makers' environment")
    parser.add_argument("--only", default="", help="only nets with this word in their names, for a trial")
    parser.add_argument("--families", default=",".join(FAMILIES), help="only these, for a trial")
    parser.add_argument("--work", type=Path, help="folder for nets and answers, which are kept")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="prelunet-parity-") as temporary:
        work = options.work or Path(temporary)
        rows = list(compared(options, work))
        versions = _versions(work)
    facts = {**circumstances(__file__, options, PACKAGES, words), "makers": versions}
    result = {"run": facts, "images": {name: list(size) for name, size in IMAGES.items()}, "rows": rows}
    write_result(options.output, result, table(result))
    print(table(result))
    return 0 if all(map(held, rows)) else 1


def held(row: Mapping[str, Any]) -> bool:
    """Return whether a row is as it should be, its controls included."""
    controls = all(control["status"] != "equal" for control in row["controls"])
    return row["status"] in {"equal", "refused"} and controls


def compared(options: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each net of all families."""
    images = work / "images"
    if not images.exists():
        write_images(images)
        (images / "order.json").write_text(json.dumps(list(IMAGES)), encoding="utf-8")
    for family in options.families.split(","):
        folder = work / family
        if not (folder / "versions.json").exists():
            command = (options.makers, "-m", "benchmarks.parity.makers.run", family, images, folder)
            subprocess.run(list(map(str, command)), check=True, cwd=RESULTS.parents[1])
        for facts in sorted(folder.glob("*/net.json"), key=lambda file: file.stat().st_mtime_ns):
            net = json.loads(facts.read_text(encoding="utf-8"))
            if options.only in net["name"]:
                row = compare(net, facts.parent, images)
                print(f"{row['status']:9} {row['name']}: {row.get('message') or row.get('scores')}", flush=True)
                yield {"family": family, **row}


def compare(net: Mapping[str, Any], folder: Path, images: Path) -> dict[str, Any]:
    """Adopt a net as its maker's code says, and under wrong options; return its row."""
    scores = np.load(folder / "scores.npy")
    apart = float(np.median(np.abs(scores - np.roll(scores, 1, 0)).max(1)))
    row = {
        **{key: net[key] for key in ("name", "origin", "options", "protocol", "resizer", "left_out", "note")},
        "sidecars": Path(net["adopt"]).is_dir(),
        "images": len(scores),
        "classes": scores.shape[1],
        "spread": significant(apart, 2),
        **measure(net, net["options"], folder, images),
    }
    row["controls"] = [
        {"name": name, "options": words, **measure(net, words, folder, images)}
        for name, words in net["controls"].items()
    ]
    if row["status"] == "equal" and apart < SPREAD * TOLERANCES[net["resizer"]][1]:
        row["status"] = "ALIKE"
    return row


def measure(net: Mapping[str, Any], options: Sequence[str], folder: Path, images: Path) -> dict[str, Any]:
    """Adopt and evaluate a net; return status, largest differences of scores and pixels, and errors of both."""
    expected, pixels = np.load(folder / "scores.npy"), np.load(folder / "pixels.npy")
    model = folder / "adopted.onnx"
    if message := _refused("adopt", net["adopt"], *options, "-o", model, "--force"):
        return {"status": "refused", "message": message}
    labels = _labels(expected)
    data = _dataset(folder / "data", images, net["images"], labels)
    protocol = ("--protocol", net["protocol"]) if net["protocol"] else ()
    run = folder / "run"
    if message := _refused("validate", model, data, "--labels", data / "labels.csv", *protocol, "-o", run, "--fresh"):
        return {"status": "refused", "message": message}
    ours, off = _scores(run, net["images"]), _pixels_off(model, net, images, pixels)
    by_image = np.abs(ours - expected).max(1)
    difference = float(by_image.max())
    most_pixels, most_scores = TOLERANCES[net["resizer"]]
    equal = difference <= most_scores and (off is None or off.max() <= most_pixels)
    return {
        "status": "equal" if equal else "DIFFERENT",
        "scores": significant(difference, 2),
        "pixels": None if off is None else significant(float(off.max()), 2),
        "by_image": {
            name: [significant(float(each), 2) for each in (pair if off is not None else pair[:1])]
            for name, *pair in zip(net["images"], by_image, by_image if off is None else off, strict=True)
        },
        "worst": net["images"][int(np.argmax(by_image if off is None else off))],
        "errors": [int((each.argmax(1) != labels).sum()) for each in (ours, expected)],
    }


def _refused(*words: object) -> str | None:
    """Run prelunet; return what it said if it refused the net or an option, which is no other failure."""
    done = subprocess.run([*PRELUNET, *map(str, words)], capture_output=True, text=True, check=False, env=environment())
    if done.returncode == 0:
        return None
    said = [line for line in done.stderr.splitlines() if line.startswith(("prelunet: ", "Error: "))]
    assert done.returncode in {2, 3} and said, f"{shlex.join(map(str, words))}: {done.returncode}\n{done.stderr}"
    return " ".join(Path(word).name if word.startswith("/") else word for word in said[-1].split()[1:])


def _labels(expected: Array) -> Array:
    """Return labels of which the maker's net gets every other one wrong, so that the error says something."""
    best = expected.argmax(1)
    labels = np.where(np.arange(len(best)) % 2 == 0, best, (best + 1) % expected.shape[1])
    labels[0] = 0  # so that it is plain that they count from 0
    return np.asarray(labels)


def _dataset(folder: Path, images: Path, names: Sequence[str], labels: Array) -> Path:
    """Link the images into a folder with labels.csv; return it."""
    folder.mkdir(exist_ok=True)
    for name in names:
        if not (folder / name).exists():
            (folder / name).hardlink_to(images / name)
    lines = ("name,label", *(f"{name},{label}" for name, label in zip(names, labels, strict=True)))
    (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _scores(run: Path, names: Sequence[str]) -> Array:
    """Return the scores of a run, float32 (images, classes), in the order of the names."""
    lines = (run / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    order = [Path(json.loads(line)["file"]).name for line in lines]
    return np.asarray(np.load(run / "scores.f32.npy")[[order.index(name) for name in names]])


def _pixels_off(model: Path, net: Mapping[str, Any], images: Path, pixels: Array) -> Array | None:
    """Return for each image the largest difference between the net's pixels here and its maker's, in grey levels; None if unknown."""
    contract = open_session(model, "cpu").contract
    protocol = build_protocol(net["protocol"] or default_protocol_name(contract), contract)
    ours = [make_views(decode_image((images / name).read_bytes()), protocol)[0].image for name in net["images"]]
    if np.shape(ours) != pixels.shape:
        return None
    return np.asarray(np.abs(np.asarray(ours, np.float32) - pixels).max((1, 2, 3)))


def _versions(work: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in work.glob("*/versions.json"):
        found |= json.loads(file.read_text(encoding="utf-8"))
    return {name: found[name] for name in MAKERS if name in found}


if __name__ == "__main__":
    sys.exit(main())
