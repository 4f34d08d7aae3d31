"""Find how nets were trained, whose makers know it: with labels, with reference outputs, and from wrong data.

    python -m benchmarks.finding.run --data imagenette-128.tar --other grocery.tar [--output FILE] [--work DIR] [--tiny]

Six small nets are trained on photos prepared in different ways (benchmarks/finding/nets.py); of each, five more get
another channel order, mean and std in their first layer. `find_input` sees none of the training's photos. The rule,
written before the first run: with labels, the true answer is kept in at least 95 % of the cases for each question, and
order and normalization are named first, up to 1 % of contrast, in at least 90 %; with 20 reference outputs, order,
normalization and geometry are named in all, and no other ones are left. Each kind of wrong data gets its sentence, and
400 photos take a ResNet-18 at most 5 minutes on two cores. Takes about 25 minutes there; --work keeps trained nets.

Exit codes: 0 the rule holds, 1 it does not.
"""

import argparse
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import onnxruntime
import torch
from PIL import Image

from benchmarks.common.results import RESULTS, circumstances, described_run, markdown, write_result
from benchmarks.common.runner import command_line
from benchmarks.finding.nets import WAYS, Net, Way, cut, fitted_resnet18, secret_ways, trained, with_secret, write
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.errors import PreluNetError
from prelunet.export.finding.candidates import Candidate
from prelunet.export.finding.find import Found, find_input

PACKAGES = ("prelunet", "onnxruntime", "numpy", "pillow", "torch")
SEED, SECRETS, IMAGES, REFERENCES = 20261127, 5, 400, 20
KEPT, NAMED = 0.95, 0.90
CONTRAST = 0.01
MOST_SECONDS = 300  # of a ResNet-18


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = command_line(__doc__, output=RESULTS / "finding.json", limit=float("inf"))
    parser.add_argument("--data", type=Path, required=True, help="imagenette-128.tar")
    parser.add_argument("--other", type=Path, required=True, help="other photos: grocery.tar")
    parser.add_argument("--work", type=Path, help="folder for photos and nets, which are kept")
    options = parser.parse_args(words)
    facts = circumstances(__file__, options, PACKAGES, words)
    with tempfile.TemporaryDirectory(prefix="prelunet-finding-") as temporary:
        result = {"run": facts, **_measured(options.work or Path(temporary), options)}
    write_result(options.output, result, table(result))
    print(table(result))
    return 0 if result["holds"] else 1


def _measured(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    tiny, photos = options.tiny, _photos(work, options.data)
    classes = tuple(ClassEntry(wnid, wnid) for wnid in sorted({file.parent.name for file in photos["train"]}))
    folders = _write_cut(work, photos["val"])
    rows = []
    for number, (name, way) in enumerate(list(WAYS.items())[: 2 if tiny else None]):
        net, error = _net(work, name, way, photos, classes)
        for place, secret in enumerate([way, *secret_ways(way, 1 if tiny else SECRETS, SEED + number)]):
            file = write(with_secret(net, way, secret), work / f"net-{number}-{place}.onnx")
            row = {"net": name, "error": error, "secret": _described(secret) if place else "none"}
            row |= _row(file, folders, classes, secret)
            print(json.dumps(row), flush=True)
            rows.append(row)
    wrong = _wrong_data(work / "net-0-0.onnx", folders["val"], options.other, work, classes)
    large = _large(work, folders["val"], classes)
    return {"rows": rows, "wrong": wrong, "resnet18": large, **_verdict(rows, wrong, large)}


def _photos(work: Path, tar: Path) -> dict[str, list[Path]]:
    folder = work / "photos"
    if not folder.exists():
        with tarfile.open(tar) as archive:
            archive.extractall(folder, filter="data")
    return {part: sorted(folder.glob(f"*/{part}/*/*.JPEG")) for part in ("train", "val")}


def _write_cut(work: Path, files: Sequence[Path]) -> dict[str, Path]:
    """Write the cut photos of val in class folders, and twenty of them flat, for the references."""
    folders = {name: work / name for name in ("val", "references")}
    for number, file in enumerate(files):
        target = folders["val"] / file.parent.name / f"{number:05}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        cut(file, number).save(target)
    folders["references"].mkdir(exist_ok=True)
    for number in range(0, len(files), len(files) // REFERENCES + 1):
        cut(files[number], number + number // 200).save(folders["references"] / f"{number:05}.png")
    return folders


def _net(
    work: Path, name: str, way: Way, photos: dict[str, list[Path]], classes: Sequence[ClassEntry]
) -> tuple[Net, float]:
    """Return a trained net and its top-1 error on the cut photos of val, in percent."""
    kept, labels = work / f"{name.replace(' ', '-')}.pt", {entry.wnid: index for index, entry in enumerate(classes)}
    if kept.exists():
        net = Net(len(classes))
        net.load_state_dict(torch.load(kept))
        net.eval()
    else:
        images = [(cut(file, number), labels[file.parent.name]) for number, file in enumerate(photos["train"])]
        net = trained(way, images, len(classes), SEED)
        torch.save(net.state_dict(), kept)
    wrong = 0
    with torch.inference_mode():
        for number, file in enumerate(photos["val"]):
            values = torch.from_numpy(way.given(way.center(cut(file, number)))[None])
            wrong += int(net(values).argmax()) != labels[file.parent.name]
    return net, round(100 * wrong / len(photos["val"]), 1)


def _row(file: Path, folders: dict[str, Path], classes: tuple[ClassEntry, ...], way: Way) -> dict[str, Any]:
    start = time.monotonic()
    by_labels = find_input(file, folders["val"], classes=classes, images=IMAGES)
    seconds = time.monotonic() - start
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    images = [Image.open(each) for each in sorted(folders["references"].iterdir())]
    outputs = file.with_suffix(".npy")
    np.save(
        outputs, np.concatenate([session.run(None, {"x": way.given(way.center(each))[None]})[0] for each in images])
    )
    by_outputs = find_input(file, folders["references"], reference=outputs)
    return {
        "seconds": round(seconds, 1),
        "labels": _judged(by_labels, way),
        "contrast": by_labels.contrast,
        "printed": str(by_labels),
        "outputs": {**_judged(by_outputs, way), "difference": by_outputs.difference},
    }


def _judged(found: Found, way: Way) -> dict[str, Any]:
    """Return for each question whether the true answer is kept and comes first, and how many are kept."""
    judged: dict[str, Any] = {}
    for question, answers in found.answers.items():
        true = [_is_true(question, answer.candidate, way) for answer in answers]
        kept = [answer.standing.kept for answer in answers]
        judged[question] = {
            "kept": any(a and b for a, b in zip(true, kept, strict=True)), "first": true[0], "answers": sum(kept),
            "of": len(answers), "best": " = ".join(answers[0].names),
        }  # fmt: skip
    return judged


def _is_true(question: str, candidate: Candidate, way: Way) -> bool:
    own = candidate.preprocessing
    match question:
        case "channel order":
            return own.channels == way.order
        case "mean and std":
            assert own.mean is not None
            assert own.std is not None
            turned = slice(None, None, -1 if own.channels != way.order else 1)
            mean, std = (np.array(each)[turned] / own.pixel_range for each in (own.mean, own.std))
            true_mean, true_std = np.array(way.mean) / way.largest, np.array(way.std) / way.largest
            near = np.abs(mean - true_mean) <= CONTRAST * true_std
            return bool((near & (np.abs(std / true_std - 1) <= CONTRAST)).all())
        case "geometry":
            preparation = own.preparation
            same = (preparation.resize, candidate.scale, preparation.rounding) == (
                way.geometry,
                way.scale,
                "torchvision",
            )
            return same and (way.geometry != "pad" or preparation.pad_color == (114,) * 3)
    return (own.interpolation, own.preparation.antialias) == (way.filter, "pillow")


def _wrong_data(net: Path, val: Path, other: Path, work: Path, classes: tuple[ClassEntry, ...]) -> list[dict[str, Any]]:
    """Return what is said of shuffled labels, of other photos under the same classes, and of ten images."""
    random, files = np.random.default_rng(SEED), sorted(val.glob("*/*.png"))
    shuffled, photos, few = (work / name for name in ("shuffled", "photos of others", "few"))
    wnids = [entry.wnid for entry in classes]
    for file in files[::8]:
        target = shuffled / wnids[random.integers(len(wnids))] / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    with tarfile.open(other) as archive:
        members = [each for each in archive if each.name.lower().endswith((".jpg", ".jpeg", ".png"))]
        for number, member in enumerate(members):
            target = photos / wnids[number % len(wnids)] / f"{number}{Path(member.name).suffix}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(cast(IO[bytes], archive.extractfile(member)).read())
    for wnid in wnids:
        target = few / wnid / "one.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(next((val / wnid).iterdir()).read_bytes())
    said = []
    chance, too_few = "knows the labels no better than by chance", "10 labeled images are too few"
    cases = (("shuffled labels", shuffled, chance), ("other photos", photos, chance), ("10 images", few, too_few))
    for name, folder, wanted in cases:
        try:
            find_input(net, folder, classes=classes, images=IMAGES)
            text = ""
        except PreluNetError as error:
            text = str(error).replace(f"{work}/", "")
        said.append({"data": name, "said": text, "as_wanted": wanted in text})
    return said


def _large(work: Path, val: Path, classes: tuple[ClassEntry, ...]) -> dict[str, Any]:
    """Return how long 400 photos take a ResNet-18 with random weights, whose last layer is fitted to other photos."""
    files = sorted(val.glob("*/*.png"))
    labels = {entry.wnid: index for index, entry in enumerate(classes)}
    net = fitted_resnet18([(Image.open(file), labels[file.parent.name]) for file in files[::10]], len(classes))
    start = time.monotonic()
    find_input(write(net, work / "resnet18.onnx", side=224), val, classes=classes, images=IMAGES)
    return {"seconds": round(time.monotonic() - start), "images": IMAGES}


def _verdict(rows: Sequence[dict[str, Any]], wrong: Any, large: dict[str, Any]) -> dict[str, Any]:
    def share(by: str, question: str, key: str) -> float:
        return float(np.mean([row[by][question][key] for row in rows]))

    questions = list(rows[0]["labels"])
    kept = {question: share("labels", question, "kept") for question in questions}
    first = {question: share("labels", question, "first") for question in questions}
    outputs = {
        question: float(np.mean([row["outputs"][question]["first"] and row["outputs"][question]["answers"] == 1
                                 for row in rows]))
        for question in questions
    }  # fmt: skip
    holds = (
        min(kept.values()) >= KEPT
        and min(first["channel order"], first["mean and std"]) >= NAMED
        and all(outputs[question] == 1 for question in questions[:3])
        and all(each["as_wanted"] for each in wrong)
        and large["seconds"] <= MOST_SECONDS
    )
    return {"kept": kept, "first": first, "outputs_first": outputs, "holds": holds}


def table(result: dict[str, Any]) -> str:
    rows = result["rows"]
    shares = [
        (question, f"{result['kept'][question]:.0%}", f"{result['first'][question]:.0%}",
         np.mean([row["labels"][question]["answers"] for row in rows]), rows[0]["labels"][question]["of"],
         f"{result['outputs_first'][question]:.0%}")
        for question in result["kept"]
    ]  # fmt: skip
    lines = [
        "# Finding the preprocessing of nets", "", described_run(result["run"]), "",
        f"{len(rows)} nets, {IMAGES} labeled photos or {REFERENCES} reference outputs each, that they were not trained "
        "on. *kept*: the true answer cannot be told apart from the best; *first*: it is the best, normalizations up to "
        f"{CONTRAST:.0%} of contrast. The rule {'holds' if result['holds'] else 'does NOT hold'}.", "",
        markdown(("question", "labels: kept", "first", "answers left", "of", "outputs: named alone"), shares), "",
        "## What is printed", "", f"Of the first net, {rows[0]['net']}:", "", "```text", rows[0]["printed"], "```", "",
        "## Each net", "",
        markdown(
            ("net", "secret", "error %", "order", "mean and std", "geometry", "filter", "outputs differ by", "seconds"),
            ((row["net"], row["secret"], row["error"], *(_word(row["labels"][q]) for q in result["kept"]),
              row["outputs"]["difference"], row["seconds"]) for row in rows),
        ), "",
        "first: the true answer is the best; kept: it cannot be told apart from the best; LOST: it was excluded. "
        "Behind it how many answers are left.", "", "## Wrong data", "",
        *(f"- **{each['data']}**: {each['said'] or 'NOTHING was said'}" for each in result["wrong"]), "",
        f"Another contrast was said to fit better for {sum(row['contrast'] != 1 for row in rows)} of {len(rows)} nets, "
        f"all of which had been given the right one. A ResNet-18 and {result['resnet18']['images']} photos: "
        f"{result['resnet18']['seconds']} s.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _word(judged: dict[str, Any]) -> str:
    return f"{'first' if judged['first'] else 'kept' if judged['kept'] else 'LOST'}, {judged['answers']}"


def _described(way: Way) -> str:
    numbers = (",".join(f"{number:g}" for number in each) for each in (way.mean, way.std))
    return f"{way.order.upper()}, mean {', std '.join(numbers)}, to {way.largest}"


if __name__ == "__main__":
    sys.exit(main())
