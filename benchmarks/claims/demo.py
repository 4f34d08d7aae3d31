"""Does dense multi-scale testing beat one crop, and do slopes decrease with depth? Recipe demo with several seeds.

    python -m benchmarks.claims.demo --runs DIR --output benchmarks/results/demo-seeds.json

Each training is `prelunet train --recipe demo --seed N`. Each net is exported and validated as by `prelunet validate`
with `center` and `multi-scale` (PReLU-nets, Tables 4 to 6; Table 1 for the slopes). `center` uses scale 22, the
largest of the training scales. Intervals are Student's t over the seeds. Interrupted trainings resume in DIR; finished
ones are not repeated.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.intervals import interval_of_mean
from benchmarks.common.results import circumstances, markdown, write_result
from benchmarks.common.runner import command_line, several
from prelunet.evaluator.datasets import DatasetSpec, open_from_spec
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.run import build_run_info, describe_dataset
from prelunet.evaluator.validation.validate import validate
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.data.splits import embedded_dataset_path
from prelunet.training.inspection.describe_file import summarize_slopes
from prelunet.training.inspection.slope_trend import slope_trend
from prelunet.training.loop.execution import Execution
from prelunet.training.loop.train import train
from prelunet.training.net.checkpoints import read_checkpoint
from prelunet.training.recipe import read_recipe

PROTOCOLS = ("center", "multi-scale")

Json = dict[str, Any]


def main() -> None:
    """Train, export, validate; write the result."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="folder for the trainings, 5 minutes each on 2 cores")
    parser.add_argument("--seeds", type=several, default=3, help="number of trainings, at least 2")
    options = parser.parse_args()
    seeds = [_one(options.runs / f"seed-{seed}", seed) for seed in range(options.seeds)]
    columns: dict[str, list[float]] = {
        **{name: [seed["top1_error"][name] for seed in seeds] for name in PROTOCOLS},
        "rank correlation of slopes with depth": [seed["slopes"]["rank_correlation"] for seed in seeds],
        "slope of conv1_1": [seed["slopes"]["first"] for seed in seeds],
        "slopes above it": [seed["slopes"]["others"] for seed in seeds],
    }
    columns["multi-scale − center"] = list(np.subtract(columns["multi-scale"], columns["center"]))
    means = {}
    for name, values in columns.items():
        low, high = interval_of_mean(values)
        means[name] = {"mean": round(float(np.mean(values)), 4), "interval": [round(low, 4), round(high, 4)]}
    result = {
        **circumstances(__file__, options, ("prelunet", "onnxruntime", "torch", "numpy")),
        "seeds": seeds,
        "means": means,
    }
    print(_table(result))
    write_result(options.output, result, _table(result))


def _one(folder: Path, seed: int) -> Json:
    """Train with a seed; return errors and slopes of the net."""
    training = train(replace(read_recipe("demo"), seed=seed), None, folder, execution=Execution(device="cpu"))
    model = folder / "model.onnx"
    if not model.exists():
        export_checkpoint(training.checkpoint, model)
    slopes = summarize_slopes(read_checkpoint(training.checkpoint).tensors)
    trend = slope_trend({entry["layer"]: entry["mean"] for entry in slopes})
    assert trend is not None
    return {
        "seed": seed,
        "top1_error": {name: _error(model, name, folder / name) for name in PROTOCOLS},
        "slopes": trend.to_json(),
    }


def _error(model: Path, name: str, folder: Path) -> float:
    """Return the top-1 error in percent; a finished run in the folder is reused."""
    session = open_session(model, "cpu")
    dataset = open_from_spec(DatasetSpec(embedded_dataset_path()), session.contract.classes)
    info = build_run_info(session, model.name, describe_dataset(dataset), build_protocol(name, session.contract))
    run = validate([session], dataset, info, folder)
    ranks = np.array([line.rank for line in run.predictions if line.refused is None])
    return round(100 * float((ranks > 1).mean()), 3)


def _table(result: Json) -> str:
    rows = [
        (
            one["seed"],
            *(f"{one['top1_error'][name]:.2f}" for name in PROTOCOLS),
            f"{one['slopes']['rank_correlation']:+.2f}",
            f"{one['slopes']['first']:.3f}",
            f"{one['slopes']['others']:.3f}",
        )
        for one in result["seeds"]
    ]
    columns = ("seed", *(f"{name}, %" for name in PROTOCOLS), "rank correlation", "conv1_1", "the layers above")
    means = [
        (name, f"{found['mean']:.3g}", f"{found['interval'][0]:.3g} to {found['interval'][1]:.3g}")
        for name, found in result["means"].items()
    ]
    about = f"{result['date']}, {result['machine']['cpu']}: `{result['command']}`"
    return (
        f"# The recipe demo with several seeds\n\n{about}\n\n"
        "Top-1 error on 2,000 images, and mean slopes of the layers by depth:\n\n"
        f"{markdown(columns, rows)}\n\nMean over seeds and 95 % interval:\n\n"
        f"{markdown(('', 'mean', 'interval'), means)}\n"
    )


if __name__ == "__main__":
    main()
