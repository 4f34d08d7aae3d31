"""`prelunet classify FOLDER --csv FILE --jsonl FILE`: the answers of `classify` for every image, resumable."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from prelunet.evaluator.cli import run
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import Interrupted, RunFolderError
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.validation.unlabelled import write_classes
from tests.conftest import ExportedNet
from tests.helpers.fakes import FakeSession
from tests.helpers.tiny_datasets import DATA, write_folder
from tests.validation.shared_data import CLASSES, write_images


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_one_file_for_both_outputs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["--csv", str(tmp_path / "out"), "--jsonl", str(tmp_path / "x" / ".." / "out")]
    assert run(["classify", str(tmp_path), "--model", "m.onnx", *outputs]) == 2
    assert f"--csv and --jsonl both name {tmp_path / 'out'}. Name two files" in capsys.readouterr().err


def test_each_row_has_the_classes_that_classify_gives_the_image(
    exported: dict[str, ExportedNet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        f"{'some, more' if index % 3 else 'others'}/{name}": data for index, (name, data) in enumerate(DATA.items())
    }
    folder = write_folder(tmp_path / "photos", files)
    model = ["--model", str(exported["demo-image"].path), "--device", "cpu", "--protocol", "dense-30", "--top", "3"]
    outputs = ["--csv", str(tmp_path / "out.csv"), "--jsonl", str(tmp_path / "out.jsonl")]
    assert run(["classify", str(folder), *model, *outputs]) == 0
    assert "1 of them refused" in capsys.readouterr().out
    assert run(["classify", str(folder), *model, *outputs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"images": len(DATA), "evaluated": len(DATA) - 1, "refused": 1}
    rows = rows_of(tmp_path / "out.csv")
    assert [row["file"] for row in rows] == sorted(row["file"] for row in rows)
    assert {row["file"] for row in rows} == set(files)
    assert not (tmp_path / "out.csv.unfinished").exists()
    lines = list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))
    for row, line in zip(rows, lines, strict=True):
        assert line["file"] == row["file"]
        assert line.get("refused", "") == row["refused"]
        found = [cell for entry in line.get("predictions", []) for cell in map(str, entry.values())]
        assert found == [cell for column, cell in row.items() if column[-1].isdigit() and cell]
    for row in rows:
        code = run(["classify", str(folder / row["file"]), *model, "--json"])
        printed = capsys.readouterr()
        if code:
            assert row["refused"]
            assert row["refused"] in printed.err
            assert not row["wnid_1"]
            continue
        for place, found in enumerate(json.loads(printed.out)["predictions"], start=1):
            assert (row[f"wnid_{place}"], row[f"name_{place}"]) == (found["wnid"], found["name"])
            # Other images of a batch may change the last bit of a score.
            assert float(row[f"score_{place}"]) == pytest.approx(found["score"], abs=1e-6)


class InterruptedSession(FakeSession):
    """A session during whose second batch Ctrl-C is pressed."""

    def compute(self, staged: Any) -> Outputs:
        if self.calls:
            raise KeyboardInterrupt
        return super().compute(staged)


def test_after_ctrl_c_the_same_call_computes_only_the_rest(tmp_path: Path) -> None:
    write_images(tmp_path / "photos", CLASSES, 150)

    def write(session: FakeSession, name: str) -> tuple[int, int]:
        protocol = build_protocol("center", session.contract)
        return write_classes(
            session, Path("m.onnx"), tmp_path / "photos", protocol, {"csv": tmp_path / name}, report=lambda _: None
        )  # type: ignore[arg-type]

    assert write(FakeSession(), "undisturbed.csv") == (150, 0)
    with pytest.raises(Interrupted, match=r"out\.csv\.unfinished: interrupted; 64 of 150"):
        write(InterruptedSession(), "out.csv")
    assert not (tmp_path / "out.csv").exists()
    with pytest.raises(RunFolderError, match=r"(?s)contains another run.* For `classify`, delete .*unfinished"):
        write(FakeSession(seed=5), "out.csv")
    session = FakeSession()
    assert write(session, "out.csv") == (150, 0)
    assert sum(call[0] for call in session.calls) == 150 - 64
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "undisturbed.csv").read_bytes()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--csv", "out.csv", "--top", "6"], "--top 6: a file of all images has up to 5 classes"),
        (["--csv", "out.csv", "--heatmap", "maps.png"], "leave out --server and --heatmap"),
        (["--csv", "gone/out.csv"], "gone does not exist"),
        ([], "--csv FILE.csv"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_remedy_and_nothing_is_written(
    exported: dict[str, ExportedNet],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "photos", dict(DATA))
    assert run(["classify", "photos", "--model", str(exported["demo-image"].path), *options]) != 0
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
