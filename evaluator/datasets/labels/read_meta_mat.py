"""Read `synsets` of ILSVRC's meta.mat in a separate process: a single damaged bit can crash scipy's reader.

`read_synsets` runs this file as a program, which imports nothing from prelunet.
"""

import io
import json
import subprocess
import sys
from typing import Any

MAX_META_MAT_BYTES = 16 * 1024**2  # bytes; ILSVRC2012's file is smaller than 1 MB
_TIMEOUT = 60.0  # seconds; reading takes less than one


def read_synsets(data: bytes) -> list[tuple[float, str, float]]:
    """Return ILSVRC2012_ID, WNID and num_children of each row. Raises ValueError with the reason on failure."""
    command = [sys.executable, "-P", __file__]  # -P: modules in this folder must not shadow Python's
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=_TIMEOUT, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"not read within {_TIMEOUT:.0f} seconds") from error
    if done.returncode < 0:
        raise ValueError("the reader crashed; the file is damaged")
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ValueError(last or "the reader failed")
    return [(float(number), str(wnid), float(children)) for number, wnid, children in json.loads(done.stdout)]


def _rows(data: bytes) -> list[tuple[float, str, float]]:
    import numpy as np
    from scipy.io import loadmat

    opened: Any = io.BytesIO(data)  # Any: the stubs omit that an open file is accepted
    rows = np.atleast_1d(loadmat(opened, squeeze_me=True, variable_names=["synsets"])["synsets"])
    return [(float(row["ILSVRC2012_ID"]), str(row["WNID"]), float(row["num_children"])) for row in rows]


if __name__ == "__main__":
    json.dump(_rows(sys.stdin.buffer.read()), sys.stdout)
