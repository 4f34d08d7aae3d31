"""Check without a GPU that the model files run wholly on CUDA: every node placed there, no copies in between.

    .venv/bin/python tools/placement/check.py --stubs FOLDER [--nets ACE] [--whole]

Runs in .venv, which can build models; each is loaded by place.py in .venv-gpu on the stand-ins in FOLDER. Before that,
two graphs with a known fault must fail, or the check could not tell. Exit 1 where anything is not as it should be.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx

from model_variants import build, variants, with_copies, without_kernel
from verdict import Verdict, judge

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIME_LIMIT = 300  # seconds for one file


class PlacementChecker:
    """Places files, one at a time, in a folder that holds no more than one."""

    def __init__(self, stubs: Path, folder: Path):
        self._folder = folder
        self._environment = os.environ | {"LD_LIBRARY_PATH": str(stubs.resolve()), "PYTHONPATH": str(ROOT / "src")}

    def of(self, build: Callable[[], onnx.ModelProto], *, run: bool) -> Verdict:
        """Build and write a model, load it on the stand-ins, and judge what became of it."""
        path, final = self._folder / "model.onnx", self._folder / "final.onnx"
        onnx.save(build(), path)
        final.unlink(missing_ok=True)
        command = [ROOT / ".venv-gpu/bin/python", HERE / "place.py", path, self._folder, *(["--run"] if run else [])]
        try:
            subprocess.run(command, check=True, env=self._environment, timeout=TIME_LIMIT)
        except subprocess.SubprocessError as error:  # it has said more on stderr
            return Verdict((f"not placed: {error}",))
        placed = json.loads((self._folder / "placed.json").read_text())
        graph = onnx.load(final, load_external_data=False).graph if final.exists() else onnx.GraphProto()
        return judge(placed, graph)


def check_controls(placement: PlacementChecker) -> bool:
    """Place the graphs with a known fault; return whether each was caught for its own fault."""
    controls = {
        "an op without a CUDA kernel": (without_kernel, "assigned to the default CPU EP"),
        "a number fetched from the GPU": (with_copies, "MemcpyToHost of"),
    }
    caught = True
    for name, (build_control, words) in controls.items():
        faults = placement.of(build_control, run=False).faults
        found = any(words in fault for fault in faults)
        print(f"control, {name}: {'caught' if found else f'NOT CAUGHT, but {faults}'}", flush=True)
        caught = caught and found
    return caught


def check_variants(placement: PlacementChecker, nets: str, *, whole: bool) -> list[str]:
    """Place every variant of the nets, print a row for each, and return those that failed."""
    print(f"{'':28} nodes  convs  transposes  kernels  uploads  seconds")
    failed = []
    for variant in variants(nets):
        start = time.monotonic()
        verdict = placement.of(partial(build, variant, whole=whole), run=True)
        counts = f"{verdict.nodes:5}  {verdict.convolutions:5}  {verdict.transposes:10}  {verdict.kernels:7}"
        print(f"{variant!s:28} {counts}  {verdict.uploads:7}  {time.monotonic() - start:7.1f}", flush=True)
        for fault in verdict.faults:
            print(f"  FAULT: {fault}", flush=True)
        failed += [str(variant)] if verdict.faults else []
    return failed


def main() -> int:
    """Check the controls, then every variant of every net."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stubs", type=Path, required=True, help="folder that build_stubs.py wrote")
    parser.add_argument("--nets", default="ACE", help="architectures (default: %(default)s)")
    parser.add_argument("--whole", action="store_true", help="with all neurons of fc1 and fc2: C takes 6 GB of memory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        placement = PlacementChecker(arguments.stubs, Path(folder))
        if not check_controls(placement):
            return 1
        failed = check_variants(placement, arguments.nets, whole=arguments.whole)
    if failed:
        print(f"not wholly on CUDA: {'; '.join(failed)}", file=sys.stderr)
        return 1
    print("every node of every file is on CUDA, without copies inside")
    return 0


if __name__ == "__main__":
    sys.exit(main())
