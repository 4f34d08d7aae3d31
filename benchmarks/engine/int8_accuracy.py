"""What int8 costs: the change of the top-1 error from float32, on nets of the recipe demo with several seeds.

    python -m benchmarks.engine.int8_accuracy --runs DIR --output benchmarks/results/int8-accuracy.json

Each training is `prelunet train --recipe demo --seed N`; interrupted ones resume in DIR. Each net is exported in
float32 and in int8, calibrated on training images, and validated with `multi-scale`: float32 in OpenVINO, int8 in
OpenVINO and in onnxruntime. Beside the errors: how much of its tolerance each runtime's golden images use (`prelunet
verify`). Intervals are Student's t over seeds.
"""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.intervals import interval_of_mean
from benchmarks.common.results import circumstances, markdown, write_result
from benchmarks.common.runner import command_line, several
from prelunet.evaluator.contract import FilePrecision
from prelunet.evaluator.datasets import DatasetSpec, open_from_spec
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.session import Device
from prelunet.evaluator.engine.verify import tolerance_of, verify
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.run import build_run_info, describe_dataset
from prelunet.evaluator.validation.validate import validate
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.data.splits import embedded_dataset_path
from prelunet.training.loop.execution import Execution
from prelunet.training.loop.train import train
from prelunet.training.recipe import read_recipe

ALLOWED = 0.3  # points of top-1 error: the goal
IMAGES = 300  # of the calibration
RUNS: tuple[tuple[FilePrecision, Device], ...] = (("fp32", "openvino"), ("int8", "openvino"), ("int8", "cpu"))

Json = dict[str, Any]


def main() -> None:
    """Train, export, validate; write the result."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="folder for the trainings, 5 minutes each on 2 cores")
    parser.add_argument("--seeds", type=several, default=3, help="number of trainings, at least 2")
    options = parser.parse_args()
    pictures = options.runs / "pictures"
    with zipfile.ZipFile(embedded_dataset_path()) as archive:
        archive.extractall(pictures)
    seeds = [_one(options.runs / f"seed-{seed}", seed, pictures / "train") for seed in range(options.seeds)]
    changes = {device: [seed["errors"]["int8"][device] - seed["errors"]["fp32"]["openvino"] for seed in seeds]
               for device in ("openvino", "cpu")}  # fmt: skip
    means = {}
    for device, values in changes.items():
        low, high = interval_of_mean(values)
        means[device] = {"mean": round(float(np.mean(values)), 3), "interval": [round(low, 3), round(high, 3)]}
    met = all(float(np.mean(values)) <= ALLOWED for values in changes.values())
    result = {
        **circumstances(__file__, options, ("prelunet", "openvino", "onnxruntime", "torch", "numpy")),
        "seeds": seeds,
        "change_of_top1_error": means,
        "goal": {"at_most": ALLOWED, "met": met},
    }
    print(_table(result))
    write_result(options.output, result, _table(result))


def _top1_error(model: Path, device: Device, folder: Path) -> float:
    """Return the top-1 error with `multi-scale` in percent."""
    session = open_session(model, device)
    dataset = open_from_spec(DatasetSpec(embedded_dataset_path()), session.contract.classes)
    protocol = build_protocol("multi-scale", session.contract)
    info = build_run_info(session, model.name, describe_dataset(dataset), protocol)
    run = validate([session], dataset, info, folder, fresh=True)
    ranks = np.array([line.rank for line in run.predictions if line.refused is None])
    return round(100 * float((ranks > 1).mean()), 3)


def _one(folder: Path, seed: int, pictures: Path) -> Json:
    """Train with a seed; return the errors by precision and device, and the share of the tolerance that is used.

    pictures: folder with the training images of each class.
    """
    recipe = replace(read_recipe("demo"), seed=seed)
    checkpoint = train(recipe, None, folder, execution=Execution(device="cpu")).checkpoint
    files: dict[FilePrecision, Path] = {"fp32": folder / "fp32.onnx", "int8": folder / "int8.onnx"}
    export_checkpoint(checkpoint, files["fp32"], "exact")
    cost = export_checkpoint(checkpoint, files["int8"], "exact", "int8", DatasetSpec(pictures, limit=IMAGES)).cost
    errors: dict[str, dict[str, float]] = {"fp32": {}, "int8": {}}
    for precision, device in RUNS:
        run = folder / f"{precision}-{device}"
        errors[precision][device] = _top1_error(files[precision], device, run)
    return {
        "seed": seed,
        "errors": errors,
        "held_out": str(cost),
        "tolerance_used": {device: _tolerance_used(files["int8"], device) for _, device in RUNS[1:]},
    }


def _tolerance_used(path: Path, device: Device) -> float:
    """Return the largest deviation of a golden image's scores or logits as a share of what the file allows."""
    session = open_session(path, device)
    tolerance = tolerance_of(session)
    found = verify(session)
    return round(max(max(one.scores / tolerance.scores, one.logits / tolerance.logits) for one in found), 3)


def _table(result: Json) -> str:
    rows = [
        (
            one["seed"],
            *(f"{one['errors'][precision][device]:.2f}" for precision, device in RUNS),
            *(f"{one['tolerance_used'][device]:.2f}" for _, device in RUNS[1:]),
        )
        for one in result["seeds"]
    ]
    columns = ("seed", "fp32, %", "int8 in OpenVINO, %", "int8 file in onnxruntime, %", "tolerance used by OpenVINO",
               "by onnxruntime")  # fmt: skip
    means = [
        (device, f"{found['mean']:+.2f}", f"{found['interval'][0]:+.2f} to {found['interval'][1]:+.2f}")
        for device, found in result["change_of_top1_error"].items()
    ]
    goal = result["goal"]
    return (
        f"# What int8 costs\n\n{result['date']}, {result['machine']['cpu']}: `{result['command']}`\n\n"
        "Top-1 error of the recipe demo on 2,000 images with `multi-scale`. The ranges are those of "
        f"{IMAGES // 2} training images:\n\n"
        f"{markdown(columns, rows)}\n\nChange of the top-1 error from fp32 in points, mean over seeds and 95 % "
        f"interval:\n\n{markdown(('int8 on', 'mean', 'interval'), means)}\n\n"
        f"- {'met' if goal['met'] else 'NOT met'}: a mean change of at most +{goal['at_most']} points\n"
    )


if __name__ == "__main__":
    main()
