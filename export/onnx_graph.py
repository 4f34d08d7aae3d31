"""A thin builder of ONNX graphs with named nodes; the same calls give the same bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

OPSET = 18  # the newest that all our runtimes support; later opsets add nothing that we need
IR_VERSION = 8  # matches opset 18

Array = npt.NDArray[Any]
_UP_TO_THE_END = np.iinfo(np.int64).max


class GraphBuilder:
    """Collects nodes and constants. Methods that add a node return the name of its output."""

    def __init__(self) -> None:
        self._nodes: dict[str, Any] = {}
        self._constants: dict[str, TensorProto] = {}

    def constant(self, name: str, value: Array) -> str:
        """Add an initializer and return its name, which must be new."""
        assert name not in self._constants, name
        self._constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def integers(self, *values: int) -> str:
        """Return the name of an int64 vector; equal vectors are stored once."""
        name = "int64_" + "_".join(str(v) if v >= 0 else f"m{-v}" for v in values)
        if name not in self._constants:
            self.constant(name, np.array(values, np.int64))
        return name

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add a node that is named after its output."""
        assert output not in self._nodes, output
        self._nodes[output] = helper.make_node(op, list(inputs), [output], name=output, **attributes)
        return output

    def has(self, output: str) -> bool:
        """Return whether the graph has a node with that output."""
        return output in self._nodes

    def slice(self, value: str, output: str, *, axis: int, start: int, end: int | None = None, step: int = 1) -> str:
        """Add a Slice along one axis. end: None for all that follow; negative counts from the end."""
        last = self.integers(_UP_TO_THE_END if end is None else end)
        inputs = [value, self.integers(start), last, self.integers(axis), self.integers(step)]
        return self.node("Slice", inputs, output)

    def window_slice(self, value: str, output: str, *, axes: tuple[int, int], starts: tuple[int, int],
                     trims: tuple[int, int]) -> str:  # fmt: skip
        """Add a Slice along two axes that drops the first `starts` and the last `trims` cells."""
        ends = self.integers(*(_UP_TO_THE_END if trim == 0 else -trim for trim in trims))
        return self.node("Slice", [value, self.integers(*starts), ends, self.integers(*axes)], output)

    def unsqueeze(self, value: str, output: str, *axes: int) -> str:
        """Add an Unsqueeze."""
        return self.node("Unsqueeze", [value, self.integers(*axes)], output)

    def model(
        self, inputs: Sequence[Any], outputs: Sequence[Any], metadata: dict[str, str], version: str
    ) -> ModelProto:
        """Return the finished model with its metadata."""
        graph = helper.make_graph(
            list(self._nodes.values()), "prelunet", list(inputs), list(outputs), list(self._constants.values())
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="prelunet",
            producer_version=version,
        )
        helper.set_model_props(model, metadata)
        return model
