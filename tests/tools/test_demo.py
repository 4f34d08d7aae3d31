"""tools/demo.sh, up to its first command, and with --live."""

import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "demo.sh"


@pytest.mark.parametrize(
    ("terminal", "no_color", "bold"),
    [(True, None, True), (True, "", True), (True, "1", False), (False, None, False)],  # empty: https://no-color.org
)
def test_headings_are_bold_only_on_a_terminal_without_no_color(
    tmp_path: Path, terminal: bool, no_color: str | None, bold: bool
) -> None:
    for split in ("train", "val"):
        (tmp_path / "photos" / split).mkdir(parents=True)
    program = tmp_path / "prelunet"
    program.write_text("#!/bin/sh\nexit 3\n")  # so that the demo stops after its first heading
    program.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({} if no_color is None else {"NO_COLOR": no_color})
    reader, writer = os.openpty() if terminal else os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as stream:
        with os.fdopen(writer, "wb") as stdout:
            done = subprocess.run([SCRIPT, "photos"], cwd=tmp_path, env=environment, stdout=stdout, check=False)
        output = ""
        with suppress(OSError):  # which is how a terminal ends
            while chunk := stream.read(1000):
                output += chunk.decode()
    assert done.returncode == 3
    assert "== 1. Train" in output
    assert ("\033[1m== 1. Train" in output) == bold
    assert ("\033" in output) == bold


def test_live_trains_and_exports_the_model_unless_it_exists_and_serves_it(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "photos" / split).mkdir(parents=True)
    program = tmp_path / "prelunet"
    program.write_text('#!/bin/sh\necho "$1 $2" >>"$0.log"\n[ "$1" != export ] || touch "$4"\n')
    program.chmod(0o755)
    environment, live = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, [SCRIPT, "--live", "photos"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment["HTTP_PORT"] = port = str(taken.getsockname()[1])
        refused = subprocess.run(live, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (refused.returncode, (tmp_path / "prelunet.log").exists()) == (2, False)  # before it trains for minutes
    assert f"port {port} is in use" in refused.stderr
    serving = "serve --model"
    for expected in (["train --recipe", "export demo/photos/train/last.safetensors", serving], [serving]):
        done = subprocess.run(live, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert f"http://127.0.0.1:{port}/" in done.stdout
        assert f"--http-port {port}" in done.stdout
        assert (tmp_path / "prelunet.log").read_text().splitlines() == expected
        (tmp_path / "prelunet.log").unlink()


def test_live_photos_adopts_the_published_net_unless_it_is_there_and_serves_it_with_the_photos(tmp_path: Path) -> None:
    for name in ("prelunet", "python"):
        program = tmp_path / name
        adopt = '[ "$1" != adopt ] || touch demo/lite0/lite0.onnx'
        program.write_text(f'#!/bin/sh\necho "{name} $1" >>commands\n{adopt}\n')
        program.chmod(0o755)
    script = SCRIPT.with_name("demo_photos.sh")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HTTP_PORT": "8123"}
    for expected in (["python tools/export_photo_net.py", "prelunet adopt", "prelunet serve"], ["prelunet serve"]):
        live = [script, "--live"]
        done = subprocess.run(live, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert (tmp_path / "commands").read_text().splitlines() == expected
        assert "--http-port 8123 --examples demo/lite0/photos" in done.stdout
        (tmp_path / "commands").unlink()
