"""Parallel training: bytes and seconds of a step, data parallel (ddp) and the paper's scheme (hybrid).

    python -m benchmarks.training.parallel --output benchmarks/results/parallel.json

Starts 1, 2 and 4 single-threaded gloo processes with torchrun, in turn, `--rounds` times: about 4 minutes on two
cores. Bytes are counted by the sending code, by formula, and by the loopback interface. The figures for A, B, C on 4
and 8 GPUs are a MODEL (parallel_model.py), beside the paper's 3.8x and 6.0x.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT, environment, header, markdown, write_result
from benchmarks.training.parallel_model import PAPER, costs, model, sent_bytes
from benchmarks.training.parallel_steps import BATCH, CLASSES, PURPOSES, small_a

CONTENDERS = (("ddp", 1), ("ddp", 2), ("hybrid", 2), ("ddp", 4), ("hybrid", 4))
SAME_LOSS = 1e-4  # relative: float32 sums in another order, over several steps


def main() -> None:
    """Measure, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all contenders")
    parser.add_argument("--steps", type=int, default=12, help="steps per process and round")
    parser.add_argument("--output", type=Path, help="JSON file to write; tables are written beside it")
    options = parser.parse_args()
    found = _measure_all(options.rounds, options.steps)
    words = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    result = {
        **header(__file__, words, ("prelunet", "torch", "numpy")),
        "load_at_the_end": [round(load, 2) for load in os.getloadavg()],
        "net": {"name": small_a().name, "batch": BATCH, "classes": CLASSES, **vars(costs(small_a(), CLASSES, BATCH))},
        "threads_of_a_process": 1,
        "measured": [_case(kind, size, rounds) for (kind, size), rounds in found.items()],
        "model": model(),
    }
    text = tables(result)
    print(text)
    write_result(options.output, result, text)


def _measure_all(rounds: int, steps: int) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Run all contenders in rounds, in an order shuffled for each, and check that their losses agree."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {contender: [] for contender in CONTENDERS}
    shuffle = random.Random(0)
    for number in range(1, rounds + 1):
        for kind, size in shuffle.sample(CONTENDERS, len(CONTENDERS)):
            one = _torchrun(kind, size, steps)
            found[kind, size].append(one)
            print(f"round {number}: {_who(size, kind)}: {statistics.median(one['seconds']):.3f} s per step", flush=True)
    expected = found[CONTENDERS[0]][0]["losses"]
    for contender, results in found.items():
        for one in results:
            off = max(abs(a / b - 1) for a, b in zip(one["losses"], expected, strict=True))
            if not off <= SAME_LOSS:
                raise SystemExit(f"{contender}: the losses differ from those of one process by {off:.1e}")
    return found


def _torchrun(kind: str, size: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "steps.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        subprocess.run(
            [
                *torchrun,
                "-m",
                "benchmarks.training.parallel_steps",
                kind,
                "--steps",
                str(steps),
                "--output",
                str(output),
            ],
            check=True,
            cwd=ROOT,
            env={**environment(), "OMP_NUM_THREADS": "1"},
        )
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


def _case(kind: str, size: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    formula = sent_bytes(kind, size, costs(small_a(), CLASSES, BATCH), BATCH)
    return {
        "kind": kind,
        "processes": size,
        "median_seconds": [round(statistics.median(one["seconds"]), 4) for one in rounds],
        "sent_by_all": rounds[0]["sent_by_all"],
        "sent_by_all_formula": formula,
        "loopback_per_step": [round(one["loopback_per_step"]) for one in rounds],
    }


def tables(result: dict[str, Any]) -> str:
    """Return the whole result in Markdown."""
    machine, net = result["machine"], result["net"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(
        [
            "# Parallel training: ddp and hybrid",
            "",
            f"{result['date']}, {machine['cpu']}, {machine['cores']} cores, load {result['load_at_the_end'][0]:.1f} at "
            f"the end; {versions}. Command: `{result['command']}`.",
            "",
            "## Measured: single-threaded gloo processes on this machine",
            "",
            f"{net['name']}: A with an eighth of its channels and fc units, crop {small_a().crop}; {net['classes']} "
            f"classes, total batch {net['batch']}; {net['trunk_parameters']:,} parameters in the trunk, "
            f"{net['head_parameters']:,} in the head. All had the same losses. *MB*: sent per step by all processes "
            "together; *loopback*: minimum of all rounds, including headers and other traffic of that interface. "
            "*s*: median over rounds of the median step, then minimum and maximum. More processes than cores only "
            "show the cost of sharing.",
            "",
            _measured(result["measured"], machine["cores"]),
            "",
            "## MODEL, not measured: A, B, C on 4 and 8 GPUs",
            "",
            _model_notes(result["model"]),
            "",
            _modelled(result["model"]),
            "",
        ]
    )


def _who(processes: int, kind: str) -> str:
    return "one process" if processes == 1 else f"{processes} x {kind}"


def _measured(cases: list[dict[str, Any]], cores: int) -> str:
    alone = statistics.median(cases[0]["median_seconds"])
    rows = []
    for case in cases:
        seconds = statistics.median(case["median_seconds"])
        sent = [case["sent_by_all"][purpose] / 1e6 for purpose in PURPOSES[:3]]
        rows.append(
            (
                _who(case["processes"], case["kind"]) + (" (more than cores)" if case["processes"] > cores else ""),
                *sent,
                sum(case["sent_by_all"].values()) / 1e6,
                sum(case["sent_by_all_formula"].values()) / 1e6,
                min(case["loopback_per_step"]) / 1e6,
                seconds,
                f"{min(case['median_seconds']):.3g} to {max(case['median_seconds']):.3g}",
                f"{alone / seconds:.2f}",
            )
        )
    columns = ("processes", "MB gradients", "MB features", "MB their gradients", "MB counted", "MB by formula")
    return markdown((*columns, "MB loopback", "s", "from to", "speed-up"), rows)


def _model_notes(data: dict[str, Any]) -> str:
    assumed = "\n".join(
        f"- {one['name']}: {one['rate'] / 1e12:.3g} TFLOP/s, {one['bandwidth'] / 1e9:.3g} GB/s; {one['why']}"
        for one in data["hardware"]
    )
    return (
        f"Total batch {data['batch']}, as in the paper; every GPU computes at one rate and sends and receives at one "
        "bandwidth; loading and updates cost nothing, and smaller batches cost no efficiency. *hidden*: gradients "
        "are sent during backward as long as that lasts; *not*: after it. *Amdahl*: hybrid with free communication, "
        "since the head runs on one GPU. Where the paper's speed-up is lower, the costs that the model omits were "
        "larger than those it counts.\n\n" + assumed
    )


def _modelled(data: dict[str, Any]) -> str:
    rows = [
        (
            row["net"],
            f"{row['gpus']} x {row['hardware']}",
            f"{100 * row['head_share']:.1f} %",
            *(f"{row[kind]['mb_sent_by_all']:,.0f}" for kind in ("ddp", "hybrid")),
            *(
                f"{row[kind]['speedup_hidden']:.1f} / {row[kind]['speedup_not_hidden']:.1f}"
                for kind in ("ddp", "hybrid")
            ),
            f"{row['amdahl_hybrid']:.1f}",
            PAPER[row["gpus"]] if row["hardware"] != "H100" else None,
        )
        for row in data["rows"]
    ]
    columns = ("net", "GPUs", "head's share", "MB ddp", "MB hybrid", "ddp hidden / not", "hybrid hidden / not")
    return markdown((*columns, "Amdahl", "the paper"), rows)


if __name__ == "__main__":
    main()
