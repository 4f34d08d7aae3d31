"""Read `synsets` of ILSVRC's meta.mat, in a process of its own: a single damaged bit makes scipy's reader crash.

`read_synsets` runs this very file as a program. The program imports nothing of ours, so that the path alone finds it.
"""

import io
import json
import subprocess
import sys
from typing import Any

MAX_META_MAT_BYTES = 16 * 1024**2  # bytes; that of ILSVRC2012 has less than one megabyte
_TIMEOUT = 60.0  # seconds; reading takes less than one


def read_synsets(data: bytes) -> list[tuple[float, str, float]]:
    """Return ILSVRC2012_ID, WNID and num_children of each row; ValueError saying why when that cannot be done."""
    command = [sys.executable, "-P", __file__]  # -P: modules beside this file are not to be taken for Python's
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=_TIMEOUT, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"still not read after {_TIMEOUT:.0f} seconds") from error
    if done.returncode < 0:
        raise ValueError("damaged so that its reader crashed")
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ValueError(last or "its reader failed")
    return [(float(number), str(wnid), float(children)) for number, wnid, children in json.loads(done.stdout)]


def _rows(data: bytes) -> list[tuple[float, str, float]]:
    import numpy as np
    from scipy.io import loadmat

    opened: Any = io.BytesIO(data)  # Any: the stubs leave out that an open file is taken too
    rows = np.atleast_1d(loadmat(opened, squeeze_me=True, variable_names=["synsets"])["synsets"])
    return [(float(row["ILSVRC2012_ID"]), str(row["WNID"]), float(row["num_children"])) for row in rows]


if __name__ == "__main__":
    json.dump(_rows(sys.stdin.buffer.read()), sys.stdout)
