"""The cases of the rehearsal: each a claim that holds or not, with its numbers."""

import hashlib
import json
import os
import shutil
import signal
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.results import shuffled
from benchmarks.rehearsal.images import (
    COPIES,
    PICTURES,
    label_images,
    write_folders,
    write_parquet,
    write_pictures,
    write_shards,
)
from benchmarks.rehearsal.net import write_model
from benchmarks.rehearsal.processes import KILLS, MIN_SAMPLES, Watched, killed_and_resumed, watch
from benchmarks.reliability.cases import Json, verdict
from prelunet.evaluator.datasets.labels.class_file import IMAGENET_1K, read_class_list
from prelunet.evaluator.machine import cores
from prelunet.evaluator.validation.run import PREDICTIONS_FILE, SCORES_FILE, read_run

LAYOUTS = {"folders": write_folders, "shards": write_shards, "parquet": write_parquet}
CONTROL = "folders again"  # the same folders once more: how far turns differ by themselves
SEED = 0
MEAN_KB = (95, 125)  # of a picture; ImageNet's have 110 on average
PAGE_MB = 8  # limit of report.html
PARTS, ROUNDS, SPEED = 10, 7, 0.95  # images in a turn: 1/PARTS; turns of each layout; limit, relative to folders
CURVE = 12  # shown samples of the memory


class Rehearsal:
    """The files, in a temporary folder, and the work of the cases. images: of the dataset."""

    def __init__(self, folder: Path, images: int) -> None:
        self.folder, self.images = folder, images

    @cached_property
    def model(self) -> Path:
        """Return the model file. The first access writes it, and the images in all layouts."""
        wnids = [entry.wnid for entry in read_class_list(Path(IMAGENET_1K))]
        self.pictures = write_pictures(self.folder / "pictures", self.images // COPIES, SEED)
        images = label_images(self.pictures, self.images, SEED)
        for name, write in LAYOUTS.items():
            write(self.folder / name, images, wnids)
        model = write_model(self.folder, SEED)
        os.sync()  # or the first case would share the disk
        return model

    def dataset(self) -> Json:
        """Write the files."""
        model_mb = self.model.stat().st_size / 1e6
        mean_kb = statistics.mean(picture.stat().st_size for picture in self.pictures) / 1e3
        conditions = {"mean_size_of_imagenet": MEAN_KB[0] <= mean_kb <= MEAN_KB[1]}
        return verdict(conditions, pictures=len(self.pictures), mean_kb=mean_kb, model_mb=model_mb)

    def undisturbed(self, layout: str) -> Json:
        """Evaluate a layout in one process and report on it."""
        run = self.folder / f"undisturbed-{layout}"
        seen = watch(self._validate(layout, run), run)
        reported = watch(["report", run], run)
        lines, scores = read_run(run).predictions, np.load(run / SCORES_FILE)
        order = np.arange(len(lines))  # of the images' numbers, as tars and parquet have them
        if layout == "folders":
            order = np.argsort([line.file.rpartition("/")[2] for line in lines])
        answers = [(lines[n].label, [index for index, _ in lines[n].top], lines[n].rank) for n in order.tolist()]
        page_mb = (run / "report" / "report.html").stat().st_size / 1e6
        classes, answered = ({label for label, _, _ in answers}, {top[0] for _, top, _ in answers})
        return verdict(
            {
                "memory_is_flat": seen.is_flat,
                "long_enough_to_tell": seen.writing >= MIN_SAMPLES or self.images < PICTURES * COPIES,
                f"page_of_{PAGE_MB}_mb_at_most": page_mb <= PAGE_MB,
                "answers_differ": len(answered) > len(classes) / 2,
            },
            images_per_second=self.images / seen.seconds,
            opening_seconds=round(seen.opening, 2),
            max_mb=round(max(seen.memory)),
            memory_mb=[round(mb) for mb in seen.memory[:: -(-len(seen.memory) // CURVE)]],
            report_seconds=round(reported.seconds, 1),
            report_max_mb=round(max(reported.memory)),
            page_mb=round(page_mb, 2),
            top1_error=json.loads((run / "report" / "report.json").read_bytes())["top1_error"],
            predictions_bytes=(run / PREDICTIONS_FILE).stat().st_size,
            digests={
                **_digests(run), "answers": _digest(json.dumps(answers).encode()), "by image": _digest(scores[order])
            },
        )  # fmt: skip

    def killed(self, layout: str, undisturbed: Mapping[str, Any]) -> Json:
        """Evaluate a layout in two processes that are killed and resumed, merge, report, and compare the bytes."""
        runs = [self.folder / f"shard-{number}-{layout}" for number in (1, 2)]
        threads, size = str(max(1, cores() // 2)), undisturbed["predictions_bytes"] / 2

        def evaluate(number: int) -> Sequence[Watched]:
            words = self._validate(layout, runs[number - 1], "--shard", f"{number}/2", "--threads", threads)
            return list(killed_and_resumed(words, runs[number - 1], size, f"{SEED} {layout} {number}"))

        with ThreadPoolExecutor() as pool:
            seen = [process for shard in pool.map(evaluate, (1, 2)) for process in shard]
        merged = self.folder / f"merged-{layout}"
        joined = watch(["merge", *runs, "--run", merged], merged)
        watch(["report", merged], merged)
        logs = [(run / "log.jsonl").read_text(encoding="utf-8") for run in runs]
        return verdict(
            {
                "killed_three_times_each": [process.code for process in seen] == 2 * [*KILLS * [-signal.SIGKILL], 0],
                "resumed_three_times_each": all(log.count('"event": "resume"') == KILLS for log in logs),
                **{f"same_{name}": undisturbed["digests"][name] == found for name, found in _digests(merged).items()},
                "memory_is_flat": all(process.is_flat for process in seen),
            },
            killed_after_images=[process.done for process in seen if process.code],
            max_mb_of_each_process=[round(max(process.memory, default=0)) for process in seen],
            merge_seconds=round(joined.seconds, 1),
            merge_max_mb=round(max(joined.memory)),
        )

    def compared(self, results: Mapping[str, Mapping[str, Any]]) -> Json:
        """Compare the undisturbed runs by image."""
        kinds = {kind: {result["digests"][kind] for result in results.values()} for kind in ("answers", "by image")}
        conditions = {"all_layouts": results.keys() == LAYOUTS.keys(), "same_answers": len(kinds["answers"]) == 1}
        return verdict(conditions, scores_equal_to_the_bit=len(kinds["by image"]) == 1)

    def speeds(self) -> Json:
        """Evaluate a part of each layout in turn, the same images in all; one of the turns repeats the folders.

        Each turn opens the whole dataset, so that opening weighs PARTS times as much as in a whole run; `of_folders` is
        of whole runs, in which the rest of the turn takes PARTS times as long.
        """
        run, parts, wholes = self.folder / "part", dict[str, list[float]](), dict[str, list[float]]()
        for number in range(ROUNDS):
            for name in shuffled([*LAYOUTS, CONTROL], number):
                layout = "folders" if name == CONTROL else name
                seen = watch(self._validate(layout, run, "--shard", f"1/{PARTS}"), run)
                parts.setdefault(name, []).append(seen.seconds)
                wholes.setdefault(name, []).append(seen.opened_after + PARTS * (seen.seconds - seen.opened_after))
                shutil.rmtree(run)
        ratios = {name: _ratios(wholes, name) for name in wholes if name != "folders"}
        return verdict(
            {f"{name}_at_least_{SPEED}": of["median"] >= SPEED for name, of in ratios.items() if name != CONTROL},
            **{f"{name}_of_folders": of for name, of in ratios.items()},
            **{f"{name}_of_folders_with_all_of_the_opening": _ratios(parts, name) for name in ratios},
            **{f"seconds_of_turns_{name}": [round(second, 2) for second in parts[name]] for name in parts},
        )

    def _validate(self, layout: str, run: Path, *words: str) -> list[str | Path]:
        return ["validate", "--model", self.model, "--data", self.folder / layout, "--run", run, *words]


def _ratios(seconds: Mapping[str, Sequence[float]], layout: str) -> dict[str, float]:
    """Return the speed of a layout relative to folders over all turns."""
    ratios = [folders / own for folders, own in zip(seconds["folders"], seconds[layout], strict=True)]
    named = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return {name: round(value, 3) for name, value in named.items()}


def _digests(run: Path) -> dict[str, str]:
    files = (PREDICTIONS_FILE, SCORES_FILE, "report/report.json")
    return {Path(file).name: _digest((run / file).read_bytes()) for file in files}


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
