"""Check without a GPU that model files run entirely on CUDA: every node is placed there, without copies in between.

    .venv/bin/python tools/placement/check.py --stubs FOLDER [--nets ACE] [--whole]

Runs in .venv, which can build models; place.py loads each in .venv-gpu with the CUDA stubs in FOLDER. First, two
graphs with known faults must fail, as proof that the check detects faults. Exits 1 if any check fails.
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

from model_variants import adopted_dense, build, variants, with_copies, without_kernel
from verdict import Verdict, judge

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIME_LIMIT = 300  # seconds per file


class PlacementChecker:
    """Places model files, one at a time, in a folder that holds only one."""

    def __init__(self, stubs: Path, folder: Path):
        self._folder = folder
        self._environment = os.environ | {"LD_LIBRARY_PATH": str(stubs.resolve()), "PYTHONPATH": str(ROOT / "src")}

    def place(self, build: Callable[[], onnx.ModelProto], *, run: bool) -> Verdict:
        """Build and write a model, load it with the stubs, and judge the result."""
        path, final = self._folder / "model.onnx", self._folder / "final.onnx"
        onnx.save(build(), path)
        final.unlink(missing_ok=True)
        command = [ROOT / ".venv-gpu/bin/python", HERE / "place.py", path, self._folder, *(["--run"] if run else [])]
        try:
            subprocess.run(command, check=True, env=self._environment, timeout=TIME_LIMIT)
        except subprocess.SubprocessError as error:  # details are on stderr
            return Verdict((f"not placed: {error}",))
        placed = json.loads((self._folder / "placed.json").read_text())
        graph = onnx.load(final, load_external_data=False).graph if final.exists() else onnx.GraphProto()
        return judge(placed, graph)


def check_controls(placement: PlacementChecker) -> bool:
    """Place the graphs with a known fault; return whether each fault was detected."""
    controls = {
        "an op without a CUDA kernel": (without_kernel, "assigned to the default CPU EP"),
        "a number fetched from the GPU": (with_copies, "MemcpyToHost of"),
    }
    detected = True
    for name, (build_control, words) in controls.items():
        faults = placement.place(build_control, run=False).faults
        found = any(words in fault for fault in faults)
        print(f"control, {name}: {'detected' if found else f'NOT DETECTED; found {faults}'}", flush=True)
        detected = detected and found
    return detected


def check_variants(placement: PlacementChecker, nets: str, *, whole: bool) -> list[str]:
    """Place every variant of the nets, and an adopted one, print a row for each, and return those that failed."""
    print(f"{'':28} nodes  convs  transposes  kernels  uploads  seconds")
    failed = []
    builders = {str(variant): partial(build, variant, whole=whole) for variant in variants(nets)}
    for variant, builder in {**builders, "adopted, dense": adopted_dense}.items():
        start = time.monotonic()
        verdict = placement.place(builder, run=True)
        counts = f"{verdict.nodes:5}  {verdict.convolutions:5}  {verdict.transposes:10}  {verdict.kernels:7}"
        print(f"{variant:28} {counts}  {verdict.uploads:7}  {time.monotonic() - start:7.1f}", flush=True)
        for fault in verdict.faults:
            print(f"  FAULT: {fault}", flush=True)
        failed += [variant] if verdict.faults else []
    return failed


def main() -> int:
    """Check the controls, then every variant of every net."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stubs", type=Path, required=True, help="folder written by build_stubs.py")
    parser.add_argument("--nets", default="ACE", help="architectures (default: %(default)s)")
    parser.add_argument("--whole", action="store_true", help="keep all neurons of fc1 and fc2; C takes 6 GB of memory")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        placement = PlacementChecker(arguments.stubs, Path(folder))
        if not check_controls(placement):
            return 1
        failed = check_variants(placement, arguments.nets, whole=arguments.whole)
    if failed:
        print(f"not entirely on CUDA: {'; '.join(failed)}", file=sys.stderr)
        return 1
    print("every node of every file is on CUDA, without copies inside")
    return 0


if __name__ == "__main__":
    sys.exit(main())
