"""A model file and a server give the same answer."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.answer import answer_from_json, resolve_top_k
from prelunet.evaluator.cli import run
from prelunet.evaluator.engine.classify import build_answer, classify_images
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.protocols import build_protocol
from tests.conftest import ExportedNet
from tests.helpers.discriminating_nets import noise
from tests.helpers.fakes import FakeSession
from tests.serving.serving_harness import running_server


def test_classify_prints_the_same_bytes_through_a_server_as_with_the_model_file_and_its_timings(
    exported: dict[str, ExportedNet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = exported["demo-image"]
    pictures = []
    for index, (height, width) in enumerate([(40, 57), (90, 31), (28, 200)]):  # the last one is capped
        pictures.append(str(tmp_path / f"{index}.png"))
        Image.fromarray(noise(height, width, seed=index)).save(pictures[-1])
    for options in ([], ["--protocol", "center", "--top", "3"], ["--protocol", "dense-44"]):
        assert run(["classify", *pictures, "--model", str(net.path), "--device", "cpu", "--json", *options]) == 0
        from_file = capsys.readouterr().out
        with running_server(demo=net.session) as server:
            assert run(["classify", *pictures, "--server", server.address, "--json", *options]) == 0
        served = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(line.pop("timings")["batches"] > 0 for line in served), "a server adds timings"
        assert all(line["model"].pop("version") == 1 for line in served), "and the version"
        assert "".join(json.dumps(line) + "\n" for line in served) == from_file
        lines = [json.loads(line) for line in from_file.splitlines()]
        assert [line["capped"] for line in lines] == [False, False, True]
        assert [len(line["predictions"]) for line in lines] == [3 if "--top" in options else 5] * 3


def test_the_heat_maps_are_the_same_through_a_server_as_with_the_model_file(
    exported: dict[str, ExportedNet], tmp_path: Path
) -> None:
    net, picture = exported["demo-image"], tmp_path / "picture.png"
    Image.fromarray(noise(40, 57, seed=1)).save(picture)
    maps = [tmp_path / "by_file.png", tmp_path / "by_server.png"]
    assert run(["classify", str(picture), "--model", str(net.path), "--heatmap", str(maps[0])]) == 0
    with running_server(demo=net.session) as server:
        assert run(["classify", str(picture), "--server", server.address, "--heatmap", str(maps[1])]) == 0
    drawn = [np.asarray(Image.open(path)) for path in maps]
    assert drawn[0].shape[1] > 600
    np.testing.assert_array_equal(drawn[0], drawn[1])


def rotated_png() -> bytes:
    """Return a picture with EXIF orientation 6: to be rotated by 90 degrees."""
    image = Image.fromarray(noise(40, 90, seed=3))
    exif = Image.Exif()
    exif[274] = 6
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def test_exif_orientation_is_applied_only_on_request_by_model_file_and_server(
    exported: dict[str, ExportedNet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, picture, upright = exported["demo-image"], tmp_path / "rotated.png", tmp_path / "upright.png"
    picture.write_bytes(rotated_png())
    Image.fromarray(np.rot90(noise(40, 90, seed=3), k=-1).copy()).save(upright)

    def scores(file: Path, *options: str) -> list[float]:
        assert run(["classify", str(file), "--json", *options]) == 0
        return [p["score"] for p in json.loads(capsys.readouterr().out)["predictions"]]

    by_file = ["--model", str(net.path), "--device", "cpu"]
    turned = scores(upright, *by_file)
    assert scores(picture, *by_file) != turned
    assert scores(picture, *by_file, "--exif") == turned
    with running_server(demo=net.session) as server:
        assert scores(picture, "--server", server.address) != turned
        assert scores(picture, "--server", server.address, "--exif") == turned


def test_an_answer_survives_json() -> None:
    session = FakeSession()
    protocol = build_protocol("center", session.contract)
    (classified,) = classify_images(session, [noise(40, 57, seed=1)], protocol)
    answer = build_answer(session, "fake", protocol, classified, 4)
    assert answer_from_json(json.loads(json.dumps(answer.to_json()))) == answer
    assert len(answer.predictions) == 4


@pytest.mark.parametrize(("top", "number"), [(None, 5), (1, 1), (6, 6)])
def test_the_default_is_five_classes(top: int | None, number: int) -> None:
    assert resolve_top_k(top, 6) == number


@pytest.mark.parametrize("asked", [0, -1, 7])
def test_a_number_of_classes_that_the_model_does_not_have_is_refused(asked: int) -> None:
    with pytest.raises(UsageError, match=f"top_k is {asked}, but it must be 1 to 6"):
        resolve_top_k(asked, 6)
