"""Parquet files as Hugging Face's datasets write them, written without the code that reads them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def images_of(data: Sequence[bytes | None]) -> "pa.Array":
    """Return a column of images; all have the same path, which is nothing that exists."""
    return pa.array([{"bytes": each, "path": "../nowhere/same.jpg"} for each in data], IMAGE)


def with_class_labels(table: "pa.Table", names: Mapping[str, Sequence[str]]) -> "pa.Table":
    """Return the table with Hugging Face's metadata. names: column → names of its ClassLabel."""
    features: dict[str, Any] = {name: {"dtype": "string", "_type": "Value"} for name in table.column_names}
    features |= {column: {"names": list(each), "_type": "ClassLabel"} for column, each in names.items()}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def write_shards(
    folder: Path,
    images: Sequence[bytes],
    labels: Sequence[Any],
    names: Sequence[str] = (),
    *,
    split: str = "validation",
) -> Path:
    """Write images into two files with row groups of three rows. names: of the ClassLabel, () for none."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": images_of(images), "label": labels})
    if names:
        table = with_class_labels(table, {"label": names})
    middle = len(images) // 2
    for number, part in enumerate((table.slice(0, middle), table.slice(middle))):
        pq.write_table(part, folder / f"{split}-{number:05}-of-00002.parquet", row_group_size=3)
    return folder
