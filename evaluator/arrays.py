"""NumPy array types by element type, for annotations."""

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int8Array = npt.NDArray[np.int8]
UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
Float16Array = npt.NDArray[np.float16]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
FloatArray = npt.NDArray[np.floating]  # of any precision
