"""Every code block of README and docs/ runs, page by page and from top to bottom, or says why a test cannot run it."""

import doctest
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from prelunet.evaluator.contract import ClassEntry
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.data.splits import embedded_dataset_path
from prelunet.training.net.checkpoints import write_checkpoint
from tests.conftest import Shared
from tests.docs.forked_program import forked_program
from tests.helpers.discriminating_nets import discriminating_checkpoint, noise
from tests.helpers.doc_pages import PAGES, Block, blocks, name_of

pytestmark = pytest.mark.processor

COMMANDS, FILES, SHOWN = {"sh", "python"}, {"toml", "json", "yaml"}, {"text"}
TRAIN, VAL = 6, 3  # images of each class
TIME_LIMIT = 240  # seconds for a block: trainings of minutes are marked as not run
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_saved_shown_or_says_why_not(page: Path) -> None:
    for block in blocks(page):
        known = block.language in COMMANDS | SHOWN or (block.language in FILES and (block.file or block.not_run))
        assert known, f"{name_of(page)}:{block.line}: {block.language!r} is neither run nor marked"
    assert page.read_text().count("\n```") == 2 * len(blocks(page)), "a fence that is indented or not closed"


@pytest.fixture(scope="module")
def files(shared: Shared) -> Path:
    """Return a folder with the files that the examples use."""
    return shared("examples", _write_files)


def _write_files(folder: Path) -> None:
    with zipfile.ZipFile(embedded_dataset_path()) as archive:
        members = sorted(archive.namelist())
        names = sorted({member.split("/")[1] for member in members})
        for split, count in (("train", TRAIN), ("val", VAL)):
            for name in names:
                archive.extractall(folder / "data", [m for m in members if m.startswith(f"{split}/{name}/")][:count])
    classes = tuple(ClassEntry(name, name.replace("-", " ")) for name in names)
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in names))
    for model, seed in (("model", 3), ("other", 4)):
        checkpoint = replace(discriminating_checkpoint("demo", classes=len(classes), seed=seed), classes=classes)
        write_checkpoint(folder / f"{model}.safetensors", checkpoint)
        export_checkpoint(folder / f"{model}.safetensors", folder / f"{model}.onnx")
    (folder / "model.safetensors").rename(folder / "net.safetensors")
    (folder / "other.safetensors").unlink()
    Image.fromarray(noise(90, 120, seed=2)).save(folder / "photo.jpg")
    _export_classifier(folder / "classifier.onnx", len(classes))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with forked_program(tmp_path_factory.mktemp("program")) as program:
        yield program


def _export_classifier(path: Path, classes: int) -> None:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Conv2d(3, 6, 5, 2), torch.nn.BatchNorm2d(6), torch.nn.ReLU()]
    layers += [torch.nn.Conv2d(6, 8, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(8, classes)).eval()
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(net, (torch.zeros(1, 3, 64, 64),), path, input_names=["x"], dynamo=False)


class Page:
    """A page that is worked through in a folder, with the server and the Python names of the blocks so far.

    program: `prelunet`, for commands and servers.
    """

    def __init__(self, page: Path, folder: Path, program: Path) -> None:
        self.page, self.folder = page, folder
        self.names: dict[str, Any] = {"__name__": "page"}
        self.ports = {port: _free_port() for port in ("50051", "8080", "9090")}
        self.server: subprocess.Popen[bytes] | None = None
        (folder / ".curlrc").write_text('fail\nsilent\nshow-error\nnoproxy = "*"\n')
        self.environment = {
            **os.environ, "PATH": PROGRAMS, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "CURL_HOME": str(folder)
        }  # fmt: skip
        self.forking = {**self.environment, "PATH": f"{program.parent}{os.pathsep}{PROGRAMS}"}

    def run(self) -> None:
        """Run all blocks, on a server of model `demo` if the page calls one before it starts one."""
        todo = [block for block in blocks(self.page) if block.not_run is None]
        first = next((block.text for block in todo if block.language in COMMANDS and self._calls(block)), "")
        if first and not re.search(r"^prelunet serve", first, re.MULTILINE):
            self._serve("prelunet serve --model demo=model.onnx --http-port 8080")
        for block in todo:
            where = f"{name_of(self.page)}:{block.line}"
            if block.file is not None:
                path = self.folder / block.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._with_ports(block.text))
            elif block.language == "sh":
                self._shell(block.text, where)
            elif block.language == "python":
                self._python(self._with_ports(block.text), where)

    def stop(self) -> None:
        """Stop the server, which has to end well."""
        if self.server is not None:
            server, self.server = self.server, None
            server.terminate()
            try:
                assert server.wait(60) == 0
            finally:
                server.kill()

    def _calls(self, block: Block) -> bool:
        return any(port in block.text for port in self.ports) or "prelunet serve" in block.text

    def _with_ports(self, text: str) -> str:
        return re.sub(rf"\b({'|'.join(self.ports)})\b", lambda found: self.ports[found[0]], text)

    def _shell(self, text: str, where: str) -> None:
        commands = re.split(r"^(prelunet serve\b(?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
        for command in commands:
            if command.startswith("prelunet serve"):
                self._serve(command)
                continue
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", self._with_ports(command)],
                cwd=self.folder, env=self.forking, capture_output=True, text=True, timeout=TIME_LIMIT, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"{where}: exit code {done.returncode}\n{done.stdout}{done.stderr}"

    def _serve(self, command: str) -> None:
        """Start a server as a page shows, on ports that are free here, and wait until it is ready."""
        self.stop()
        port = "" if re.search(r"--port\b", command) else " --port 50051"
        command = command.replace("prelunet serve", f"prelunet serve --lame-duck 0{port}", 1)
        log = self.folder / "server.log"
        with log.open("wb") as output:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {self._with_ports(command)}"],
                cwd=self.folder, env=self.forking, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        for _ in range(600):
            if re.search(r"^serving on", log.read_text(), re.MULTILINE):
                return
            assert self.server.poll() is None, log.read_text()
            time.sleep(0.1)
        raise AssertionError(log.read_text())

    def _python(self, text: str, where: str) -> None:
        if not text.lstrip().startswith(">>>"):
            exec(compile(text, where, "exec"), self.names)
            return
        test = doctest.DocTestParser().get_doctest(text, self.names, where, where, 0)
        report = io.StringIO()
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert not runner.run(test, out=report.write, clear_globs=False).failed, report.getvalue()
        self.names.update(test.globs)


@pytest.fixture
def page(
    request: pytest.FixtureRequest, files: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Page]:
    folder = tmp_path / "page"
    shutil.copytree(files, folder)
    torch.manual_seed(0)
    monkeypatch.chdir(folder)
    page = Page(request.param, folder, program)
    yield page
    page.stop()
    shutil.rmtree(folder)  # the nets that it wrote are large


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of, indirect=True)
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: Page) -> None:
    page.run()


def _free_port() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return str(listener.getsockname()[1])
