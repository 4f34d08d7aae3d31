"""`prelunet.load` and `Net.classify`: any kind of image, one or many, gives what `prelunet classify` prints."""

import base64
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import prelunet
from prelunet.evaluator.answer import Answer, Prediction, answer_from_json
from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.errors import ContractError, ImageError, PreluNetError, UsageError
from prelunet.evaluator.python.net import Net
from tests.conftest import ExportedNet
from tests.helpers.discriminating_nets import noise
from tests.helpers.fakes import FakeSession, fake_contract

PIXELS = noise(40, 57, seed=1)


@pytest.fixture(scope="module")
def net(exported: dict[str, ExportedNet]) -> Net:
    return prelunet.load(exported["demo-image"].path, "cpu")


@pytest.fixture
def photo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an image into the current folder and return its path."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PIXELS).save("photo.png")
    return Path("photo.png")


def printed(net: Net, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[Answer]:
    """Return the answers that `prelunet classify --json` prints for images."""
    capsys.readouterr()
    assert run(["classify", "--model", str(net.path), "--device", "cpu", "--json", *arguments]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [answer_from_json({key: value for key, value in line.items() if key != "file"}) for line in lines]


@pytest.mark.parametrize(
    "image",
    [
        *(Path, str, Path.read_bytes, lambda path: bytearray(path.read_bytes()), Image.open),
        lambda path: np.asarray(Image.open(path)),
    ],
    ids=["path", "text", "bytes", "bytearray", "Pillow image", "array"],
)
def test_an_image_of_any_kind_gives_what_the_command_prints(
    net: Net, photo: Path, image: Callable[[Path], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (default,) = printed(net, capsys, str(photo))
    (center,) = printed(net, capsys, str(photo), "--protocol", "center", "--top", "3")
    assert net.classify(image(photo)).answer == default
    found = net.classify(image(photo), protocol="center", top_k=3)
    assert found.answer == center != default
    assert found.predictions == center.predictions
    assert len(found.predictions) == 3


def test_exif_orientation_is_applied_on_request(net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exif, path = Image.Exif(), tmp_path / "turned.png"
    exif[274] = 6
    Image.fromarray(PIXELS).save(path, exif=exif)
    for image in (path, Image.open(path)):
        (turned,) = printed(net, capsys, str(path), "--exif")
        assert net.classify(image, apply_exif=True).answer == turned
        assert net.classify(image).answer != turned


def test_a_list_of_different_kinds_gives_a_list_of_what_the_command_prints(
    net: Net, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = [(28, 200), (90, 31)]  # the first one is capped
    for number, shape in enumerate(shapes):
        Image.fromarray(noise(*shape, seed=number)).save(f"{number}.png")
    expected = printed(net, capsys, str(photo), "0.png", "1.png")
    found = net.classify([photo, Path("0.png").read_bytes(), noise(*shapes[1], seed=1)])
    assert [each.answer.capped for each in found] == [False, True, False]
    for each, alone in zip(found, expected, strict=True):
        assert [p.name for p in each.predictions] == [p.name for p in alone.predictions]
        scores = [[p.score for p in predictions] for predictions in (each.predictions, alone.predictions)]
        np.testing.assert_allclose(*scores, atol=1e-6)  # in a batch sums run over other zeros


def test_images_of_a_long_list_share_batches_and_keep_their_order() -> None:
    session = FakeSession()
    net = Net(session, Path("m.onnx"))  # type: ignore[arg-type]
    images = [noise(30 + number % 7, 30 + number % 5, seed=number) for number in range(150)]
    alone = [net.classify(image, protocol="center") for image in images]
    assert len({each.predictions for each in alone}) == 150, "the images can be told apart"
    session.calls.clear()
    assert net.classify(tuple(images), protocol="center") == alone
    assert len(session.calls) <= 5, "150 crops of one size"
    assert net.classify([]) == []


@pytest.mark.parametrize("drawn_at_once", [True, False])
def test_the_heat_map_is_the_one_that_the_command_draws(net: Net, photo: Path, *, drawn_at_once: bool) -> None:
    assert run(["classify", str(photo), "--model", str(net.path), "--device", "cpu", "--heatmap", "map.png"]) == 0
    for image in (photo, PIXELS):
        heatmap = net.classify(image, heatmap=drawn_at_once).heatmap()
        np.testing.assert_array_equal(np.asarray(heatmap), np.asarray(Image.open("map.png")))
    (first, second) = net.classify([PIXELS[:30], photo], heatmap=drawn_at_once)
    np.testing.assert_array_equal(np.asarray(second.heatmap()), np.asarray(Image.open("map.png")))
    assert first.heatmap().size != second.heatmap().size


def test_a_heat_map_that_shows_no_place_causes_a_warning(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    net.classify(PIXELS, heatmap=True)
    assert caplog.text == ""
    net.classify(PIXELS, protocol="center", heatmap=True)
    assert "protocol center has one window per view" in caplog.text
    assert "use --protocol multi-scale" in caplog.text


def test_a_heat_map_of_a_file_that_is_gone_is_an_error_with_its_name(net: Net, photo: Path) -> None:
    found = net.classify([PIXELS, photo])[1]
    photo.unlink()
    with pytest.raises(ImageError, match=r"images\[1\]: photo.png: cannot be read .*Give the path"):
        found.heatmap()


BAD_IMAGES = [
    ("notes.txt", ImageError, "notes.txt: not a readable image.*Accepted formats: JPEG"),
    (b"notes", ImageError, "^(images.1.: )?not a readable image"),
    ("gone.jpg", ImageError, r"gone.jpg: cannot be read \(No such file or directory\)"),
    (PIXELS / 255, ImageError, r"type is float64, but it must be uint8.*\(array \* 255\)"),
    (PIXELS.astype(np.int64), ImageError, r"type is int64, but it must be uint8, 0 to 255; for values from 0 to 255"),
    (np.dstack([PIXELS, PIXELS[:, :, 0]]), ImageError, r"array\[\.\.\., :3\]"),
    (PIXELS.transpose(2, 0, 1), ImageError, r"array\.transpose\(1, 2, 0\)"),
    (PIXELS[None], ImageError, r"shape is \(1, 40, 57, 3\).*list\(array\)"),
    (Image.new("CMYK", (40, 50)), ImageError, r"image\.convert\('RGB'\)"),
    (None, UsageError, "an image cannot be of type NoneType; give a path"),
    (io.BytesIO(b"cat"), UsageError, "an image cannot be of type BytesIO; give a path"),
]


@pytest.mark.parametrize(("image", "error", "text"), BAD_IMAGES, ids=[text for _, _, text in BAD_IMAGES])
def test_what_is_no_image_is_refused_with_what_to_change_and_nothing_is_written(
    net: Net, photo: Path, image: Any, error: type[PreluNetError], text: str
) -> None:
    Path("notes.txt").write_text("notes")
    before = sorted(Path().iterdir())
    with pytest.raises(error, match=text) as alone:
        net.classify(image)
    with pytest.raises(error, match=text) as in_a_list:
        net.classify([photo, image])
    assert str(in_a_list.value) == f"images[1]: {alone.value}"
    assert sorted(Path().iterdir()) == before


def test_a_large_array_is_not_held_to_the_limit_of_files(net: Net) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3000, 3900, 3), np.uint8)  # 35 MB as a PNG: noise
    assert net.classify(pixels, protocol="center").predictions


def test_a_view_that_does_not_fit_into_this_machine_is_refused(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prelunet.evaluator.python.net.machine_memory", lambda: 2**20)
    with pytest.raises(UsageError, match=r"this machine has 1\.00M"):
        net.classify(PIXELS)


def test_wrong_arguments_are_refused_with_the_valid_ones(net: Net, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown protocol 'centre'\. Valid protocols: center"):
        net.classify(PIXELS, protocol="centre")
    with pytest.raises(UsageError, match="top_k is 24, but it must be 1 to 23"):
        net.classify(PIXELS, top_k=24)
    with pytest.raises(UsageError, match="top_k is '3', but it must be 1 to 23"):
        net.classify(PIXELS, top_k="3")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no device 'gpu'\. There are: auto, cpu, openvino, ncnn, cuda"):
        prelunet.load(net.path, "gpu")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="threads is -1: give a number of threads, or 0"):
        prelunet.load(net.path, threads=-1)
    with pytest.raises(UsageError, match=r"gone\.onnx: no such file"):
        prelunet.load(tmp_path / "gone.onnx")
    (tmp_path / "text.onnx").write_text("text")
    with pytest.raises(ContractError, match=r"text\.onnx"):
        prelunet.load(str(tmp_path / "text.onnx"), "cpu")


def test_a_net_shows_its_classes_and_what_runs_it(net: Net) -> None:
    assert [entry.name for entry in net.classes] == [f"thing {number}" for number in range(23)]
    assert repr(net) == "<Net demo.onnx: demo, 23 classes, on CPU, fp32>"
    card = net._repr_html_()
    assert all(text in card for text in ("demo.onnx", "23 classes", "thing 0, thing 1, ", "CPU, fp32", "multi-scale"))
    assert "thing 11 and 11 more" in card


def test_a_shell_completes_only_what_is_documented(net: Net) -> None:
    def completed(result: object) -> list[str]:
        return [name for name in dir(result) if not name.startswith("_")]

    assert completed(net) == ["classes", "classify", "evaluate", "path"]
    assert completed(net.classify(PIXELS)) == ["answer", "heatmap", "predictions"]
    assert completed(net.classify([PIXELS])) == completed([])


def test_answers_for_a_list_are_a_list_whose_card_shows_each_image_with_its_best_class(net: Net, photo: Path) -> None:
    gone = photo.with_name("<gone>.png")
    photo.rename(gone)
    images = [noise(40 + number, 50, seed=number) for number in range(25)]
    found = net.classify([gone, *images])
    assert isinstance(found, list)
    assert isinstance(found, prelunet.Answers)
    assert found == list(found)
    assert [each.predictions[0].name for each in found] == [
        net.classify(image).predictions[0].name for image in [gone, *images]
    ]
    assert repr(found).startswith(f"<Answers for 26 images: {found[0].predictions[0].name} ")
    assert repr(found).endswith(", …>")
    assert found._repr_html_().count("<img src='data:image/") == 24
    few = net.classify([gone, *images[:2]])
    gone.unlink()
    card = few._repr_html_()
    assert card.count("<img src='data:image/") == 2, "an image that is gone has no picture"
    for each in few:
        assert f">{each.predictions[0].name} {each.predictions[0].score:.1%}</div>" in card
    assert "&lt;gone&gt;.png" in card
    assert "<gone>" not in card
    assert net.classify([])._repr_html_().count("<img") == 0


def test_the_card_of_an_answer_shows_the_image_or_the_heat_maps_that_were_drawn(net: Net, photo: Path) -> None:
    plain, drawn = (net.classify(photo, heatmap=heatmap) for heatmap in (False, True))
    for found in (plain, drawn):
        assert found._repr_html_().count("<img src='data:image/") == 1
        assert all(entry.name in found._repr_html_() for entry in found.predictions)
    assert base64.b64encode(drawn.answer.heatmap).decode() in drawn._repr_html_()


def test_a_notebook_shows_an_error_as_one_line_and_keeps_its_cause_for_a_debugger(net: Net, photo: Path) -> None:
    photo.write_bytes(photo.read_bytes()[:100])
    with pytest.raises(prelunet.ImageError) as caught:
        net.classify(photo)
    (line,) = caught.value._render_traceback_()  # IPython calls it
    assert line.startswith("ImageError: photo.png: ")
    assert "\n" not in line
    assert caught.value.__cause__ is not None
    assert UsageError("\x1b[2J")._render_traceback_() == [r"UsageError: \x1b[2J"]


def answered(name: str) -> Answer:
    """Return an answer with one prediction of that name."""
    return Answer((Prediction(3, "n3", name, 0.4567),), {}, {}, (), capped=False, circumstances={})


def test_an_answer_is_displayed_as_a_table_in_which_names_are_only_text() -> None:
    html = answered("<script>alert('x')</script>")._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in html
    assert ">45.7%</td>" in html
    assert "width:45.7%" in html
    assert "color:" not in html.replace("background", ""), "text keeps the color of the page, light or dark"


def test_a_name_cannot_change_the_order_of_what_a_terminal_shows() -> None:
    classes = tuple(ClassEntry(f"n{number}", f"thing \u202e{number}") for number in range(6))
    found = Net(FakeSession(replace(fake_contract(), classes=classes)), Path("m")).classify(PIXELS, top_k=2)  # type: ignore[arg-type]
    first, second = found.predictions
    assert repr(found) == (
        f"<Classified: thing \\u202e{first.class_index} {first.score:.1%}, "
        f"thing \\u202e{second.class_index} {second.score:.1%}>"
    )
    assert found.predictions[0].name in found._repr_html_()


def test_the_first_answer_loads_nothing_that_only_reports_servers_and_verbs_need(net: Net, photo: Path) -> None:
    program = f"""if True:
        import sys
        import prelunet
        print(prelunet.load({str(net.path)!r}, "cpu").classify({str(photo)!r}).predictions[0].name)
        print(*sys.modules)
    """
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    name, loaded = result.stdout.splitlines()
    assert name == net.classify(photo).predictions[0].name
    unneeded = {"scipy", "jinja2", "vl_convert", "grpc", "typer", "rich", "pandas", "torch", "onnx"}
    assert not unneeded & set(loaded.split())
