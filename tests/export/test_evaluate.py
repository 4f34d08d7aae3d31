"""`prelunet evaluate` and `prelunet.load` take a net of any origin, as `adopt`, `validate` and `report` do in turn."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import numpy_helper

import prelunet
from prelunet.evaluator.cli import run
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import MissingExtra, UsageError
from prelunet.evaluator.validation.run import read_run
from tests.export.foreign.foreign_nets import CLASSES, net, photo, write_classes
from tests.helpers.tiny_datasets import write_folder

IMAGES = 70  # more than the 64 of a chunk, so that an interrupted run keeps some
STATED = ["--preset", "timm-inception", "--classes", "classes.txt"]
RUN_FILES = ("predictions.jsonl", "scores.f32.npy")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a net, its classes and labeled images into the current folder."""
    net(tmp_path)
    write_classes(tmp_path)
    images = {
        f"n{number * 3 % CLASSES:08}/{number}.png": photo(41 + number % 5, 45 + number % 3 * 9, "PNG", seed=number)
        for number in range(IMAGES)
    }
    write_folder(tmp_path / "data", images)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> Mapping[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_command_gives_the_errors_of_adopt_validate_and_report(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", "net.onnx", *STATED, "-o", "adopted.onnx"]) == 0
    capsys.readouterr()
    options = ["--limit", "67", "--protocol", "ten-crop", "--averaging", "logit"]
    assert run(["validate", "adopted.onnx", "data", *options, "-o", "three"]) == 0
    result = capsys.readouterr().out
    assert run(["report", "three"]) == 0
    capsys.readouterr()
    assert run(["evaluate", "net.onnx", "data", *STATED, *options, "-o", "one"]) == 0
    assert capsys.readouterr().out == f"{result}one/report/report.html\n"
    for name in RUN_FILES:
        assert (here / "one" / name).read_bytes() == (here / "three" / name).read_bytes()
    of_one, of_three = (json.loads((here / name / "report" / "report.json").read_text()) for name in ("one", "three"))
    assert of_one["classes"] == of_three["classes"]
    assert 0 < of_one["top5_error"] < of_one["top1_error"] < 100, "a net without errors shows nothing"


def test_a_repeated_command_adopts_and_computes_nothing_and_changes_no_byte(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["evaluate", "net.onnx", "data", *STATED]) == 0
    first, written = capsys.readouterr(), contents(here)
    assert first.out.splitlines()[-1] in written
    monkeypatch.setattr("prelunet.export.foreign.adopt.adopt", None)
    assert run(["evaluate", "net.onnx", "data", *STATED]) == 0
    second = capsys.readouterr()
    assert second.out == first.out
    assert "net.onnx: already adopted" in second.err
    assert "already finished" in second.err
    assert contents(here) == written


def test_another_net_of_the_same_name_or_other_options_are_another_run(here: Path) -> None:
    assert run(["evaluate", "net.onnx", "data", *STATED, "--limit", "9"]) == 0
    assert run(["evaluate", "net.onnx", "data", *STATED, "--limit", "9", "--range", "255", "--mean", "99"]) == 0
    net(here, input_name="y")
    assert run(["evaluate", "net.onnx", "data", *STATED, "--limit", "9"]) == 0
    runs = [read_run(path.parent) for path in here.glob("runs/*/run.json")]
    assert len({each.info.model["sha256"] for each in runs}) == 3
    assert {path.stem for path in here.glob("runs/*.onnx")} == {Path(each.info.model["file"]).stem for each in runs}


def test_only_some_classes_of_the_net_are_evaluated_beside_folders_of_others(here: Path) -> None:
    write_folder(here / "data", {"strange/a.png": photo(41, 45, "PNG")})
    assert run(["evaluate", "net.onnx", "data", *STATED]) == 2
    assert (
        run(["evaluate", "net.onnx", "data", *STATED, "--only-classes", "n00000001,n00000002", "-o", "runs/two"]) == 0
    )
    assert {each.label for each in read_run(here / "runs/two").predictions} == {1, 2}


def test_other_weights_in_a_file_of_their_own_are_another_run(here: Path) -> None:
    for factor in (1, 2):
        model = onnx.load("net.onnx")
        weights = model.graph.initializer[0]
        weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * factor, weights.name))
        Path("weights").unlink(missing_ok=True)
        onnx.save(model, "large.onnx", save_as_external_data=True, location="weights", size_threshold=0)
        assert run(["evaluate", "large.onnx", "data", *STATED, "--limit", "9"]) == 0
    assert len(list(here.glob("runs/large-*.onnx"))) == 2, "the bytes of large.onnx are the same"


def test_an_interrupted_run_is_resumed_by_the_same_command(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["evaluate", "net.onnx", "data", *STATED, "-o", "runs/resumed", "--protocol", "center"]
    compute, batches, last = Session.compute, 0, 0

    def interrupted(session: Session, *arguments: Any, **others: Any) -> Any:
        nonlocal batches
        batches += 1
        if batches == last:
            raise KeyboardInterrupt
        return compute(session, *arguments, **others)

    assert run([*command, "-o", "runs/whole"]) == 0
    with monkeypatch.context() as patched:
        patched.setattr(Session, "compute", interrupted)
        assert run([*command, "-o", "runs/whole", "--fresh"]) == 0
        last, batches = batches, 0
        assert run(command) == 4
    capsys.readouterr()
    assert run(command) == 0
    assert "64 of 70" in capsys.readouterr().err
    for name in RUN_FILES:
        assert (here / "runs/resumed" / name).read_bytes() == (here / "runs/whole" / name).read_bytes()
    assert run([*command, "--fresh"]) == 0
    assert "new" in capsys.readouterr().err


def test_a_model_file_is_evaluated_as_it_is_and_takes_no_options_of_adopt(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", "net.onnx", *STATED, "-o", "mine.onnx"]) == 0
    capsys.readouterr()
    assert run(["evaluate", "mine.onnx", "data", "--only-classes", "n00000001,n00000002"]) == 0
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("mine-data-center-")
    assert capsys.readouterr().out.endswith(f"\n{folder.relative_to(here)}/report/report.html\n")
    assert len(read_run(folder).predictions) == 20
    assert run(["evaluate", "mine.onnx", "data", "--preset", "timm"]) == 2
    assert "mine.onnx: a model file, which states its classes and preprocessing" in capsys.readouterr().err


@pytest.mark.parametrize("stated", [[], ["--classes", "classes.txt"]])
def test_a_net_of_unknown_preprocessing_is_refused_with_the_two_ways_to_state_it(
    stated: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", "net.onnx", "data", *stated]) == 2
    told = capsys.readouterr().err
    assert "--preset" in told
    assert "--find-input" in told
    assert ("--classes" in told) == (not stated)
    assert not list(here.glob("runs/*"))


def test_what_lies_beside_the_net_needs_no_options(here: Path) -> None:
    names = [f"n{index:08}" for index in range(CLASSES)]
    (here / "class_indices.json").write_text(json.dumps({str(index): name for index, name in enumerate(names)}))
    processor = {"size": {"height": 40, "width": 40}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (here / "preprocessor_config.json").write_text(json.dumps(processor))
    assert run(["evaluate", "net.onnx", "data", "--limit", "9"]) == 0
    assert prelunet.load(here).classes[2].name == "n00000002"


def test_images_that_do_not_fit_are_refused_before_the_net_is_adopted(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prelunet.export.foreign.adopt.adopt", None)
    assert run(["evaluate", "net.onnx", "missing", *STATED]) == 2
    assert "missing" in capsys.readouterr().err
    monkeypatch.chdir(here / "data")
    assert run(["evaluate", "../net.onnx", ".", "--preset", "timm", "--classes", "../classes.txt"]) == 2
    assert "where it would be taken for a class" in capsys.readouterr().err
    assert not (here / "data" / "runs").exists()


def test_without_the_extra_report_the_last_line_names_the_json(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> bytes:
        raise MissingExtra("install the extra")

    monkeypatch.setattr("prelunet.evaluator.reporting.report_page.render_page", missing)
    assert run(["evaluate", "net.onnx", "data", *STATED, "-o", "run", "--limit", "9"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("\nrun/report/report.json\n")
    assert "note: install the extra" in printed.err


def test_a_loaded_net_classifies_as_its_adopted_file_and_leaves_no_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(here / "temporary"))
    assert run(["adopt", "net.onnx", *STATED, "--scale", "44", "-o", "adopted.onnx"]) == 0
    image = photo(61, 83, "PNG")
    loaded = prelunet.load("net.onnx", "cpu", preset="timm-inception", classes="classes.txt", scale=44)
    found, expected = loaded.classify(image).predictions, prelunet.load("adopted.onnx", "cpu").classify(image)
    assert found == expected.predictions
    assert loaded.path.exists()
    del loaded
    assert not list((here / "temporary").iterdir())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"preset": "pytorch"}, "options of the net: .*'pytorch'.*preset"),
    ({"presett": "timm"}, "presett: no such option. There are: antialias, channels, classes, crop, dense, find_images"),
    ({"mean": (0.5, 0.5)}, "length 3, got 2"),
    ({"classes": 3}, "classes"),
    ({}, "--preset.*--find-input"),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=str)
def test_wrong_options_of_a_net_are_refused_with_what_is_right(options: dict[str, Any], text: str, here: Path) -> None:
    with pytest.raises(UsageError, match=text):
        prelunet.load("net.onnx", **options)


def test_one_number_is_that_of_all_channels_as_on_the_command_line(here: Path) -> None:
    one = prelunet.load("net.onnx", mean=0.5, std=0.25, classes="classes.txt")
    three = prelunet.load("net.onnx", mean=(0.5,) * 3, std=(0.25,) * 3, classes="classes.txt")
    files = [onnx.load(each.path).metadata_props for each in (one, three)]
    adopted = [json.loads({prop.key: prop.value for prop in file}["prelunet.training"])["adopted"] for file in files]
    assert adopted[0] == adopted[1]
    assert adopted[0]["std"] == [0.25] * 3


def test_images_are_looked_at_before_the_preprocessing_is_looked_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["evaluate", "net.onnx", "missing", "--classes", "classes.txt", "--find-input", "data"]) == 2
    assert "missing" in capsys.readouterr().err
    assert not list(here.glob("*.find-input.jsonl"))


def test_a_net_to_adopt_without_onnx_is_refused_with_the_extra(here: Path) -> None:
    program = "import sys; sys.modules['onnx'] = None; import prelunet; prelunet.load('net.onnx', preset='timm')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "MissingExtra: this needs onnx, which is not installed" in done.stderr
