"""The program `prelunet` for many calls: a process that has imported everything forks for each of them.

Imports take most of a call's time: torch's and scipy's more than a second, as does the charting library.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.doc_pages import ROOT

PROGRAM = """#!{python} -SE
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as call:
    call.connect({address!r})
    socket.send_fds(call, [json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
    process = int(call.recv(20))
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(process, number))
    sys.exit(call.recv(1)[0])
"""


IMPORTED = (
    "jinja2",
    "ncnn",
    "onnx",
    "onnxruntime",
    "openvino",
    "pydantic.type_adapter",
    "scipy.stats",
    "torch._dynamo",
)


@contextmanager
def forked_program(folder: Path) -> Iterator[Path]:
    """Write a program `prelunet` into a folder, and start the process that it calls."""
    program, address = folder / "prelunet", str(folder / "socket")
    program.write_text(PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    command = [sys.executable, "-c", "from tests.docs import forked_program; forked_program.main()", address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield program
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    """Answer calls until killed, or until the process that tests has gone."""
    from prelunet.evaluator import cli
    from prelunet.evaluator.reporting import html

    for name in IMPORTED:
        importlib.import_module(name)
    for name in cli.VERBS:
        cli.load_verb(name)
    html._vega()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need not be waited for
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        listener.settimeout(5)
        parent = os.getppid()
        print("ready", flush=True)
        while os.getppid() == parent:
            with suppress(TimeoutError):
                call, _ = listener.accept()
                if os.fork() == 0:
                    _run(call)
                call.close()


def _run(call: socket.socket) -> None:
    from prelunet.evaluator import cli

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    call.send(str(os.getpid()).encode())
    code: object = 1
    try:
        message, files, *_ = socket.recv_fds(call, 2**17, 3)
        words, folder, environment = json.loads(message)
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["prelunet", *words]
        cli.main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        call.send(bytes([int(str(code))]))
        os._exit(0)
