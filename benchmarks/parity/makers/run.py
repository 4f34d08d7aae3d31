"""Write the nets of one family of makers, and what their own pipelines answer to the test images.

    python -m benchmarks.parity.makers.run FAMILY IMAGES FOLDER [--only WORD]

Runs in the makers' environment. Families run one by one in processes of their own: TensorFlow and torch do not share
one. In FOLDER each net gets a folder with net.json, scores.npy and pixels.npy; versions.json names the packages.
"""

import argparse
import importlib
import importlib.metadata
import json
import re
import sys
import traceback
from pathlib import Path

from benchmarks.parity.makers.net import record

FAMILIES = (
    "packages",
    "torchvision_nets",
    "timm_nets",
    "transformers_nets",
    "ultralytics_nets",
    "keras_nets",
    "hf_loop",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("images", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="only nets with this word in their names")
    options = parser.parse_args()
    images = [options.images / name for name in json.loads((options.images / "order.json").read_text(encoding="utf-8"))]
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for net in importlib.import_module(f"benchmarks.parity.makers.{options.family}").nets(options.folder, images):
        if options.only not in net.name:
            continue
        folder = options.folder / re.sub(r"[^a-z0-9]+", "-", net.name.lower())
        folder.mkdir(exist_ok=True)
        try:
            record(net, images, folder)
        except Exception:
            failed += 1
            print(f"{net.name}: the maker's pipeline failed\n{traceback.format_exc()}", file=sys.stderr)
    versions = {found.name: found.version for found in importlib.metadata.distributions()}
    (options.folder / "versions.json").write_text(json.dumps(versions, indent=1), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
