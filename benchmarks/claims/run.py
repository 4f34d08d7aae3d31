"""One row of the claims on photos: searches the learning rates, trains, compares, and writes the verdicts.

    python -m benchmarks.claims.run ROW --data IMAGENETTE.tar --runs DIR

The rules are in RULES.md, the experiments in rows.py. IMAGENETTE.tar holds train/WNID/*.JPEG and val/WNID/*.JPEG.
The row is written to benchmarks/results/claims/ROW.json, .md and .svg.

Every result is one JSON file in DIR, computed once; rows share them. The same command resumes after any interruption.
It uses one core: start it once for each core, and the processes share the work. All results are also kept in
benchmarks/results/claims/nets.jsonl: where that file is committed, another machine resumes what this one began.
"""

import argparse
import fcntl
import io
import json
import math
import os
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from benchmarks.claims import fisher, rows
from benchmarks.claims.rows import BEST_MEMBER, ENSEMBLE, MEMBERS, Figure, Row, verdict
from benchmarks.common.intervals import interval_of_mean
from benchmarks.common.results import RESULTS, ROOT, circumstances, commit, cpu, markdown, write_result
from prelunet.evaluator.datasets import DatasetSpec, open_from_spec
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.errors import DivergenceError, Interrupted
from prelunet.evaluator.files import write_atomically
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.reporting.charts import chart_spec
from prelunet.evaluator.reporting.html import draw_svg
from prelunet.evaluator.validation.ensemble import ensemble
from prelunet.evaluator.validation.run import Run, build_run_info, describe_dataset
from prelunet.evaluator.validation.validate import validate
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.inspection.describe_file import summarize_slopes
from prelunet.training.inspection.slope_trend import slope_trend
from prelunet.training.loop.execution import Execution
from prelunet.training.loop.train import train
from prelunet.training.net.checkpoints import read_checkpoint
from prelunet.training.run_state.run_folder import LAST_FILE, METRICS_FILE

RULES = tuple(f"benchmarks/claims/{name}" for name in ("RULES.md", "rows.py", "nets"))
HELD_OUT = 5  # every fifth image of each class of train/, in the order of names, is left out of the search's trainings
WAIT = 20  # seconds between looks at work that another process does

Json = dict[str, Any]
Task = Callable[[], Json]


@dataclass(frozen=True)
class Net:
    """One training. final: on all of train/, measured on val/; otherwise on the search's part of train/."""

    arm: str
    rate: float
    seed: int
    final: bool

    @property
    def name(self) -> str:
        """Return the path of its folder in --runs."""
        return f"{self.arm}/{'final' if self.final else 'search'}-{self.rate:g}-{self.seed}"


class Experiment:
    """The nets and results in a folder.

    data: the archive of photos; rules: from `read_rules`, recorded in each net; kept: the file of the results of all
    nets, which are taken from it and added to it.
    """

    def __init__(self, data: Path, runs: Path, rules: Json, kept: Path) -> None:
        self.data, self.runs, self.rules, self.kept = data, runs, rules, kept
        for line in kept.read_text().splitlines() if kept.exists() else ():
            found = json.loads(line)
            for name, content in found["results"].items():
                if not (path := runs / found["net"] / f"{name}.json").exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(path, json.dumps(content, indent=1).encode())

    def _keep(self) -> None:
        """Write the results of all nets to one file, a line for each net."""
        nets: dict[str, Json] = {}
        with (self.runs / "keeping").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in sorted(self.runs.glob("*/*/*.json")):
                net = path.parent.relative_to(self.runs).as_posix()
                nets.setdefault(net, {})[path.stem] = json.loads(path.read_bytes())
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            # A net that has only begun is left out: the machine that resumes trains it from its start.
            lines = (
                json.dumps({"net": net, "results": results}) + "\n"
                for net, results in nets.items()
                if results.keys() - {"started"}
            )
            write_atomically(self.kept, "".join(lines).encode())

    @cached_property
    def search_data(self) -> Path:
        """Return the archive of the search: train/ of the photos, every fifth of a class as its val/."""
        path = self.runs / "search.tar"
        if not path.exists():
            write_atomically(path, split_train(self.data))
        return path

    def share(self, tasks: Mapping[Path, Task]) -> list[Json]:
        """Compute the JSON files that are missing, in turn with other processes, and return the content of all.

        A folder is worked on by one process at a time; the system releases it when that process dies.
        """
        took: list[float] = []
        while missing := [path for path in tasks if not path.exists()]:
            computed = len(took)
            for path in missing:
                with locked(path.parent) as own:
                    if not own or path.exists():
                        continue
                    begun = time.monotonic()
                    write_atomically(path, json.dumps(found := tasks[path](), indent=1).encode())
                    took.append(time.monotonic() - begun)
                self._keep()
                left = sum(not path.exists() for path in tasks)
                hours = left * float(np.mean(took)) / 3600
                print(f"{path.relative_to(self.runs)}: top-1 error {found['top1_error']:.2f} %, {took[-1]:.0f} s; "
                      f"{left} left, {hours:.1f} h for one process", flush=True)  # fmt: skip
            if computed == len(took):
                time.sleep(WAIT)
        self._keep()
        return [json.loads(path.read_bytes()) for path in tasks]

    def nets(self, nets: Sequence[Net]) -> list[Json]:
        """Train nets and return their results."""
        return self.share({self.runs / net.name / "result.json": partial(self._train, net) for net in nets})

    def _train(self, net: Net) -> Json:
        """Train one net, or resume it. Figures of a diverged net are those of guessing."""
        folder = self.runs / net.name
        if not (started := folder / "started.json").exists():
            now = datetime.now(UTC).isoformat(timespec="seconds")
            write_atomically(started, json.dumps({**self.rules, "started": now}, indent=1).encode())
        data = self.data if net.final else self.search_data
        arm = rows.ARMS[net.arm]
        if arm.net == rows.TWO_LAYERS:
            return fisher.measure(data, arm.changes["activation"], net.rate, net.seed)
        execution = Execution(device="cpu", workers=0)
        recipe = arm.recipe(net.rate, net.seed)
        try:
            errors = train(recipe, data, folder / "net", execution=execution).errors
            top1_error, loss = errors.top1_error, errors.val_loss
        except DivergenceError:
            top1_error, loss = rows.GUESSING, None
        log = folder / "net" / METRICS_FILE  # missing if the training diverged before its first line
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        curve = [(line["step"], line["loss"]) for line in lines if "loss" in line]
        early = [value for step, value in curve if step <= recipe.total_steps / 4]
        slopes = {
            entry["layer"]: entry["mean"]
            for entry in summarize_slopes(read_checkpoint(folder / "net" / LAST_FILE).tensors)
        }
        return {
            "top1_error": top1_error,
            "loss": loss,
            "figures": {
                "center": top1_error,
                "early loss": float(np.mean(early)) if early and loss is not None else math.log(10),
                **slope_figures(slopes),
            },
            "curve": [(step, round(loss, 4)) for step, loss in curve],
            "slopes": slopes,
        }

    def errors(self, nets: Sequence[Net], protocol: str) -> list[float]:
        """Return the top-1 errors in percent of trained nets: on val/, or of the search's nets on the held-out part."""
        tasks = {self.runs / net.name / f"{protocol}.json": partial(self._validate, net, protocol) for net in nets}
        return [found["top1_error"] for found in self.share(tasks)]

    def _validate(self, net: Net, protocol: str) -> Json:
        if json.loads((self.runs / net.name / "result.json").read_bytes())["loss"] is None:
            return {"top1_error": rows.GUESSING}
        return {"top1_error": top1_error(self._run(net, protocol))}

    def _run(self, net: Net, protocol: str) -> Run:
        """Return a run of a net. A net whose weights are on another machine is trained again."""
        folder = self.runs / net.name
        if not (model := folder / "model.onnx").exists():
            if self._train(net)["figures"] != json.loads((folder / "result.json").read_bytes())["figures"]:
                raise SystemExit(
                    f"{net.name}: trained again on this machine, it has another result than in {self.kept}. "
                    "Delete its line there and its folder in --runs, then repeat the command"
                )
            export_checkpoint(folder / "net" / LAST_FILE, model)
        session = open_session(model, "cpu", threads=1)
        dataset = open_from_spec(DatasetSpec(self.data if net.final else self.search_data), session.contract.classes)
        info = build_run_info(
            session, model.name, describe_dataset(dataset), build_protocol(protocol, session.contract)
        )
        return validate([session], dataset, info, folder / protocol, threads=1)

    def search(self, arms: Sequence[str]) -> dict[str, Json]:
        """Return for each arm the best rate on the held-out part, its loss there, and the errors of all rates tried.

        The grid of an arm grows by a factor at its better end, until the best rate is inside it or at a limit.
        """
        found: dict[str, Json] = {}
        grids = {arm: list(rows.RATES) for arm in arms}
        while open_arms := [arm for arm in arms if arm not in found]:
            self.nets([net for arm in open_arms for rate in grids[arm] for net in search_nets(arm, rate)])
            for arm in open_arms:
                grid = sorted(grids[arm])
                scores = {rate: held_out_score(self.nets(search_nets(arm, rate))) for rate in grid}
                best = min(grid, key=lambda rate: scores[rate])
                beyond = best / rows.RATE_FACTOR if best == grid[0] else best * rows.RATE_FACTOR
                if best in grid[1:-1] or not rows.RATE_LIMITS[0] <= beyond <= rows.RATE_LIMITS[1]:
                    tried = {rate: error for rate, (error, _) in scores.items()}
                    at_limit = best not in grid[1:-1]
                    found[arm] = {"rate": best, "loss": scores[best][1], "at_limit": at_limit, "tried": tried}
                grids[arm] = [*grid, beyond]
        return {arm: found[arm] for arm in arms}

    def best_scale(self, arm: str, rate: float, kind: str) -> int:
        """Return the scale at which the search's nets have the lowest mean error; the smallest of equals."""
        return min(
            rows.SCALES, key=lambda scale: float(np.mean(self.errors(search_nets(arm, rate), f"{kind}-{scale}")))
        )

    def by_seed(self, figure: Figure, searched: Mapping[str, Json], seeds: Sequence[int]) -> list[float]:
        """Return a figure for each seed."""
        arm, name = figure
        if arm == BEST_MEMBER:
            arm = min(MEMBERS, key=lambda member: (min(searched[member]["tried"].values()), searched[member]["loss"]))
        if arm == ENSEMBLE:
            members = [[Net(member, searched[member]["rate"], seed, True) for member in MEMBERS] for seed in seeds]
            self.errors([net for nets in members for net in nets], name)
            tasks = {
                self.runs / ENSEMBLE / str(seed) / f"{name}.json": partial(self._ensemble, nets, seed, name)
                for seed, nets in zip(seeds, members, strict=True)
            }
            return [found["top1_error"] for found in self.share(tasks)]
        rate = searched[arm]["rate"]
        nets = [Net(arm, rate, seed, True) for seed in seeds]
        results = self.nets(nets)
        if all(name in result["figures"] for result in results):
            return [result["figures"][name] for result in results]
        if name.startswith(rows.BEST):
            kind = name.removeprefix(rows.BEST)
            name = f"{kind}-{self.best_scale(arm, rate, kind)}"
        return self.errors(nets, name)

    def _ensemble(self, nets: Sequence[Net], seed: int, protocol: str) -> Json:
        for net in nets:
            self._run(net, protocol)
        runs = [self.runs / net.name / protocol for net in nets]
        return {"top1_error": top1_error(ensemble(runs, self.runs / ENSEMBLE / str(seed) / protocol).run)}


def search_nets(arm: str, rate: float) -> list[Net]:
    """Return the search's nets of an arm at a rate."""
    return [Net(arm, rate, seed, final=False) for seed in rows.SEARCH_SEEDS]


def held_out_score(results: Sequence[Json]) -> tuple[float, float]:
    """Return mean error and mean loss on the held-out part: lower is better, and the loss decides between equals."""
    losses = [math.inf if result["loss"] is None else result["loss"] for result in results]
    return round(float(np.mean([result["top1_error"] for result in results])), 4), float(np.mean(losses))


def slope_figures(slopes: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of layer → mean slope; none without slopes."""
    if (trend := slope_trend(slopes)) is None:
        return {}
    return {
        "slope of conv1": trend.first,
        "slope above conv1": trend.others,
        "rank correlation of slopes with depth": trend.rank_correlation or 0.0,  # None: alike at every depth
        "mean size of slopes": float(np.mean(np.abs(list(slopes.values())))),
    }


def top1_error(run: Run) -> float:
    """Return the top-1 error in percent of the images that were not refused."""
    return round(100 * float(np.mean([line.rank > 1 for line in run.predictions if line.refused is None])), 4)


def split_train(archive: Path) -> bytes:
    """Return a tar with the images of train/: every fifth of a class, in the order of names, is in its val/."""
    target = io.BytesIO()
    seen: Counter[str] = Counter()
    with tarfile.open(archive) as source, tarfile.open(fileobj=target, mode="w") as output:
        places = {PurePosixPath(member.name): member for member in source if member.isfile()}
        for place in sorted(place for place in places if place.parts[-3:-2] == ("train",)):
            wnid = place.parent.name
            seen[wnid] += 1
            split = "train" if seen[wnid] % HELD_OUT else "val"
            entry = tarfile.TarInfo(f"{split}/{wnid}/{place.name}")
            entry.size = places[place].size
            output.addfile(entry, source.extractfile(places[place]))
    return target.getvalue()


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Create a folder and lock it if no other process has; yield whether it is locked by this one."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        own = False
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            own = True
        yield own
    finally:
        os.close(descriptor)


def read_rules() -> Json:
    """Return commit, date and content of the rules, and the commit and processor that trainings will use.

    Raises SystemExit if a file of this folder differs from its commit: the rules would not be older than the results.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    if changed := git("status", "--porcelain", "--", "benchmarks/claims"):
        raise SystemExit(f"benchmarks/claims differs from its commit, so its rules do not count. Commit:\n{changed}")
    last, date = git("log", "-1", "--format=%H %cI", "--", *RULES).split()
    content = git("ls-tree", "HEAD", *RULES)
    return {"rules": last, "rules_date": date, "content": content, "commit": commit(), "cpu": cpu()}


def require_older_rules(started: Sequence[Json], rules: Json) -> None:
    """Raise SystemExit unless every net began under the rules of today, after they were committed."""
    for net in started:
        committed, begun = (datetime.fromisoformat(net[key]) for key in ("rules_date", "started"))
        if net["content"] != rules["content"] or committed > begun:
            raise SystemExit(
                f"no verdict: a net began on {net['started']} under the rules of commit {net['rules'][:12]}, which are "
                "not those of today. Train in another --runs folder"
            )


def decide(row: Row, experiment: Experiment) -> Json:
    """Do all work of a row; return the searches, the figures by seed, and the claims with their verdicts."""
    searched = experiment.search(row.arms)
    finals = [Net(arm, searched[arm]["rate"], seed, True) for seed in row.seeds for arm in row.arms]
    results = experiment.nets(finals)
    figures: dict[Figure, list[float]] = {}
    claims = []
    for claim in row.claims:
        for figure in (claim.ours, claim.baseline):
            if figure is not None and figure not in figures:
                figures[figure] = experiment.by_seed(figure, searched, row.seeds)
        base = figures[claim.baseline] if claim.baseline else [0.0] * len(row.seeds)
        differences = [ours - other for ours, other in zip(figures[claim.ours], base, strict=True)]
        low, high = interval_of_mean(differences)
        claims.append({
            "text": claim.text, "ours": claim.ours, "baseline": claim.baseline, "paper": claim.paper,
            "by_seed": [round(value, 4) for value in differences], "mean": round(float(np.mean(differences)), 4),
            "interval": [round(low, 4), round(high, 4)], "verdict": verdict(differences, claim.sign),
        })  # fmt: skip
    nets = [net for arm in row.arms for rate in searched[arm]["tried"] for net in search_nets(arm, rate)] + finals
    started = [json.loads((experiment.runs / net.name / "started.json").read_bytes()) for net in nets]
    require_older_rules(started, read_rules())
    return {
        "seeds": list(row.seeds),
        "search": searched,
        "figures": [{"arm": arm, "figure": name, "by_seed": values} for (arm, name), values in figures.items()],
        "scales": {
            f"{arm}, {name}": experiment.best_scale(arm, searched[arm]["rate"], name.removeprefix(rows.BEST))
            for arm, name in figures
            if name.startswith(rows.BEST)
        },
        "claims": claims,
        "slopes": {net.name: result.get("slopes", {}) for net, result in zip(finals, results, strict=True)},
        "rules": sorted({(net["rules"], net["rules_date"]) for net in started}),
        "trained": sorted({(net["commit"], net["cpu"], net["started"][:10]) for net in started}),
    }  # fmt: skip


def table(title: str, result: Json) -> str:
    """Return the row as Markdown."""
    claims = [
        (claim["text"], f"{claim['mean']:+.3g} ({claim['interval'][0]:+.3g} to {claim['interval'][1]:+.3g})",
         claim["paper"], claim["verdict"])
        for claim in result["claims"]
    ]  # fmt: skip
    figures = [
        (f"{found['arm']}, {found['figure']}", *(f"{value:.4g}" for value in found["by_seed"]),
         f"{np.mean(found['by_seed']):.4g}")
        for found in result["figures"]
    ]  # fmt: skip
    search = [
        (arm, f"{found['rate']:g}{', at the limit of the grid' if found['at_limit'] else ''}",
         ", ".join(f"{float(rate):g}: {error:.2f}" for rate, error in found["tried"].items()))
        for arm, found in result["search"].items()
    ]  # fmt: skip
    scales = "".join(f"\nScale of {name}: {scale} pixels.\n" for name, scale in result["scales"].items())
    rules = ", ".join(f"{name[:12]} of {date}" for name, date in result["rules"])
    trained = "; ".join(f"{code}, {machine}, {date}" for code, machine, date in result["trained"])
    return (
        f"# {title}\n\n{result['date']}, {result['machine']['cpu']}: `{result['command']}`. Rules: commit {rules}. "
        f"Trained at: {trained}.\n\n"
        "Mean difference over seeds and 95 % interval of Student's t; errors in points, top-1:\n\n"
        f"{markdown(('claim', 'here', 'paper', 'verdict'), claims)}\n\nBy seed:\n\n"
        f"{markdown(('figure', *map(str, result['seeds']), 'mean'), figures)}\n\n"
        "Learning rates, and their mean top-1 errors on the held-out part of train/:\n\n"
        f"{markdown(('arm', 'chosen', 'tried'), search)}\n{scales}"
    )


def draw(row: Row, result: Json) -> bytes:
    """Return the SVG: for each claim the differences by seed, their mean and its interval, and its side of 0.

    Each seed draws the interval again, so its opacity adds up.
    """
    values = [
        {"claim": f"{claim['text']} ({claim['verdict']})", "value": value, "mean": claim["mean"],
         "low": claim["interval"][0], "high": claim["interval"][1], "zero": 0,
         "claimed": "triangle-right" if stated.sign > 0 else "triangle-left"}
        for claim, stated in zip(result["claims"], row.claims, strict=True) for value in claim["by_seed"]
    ]  # fmt: skip
    title = "difference of each seed, mean and 95 % interval; the triangle at 0 points to the claimed side"
    x = {"type": "quantitative", "title": None, "axis": {"domain": False}}
    layers = [
        {"mark": {"type": "rule", "color": "var(--muted)"}, "encoding": {"x": {"field": "zero", **x}}},
        {"mark": {"type": "point", "filled": True, "size": 70, "color": "var(--muted)", "opacity": 1},
         "encoding": {"x": {"field": "zero", **x}, "shape": {"field": "claimed", "type": "nominal", "scale": None}}},
        {"mark": {"type": "rule", "strokeWidth": 6, "opacity": 0.06, "color": "var(--accent)"},
         "encoding": {"x": {"field": "low", **x}, "x2": {"field": "high"}}},
        {"mark": {"type": "point", "filled": True, "size": 30, "color": "var(--accent)"},
         "encoding": {"x": {"field": "value", **x}}},
        {"mark": {"type": "tick", "thickness": 2, "size": 16, "color": "var(--ink)"},
         "encoding": {"x": {"field": "mean", **x}}},
    ]  # fmt: skip
    spec = chart_spec(values)
    header = {"labelAngle": 0, "labelAnchor": "start", "labelFontSize": 12, "labelOrient": "top"}
    facet = {"field": "claim", "type": "nominal", "sort": list(dict.fromkeys(value["claim"] for value in values)),
             "title": None, "header": header}  # fmt: skip
    return draw_svg({
        "config": spec["config"], "data": spec["data"], "padding": 12, "resolve": {"scale": {"x": "independent"}},
        "title": {"text": title, "anchor": "start", "offset": 16, "fontWeight": "normal", "fontSize": 11},
        "facet": {"row": facet}, "spec": {"width": 480, "height": 30, "layer": layers},
    })  # fmt: skip


def main() -> None:
    """Do a row and write its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=rows.ROWS, metavar="ROW", help=", ".join(rows.ROWS))
    parser.add_argument("--data", type=Path, required=True, help="imagenette-128.tar")
    parser.add_argument("--runs", type=Path, required=True, help="folder for all nets of all rows")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "claims", help="folder of ROW.json, .md, .svg and nets.jsonl"
    )
    options = parser.parse_args()
    row = rows.ROWS[options.row]
    torch.set_num_threads(1)  # two processes with one thread each take less time than one with two
    try:
        result = decide(row, Experiment(options.data, options.runs, read_rules(), options.output / "nets.jsonl"))
    except Interrupted as interrupted:
        raise SystemExit(f"{interrupted}; the same command resumes") from interrupted
    packages = ("prelunet", "numpy", "onnxruntime", "pillow", "scipy", "torch")
    result = {**circumstances(__file__, options, packages), **result}
    text = table(row.title, result)
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    write_result(options.output / f"{options.row}.json", result, text)
    write_atomically(options.output / f"{options.row}.svg", draw(row, result))


if __name__ == "__main__":
    main()
