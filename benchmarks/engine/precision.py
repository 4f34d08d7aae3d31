"""The effect of lower precision on a trained net: the same images in each, compared image by image with float32.

    python -m benchmarks.engine.precision --model MODEL.onnx --data DIR [--fp16 MODEL16.onnx] \\
        --output benchmarks/results/precision.json

Every run is one of `prelunet validate`, every comparison one of `prelunet compare`. The baseline is float32 in
onnxruntime. OpenVINO's float32, its bfloat16 if the CPU supports it, and a file exported in float16 are compared to it.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.results import header, markdown, write_result
from prelunet.evaluator.datasets import DatasetSpec, open_from_spec
from prelunet.evaluator.engine.load import open_with_placement
from prelunet.evaluator.engine.session import Placement
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.reporting.compare import compare_runs
from prelunet.evaluator.validation.run import Run, build_run_info, describe_dataset
from prelunet.evaluator.validation.stored_runs import read_rows
from prelunet.evaluator.validation.validate import validate


def main() -> None:
    """Validate in every precision and write the comparisons."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        (_, baseline), *others = list(_runs(options, Path(folder)))
        rows = [{"run": "onnxruntime fp32", **_errors(baseline)}]
        rows += [
            {"run": name, "refused": other} if isinstance(other, str) else {"run": name, **_against(baseline, other)}
            for name, other in others
        ]
    result = {
        **header(__file__, sys.argv[1:], ("prelunet", "onnxruntime", "openvino", "numpy", "pillow")),
        "model": dict(baseline.info.model),
        "dataset": dict(baseline.info.dataset),
        "protocol": baseline.info.protocol.to_json(),
        "results": rows,
    }
    print(_table(rows))
    write_result(options.output, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a trained net, exported in float32")
    parser.add_argument("--fp16", type=Path, help="the same net, exported with --precision fp16")
    parser.add_argument("--data", type=Path, required=True, help="dataset to validate")
    parser.add_argument("--protocol", default="multi-scale", help="default: multi-scale")
    parser.add_argument("--limit", type=int, help="maximum number of images")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def _runs(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Run | str]]:
    """Yield the run of each precision, or why it is unavailable here."""
    requested = [
        ("onnxruntime fp32", options.model, Placement("cpu")),
        ("OpenVINO fp32", options.model, Placement("openvino")),
        ("OpenVINO bf16", options.model, Placement("openvino", "bf16")),
        *([("onnxruntime fp16", options.fp16, Placement("cpu"))] if options.fp16 else []),
    ]
    for name, path, placement in requested:
        try:
            session = open_with_placement(path, placement)
        except EnvironmentFault as error:
            yield name, str(error)
            continue
        dataset = open_from_spec(DatasetSpec(options.data, limit=options.limit), session.contract.classes)
        protocol = build_protocol(options.protocol, session.contract)
        info = build_run_info(session, path.name, describe_dataset(dataset), protocol)
        yield name, validate([session], dataset, info, folder / name)


def _errors(run: Run) -> dict[str, Any]:
    """Return the errors of a run in percent."""
    ranks = np.array([line.rank for line in run.predictions if line.refused is None])
    return {"images": len(ranks), **{f"top{k}_error": round(100 * float((ranks > k).mean()), 3) for k in (1, 5)}}


def _against(baseline: Run, run: Run) -> dict[str, Any]:
    """Compare a run with the baseline, image by image."""
    found = compare_runs(baseline, run)
    scores = [read_rows(one, 0, len(one.predictions)) for one in (baseline, run)]
    deviation = np.nanmax(np.abs(scores[0] - scores[1]), axis=1)
    answers = [
        np.array([line.top[0][0] for line in one.predictions if line.refused is None]) for one in (baseline, run)
    ]
    return {
        **_errors(run),
        **{f"{key}_{part}": found[key][part] for key in ("top1", "top5") for part in ("difference", "interval")},
        "score_off_by_at_most": float(deviation.max()),
        "score_off_by_median": float(np.median(deviation)),
        "other_first_answers": int((answers[0] != answers[1]).sum()),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ("run", "top-1", "top-5", "change of top-1 (95 %)", "scores off by", "other answers")
    refused = (f"\n{row['run']}: {row['refused']}" for row in rows if "refused" in row)
    return markdown(columns, map(_cells, rows)) + "".join(refused)


def _cells(row: dict[str, Any]) -> list[Any]:
    errors = [f"{row[key]:.2f}" if key in row else None for key in ("top1_error", "top5_error")]
    change = None
    if "top1_difference" in row:
        low, high = row["top1_interval"]
        change = f"{row['top1_difference']:+.2f} ({low:+.2f} to {high:+.2f})"
    return [row["run"], *errors, change, row.get("score_off_by_at_most"), row.get("other_first_answers")]


if __name__ == "__main__":
    main()
