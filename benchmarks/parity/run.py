"""Compare the scores of adopted nets with those of their makers' own pipelines, on the same image files.

    python -m benchmarks.parity.run --makers PYTHON [--only WORD] [--output FILE] [--work DIR]

PYTHON belongs to an environment with requirements.txt. There each net's maker preprocesses and scores the test images;
here `prelunet adopt` takes its file with the options that its code states, and `prelunet validate` scores the same
files. With --work, what the makers answered is kept and used again.

Exit codes: 0 each net is equal, refused, not stated, or no farther from its maker's pipeline than a second one
is; each wrong option shows; and a ViT's folder has the error of transformers' own pipeline after two commands;
1 otherwise.
"""

import argparse
import json
import re
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
from benchmarks.parity.table import shows, table
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.protocols import build_protocol

Array = npt.NDArray[Any]
PACKAGES = ("prelunet", "onnxruntime", "numpy", "pillow")
MAKERS = ("torch", "torchvision", "timm", "transformers", "ultralytics", "keras", "tensorflow_cpu", "tf2onnx",
          "onnxruntime", "pillow", "numpy", "opencv-python")  # fmt: skip
# By what the maker resizes with: largest difference of a pixel in grey levels, and of a score. Where the maker uses
# Pillow or torch's tensors, pixels are the same; the hundredth is float32. Other resizers round otherwise, by a level.
TOLERANCES = {"Pillow": (0.01, 1e-5), "tensors": (0.01, 1e-5), "OpenCV": (1.01, 1e-3), "TensorFlow": (1.01, 1e-3)}
SPREAD = 10  # tolerances that the scores of different images must be apart, or their agreement shows nothing


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "parity.json")
    parser.add_argument("--makers", type=Path, required=True, help="Python of the makers' environment")
    parser.add_argument("--only", default="", help="only nets with this word in their names, for a trial")
    parser.add_argument("--families", default=",".join(FAMILIES), help="only these, for a trial")
    parser.add_argument("--work", type=Path, help="folder for nets and answers, which are kept")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="prelunet-parity-") as temporary:
        work = (options.work or Path(temporary)).resolve()
        rows = list(compared(options, work))
        facts = {**circumstances(__file__, options, PACKAGES, words), "makers": _versions(work)}
        answers = work / "hf_loop" / "answers.json"
        loop = two_commands(answers) if answers.exists() else None
    result = {"run": facts, "images": {name: list(size) for name, size in IMAGES.items()}, "rows": rows, "loop": loop}
    write_result(options.output, result, table(result))
    print(table(result))
    return 0 if all(map(held, rows)) and (loop is None or loop["equal"]) else 1


def held(row: Mapping[str, Any]) -> bool:
    """Return whether a row is as it should be, its wrong options included."""
    shown = all(shows(row, wrong) for wrong in row["wrong"])
    as_far = row["status"] == "DIFFERENT" and row["other"] is not None and row["scores"] <= 1.1 * row["other"][0]
    return shown and (row["status"] in {"equal", "refused", "not stated"} or as_far)


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
                print(f"{row['status']:10} {row['name']}: {row.get('message') or row.get('scores')}", flush=True)
                yield {"family": family, **row}


def compare(net: Mapping[str, Any], folder: Path, images: Path) -> dict[str, Any]:
    """Adopt a net as its maker's code says, and with one wrong option each; return its row."""
    scores = np.load(folder / "scores.npy")
    apart = float(np.median(np.abs(scores - np.roll(scores, 1, 0)).max(1)))
    row = {
        **{key: net[key] for key in ("name", "origin", "resizer", "left_out", "note")},
        "options": None if net["options"] is None else _by_name(net["options"]),
        "images": len(scores),
        "classes": scores.shape[1],
        "spread": _digits(apart),
        "other": [_digits(each) for each in net["other"]] if "other" in net else None,
        "wrong": [],
    }
    if net["options"] is None:
        return {**row, "status": "not stated"}
    row |= measure(net, net["options"], folder, images)
    row["wrong"] = [
        {"option": words, **measure(net, [*net["options"], *words.split()], folder, images)} for words in net["wrong"]
    ]
    if row["status"] == "equal" and apart < SPREAD * TOLERANCES[net["resizer"]][1]:
        row["status"] = "ALIKE"
    return row


def two_commands(answers: Path) -> dict[str, Any]:
    """Adopt and validate a ViT's folder as a new user; return both top-1 and top-5 errors in percent."""
    folder, expected = answers.parent, json.loads(answers.read_text(encoding="utf-8"))
    commands = (("adopt", "vit", "-o", "vit.onnx", "--force"), ("validate", "vit.onnx", "data", "-o", "run", "--fresh"))
    done = [_prelunet(*words, folder=folder) for words in commands]
    if any(each.returncode for each in done):
        raise SystemExit("\n".join(each.stderr for each in done))
    lines = map(json.loads, (folder / "run" / "predictions.jsonl").read_text(encoding="utf-8").splitlines())
    ours = {line["file"]: line["rank"] for line in lines}
    facts: dict[str, Any] = {
        "commands": [shlex.join(["prelunet", *words[:-1]]) for words in commands],
        "images": len(ours),
        "errors": re.findall(r"top-[15] error ([\d.]+)", done[1].stdout),
    }
    for resizer, answers_of in expected.items():
        ranks = {file: _rank(best, Path(file).parent.name) for file, best in answers_of.items()}
        errors = [100 * sum(rank > best for rank in ranks.values()) / len(ranks) for best in (1, 5)]
        other = sum((ours[file] == 1) != (rank == 1) for file, rank in ranks.items())
        facts[resizer] = {"errors": [f"{error:.2f}" for error in errors], "images_right_for_one_only": other}
    return {**facts, "equal": facts["errors"] == facts["tensors"]["errors"]}


def _rank(best: Sequence[str], label: str) -> int:
    """Return the place of a label among the best classes, from 1, or one after the last."""
    return [*best, label].index(label) + 1


def measure(net: Mapping[str, Any], options: Sequence[str], folder: Path, images: Path) -> dict[str, Any]:
    """Adopt and evaluate a net; return status and largest differences of scores and pixels."""
    expected, pixels = np.load(folder / "scores.npy"), np.load(folder / "pixels.npy")
    model, run, data = folder / "adopted.onnx", folder / "run", _dataset(folder / "data", images, net["images"])
    if message := _refused("adopt", net["adopt"], *options, "-o", model, "--force"):
        wanted = net["refused"] and net["refused"] in message
        return {"status": "refused" if wanted else "REFUSED", "message": message}
    if message := _refused("validate", model, data, "--no-labels", "-o", run, "--fresh"):
        return {"status": "REFUSED", "message": message}
    by_score = np.abs(_scores(run, net["images"]) - expected).max(1)
    by_pixel = _pixels_off(model, net, images, pixels)
    facts = {"scores": _digits(by_score.max()), "pixels": None if by_pixel is None else _digits(by_pixel.max())}
    most_pixels, most_scores = TOLERANCES[net["resizer"]]
    if by_pixel is None or by_score.max() > most_scores or by_pixel.max() > most_pixels:
        return {"status": "DIFFERENT", **facts}
    return {"status": "equal", **facts}


def _prelunet(*words: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("prelunet")), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), cwd=folder)


def _refused(*words: object) -> str | None:
    """Run prelunet; return what it said if it refused the net or an option, which is no other failure."""
    done = _prelunet(*words)
    if done.returncode == 0:
        return None
    said = [line for line in done.stderr.splitlines() if line.startswith(("prelunet: ", "Error: "))]
    if done.returncode not in {2, 3} or not said:
        raise SystemExit(f"{shlex.join(map(str, words))}: {done.returncode}\n{done.stderr}")
    return " ".join(_by_name(said[-1].split()[1:]))


def _by_name(words: Sequence[str]) -> list[str]:
    """Return words with files by their names only."""
    return [Path(word).name if word.startswith("/") else word for word in words]


def _digits(value: float) -> float:
    return significant(float(value), 2)


def _dataset(folder: Path, images: Path, names: Sequence[str]) -> Path:
    """Link the images into a folder; return it."""
    folder.mkdir(exist_ok=True)
    for name in names:
        if not (folder / name).exists():
            (folder / name).hardlink_to(images / name)
    return folder


def _scores(run: Path, names: Sequence[str]) -> Array:
    """Return the scores of a run, float32 (images, classes), in the order of the names."""
    lines = (run / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    order = [Path(json.loads(line)["file"]).name for line in lines]
    return np.asarray(np.load(run / "scores.f32.npy")[[order.index(name) for name in names]])


def _pixels_off(model: Path, net: Mapping[str, Any], images: Path, pixels: Array) -> Array | None:
    """Return each image's largest difference of a pixel from its maker's, in grey levels; None if sizes differ."""
    protocol = build_protocol("center", open_session(model, "cpu").contract)
    decoded = (decode_image((images / name).read_bytes(), preparation=protocol.preparation) for name in net["images"])
    ours = np.asarray([make_views(image, protocol)[0].image for image in decoded], np.float32)
    # One channel of the maker's stands for all three of ours.
    return np.asarray(np.abs(ours - pixels).max((1, 2, 3))) if ours.shape[:3] == pixels.shape[:3] else None


def _versions(work: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in work.glob("*/versions.json"):
        found |= json.loads(file.read_text(encoding="utf-8"))
    return {name: found[name] for name in MAKERS if name in found}


if __name__ == "__main__":
    sys.exit(main())
