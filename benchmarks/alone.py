"""One competitor alone in a process: seconds until it is ready, and its peak of memory with the largest view.

    python benchmarks/alone.py FOLDER COMPETITOR THREADS HEIGHT WIDTH SCALE

prints one line of JSON. benchmarks/engine.py calls it; FOLDER is that of a `Case`.
"""

import json
import sys
import time
from pathlib import Path

BEGUN = time.perf_counter()  # before the imports, which are part of getting ready

from competitors import COMPETITORS, Case, NotAvailable  # noqa: E402
from evaluator.contract import golden_image  # noqa: E402
from evaluator.protocols import Protocol  # noqa: E402
from machine import memory_mb  # noqa: E402


def main() -> None:
    """Open the competitor, show it one image, and print what that took."""
    folder, name, threads, height, width, scale = sys.argv[1:]
    image = golden_image(int(height), int(width))
    protocol = Protocol("largest view", "dense", (int(scale),), mirror=True)
    try:
        opened = COMPETITORS[name].open(Case(Path(folder), int(threads)))
        ready = time.perf_counter() - BEGUN
        opened.answer(image, protocol)
    except NotAvailable as error:
        print(json.dumps({"not_available": str(error)}))
        return
    print(json.dumps({"load_seconds": round(ready, 2), "peak_memory_mb": memory_mb(peak=True)}))


if __name__ == "__main__":
    main()
