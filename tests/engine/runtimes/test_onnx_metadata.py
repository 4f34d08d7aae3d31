"""Metadata read without a runtime equals what the onnx package reads."""

from pathlib import Path

import onnx
import pytest

from prelunet.evaluator.contract import contract_from_metadata
from prelunet.evaluator.engine.runtimes.onnx_metadata import read_metadata
from prelunet.evaluator.errors import ContractError
from tests.conftest import ExportedNet
from tests.engine.contracts import build_contract


def test_the_metadata_of_an_exported_file_are_read_as_they_were_written(exported: dict[str, ExportedNet]) -> None:
    path = exported["demo-channel"].path
    found = read_metadata(path)
    assert found == {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert found["prelunet.precision"] == '"fp32"'


def test_long_and_empty_values_are_read_wherever_they_stand_in_the_file(tmp_path: Path) -> None:
    properties = {"a": "", "": "b", "długi": "ż" * 70_000, "last": "1"}
    metadata, rest = onnx.ModelProto(), onnx.ModelProto(ir_version=300, producer_name="x" * 1000)
    onnx.helper.set_model_props(metadata, properties)
    rest.graph.initializer.add(raw_data=bytes(range(256)) * 500)
    path = tmp_path / "model.onnx"
    for order in ((metadata, rest), (rest, metadata)):
        path.write_bytes(b"".join(part.SerializeToString() for part in order))
        assert read_metadata(path) == properties


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no model", id="text"),
        pytest.param(b"\x72\x7f", id="a length beyond the end"),
        pytest.param(b"\x72", id="no length"),
        pytest.param(b"\x08\xff", id="a number without an end"),
        pytest.param(b"\x08" + b"\xff" * 11, id="a number that is too long"),
        pytest.param(b"\x73\x00", id="a group"),
        pytest.param(bytes(100) + b"\x72\x06\x0a\x01k\x12\x01v", id="zeros"),
    ],
)
def test_of_what_is_no_model_nothing_is_read(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    assert read_metadata(tmp_path / "x") == {}


def test_after_a_flipped_bit_the_contract_is_refused_or_still_one(tmp_path: Path) -> None:
    model = onnx.ModelProto(ir_version=8)
    onnx.helper.set_model_props(model, build_contract("demo", classes=3).to_metadata())
    data = bytearray(model.SerializeToString())
    unreadable = 0
    for place in range(0, len(data), 3):
        data[place] ^= (bit := 1 << place % 8)
        (tmp_path / "x").write_bytes(data)
        data[place] ^= bit
        try:
            contract_from_metadata(read_metadata(tmp_path / "x"), "x")
        except ContractError as error:
            unreadable += "not UTF-8" in str(error)
    assert unreadable > 50


def test_fields_of_every_kind_are_passed_over(tmp_path: Path) -> None:
    kinds = b"\x09" + bytes(8) + b"\x0d" + bytes(4) + b"\x08\x96\x01" + b"\x3a\x03abc"  # 64, 32 bits, number, bytes
    (tmp_path / "x").write_bytes(kinds + b"\x72\x06\x0a\x01k\x12\x01v")
    assert read_metadata(tmp_path / "x") == {"k": "v"}
