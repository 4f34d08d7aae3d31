"""The images that the live page offers to try, over HTTP."""

import os
from pathlib import Path

import pytest

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.serving.access import AccessControl
from prelunet.evaluator.serving.http.examples import MAX_EXAMPLES, find_examples
from prelunet.evaluator.serving.options import HttpOptions
from tests.helpers.fakes import FakeSession
from tests.helpers.tls_files import write_tokens
from tests.serving.http.http_calls import IMAGE, client_to
from tests.serving.serving_harness import running_server


def test_the_images_of_the_folder_are_listed_and_nothing_else_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(IMAGE)
    (tmp_path / "a größe.JPG").write_bytes(b"no image, but called one")
    (tmp_path / "secret.txt").write_text("no image")
    with (
        running_server(http=HttpOptions(0, examples=tmp_path), six=FakeSession()) as server,
        client_to(server) as client,
    ):
        assert client.get("/examples").json() == {"examples": ["a größe.JPG", "b.png"]}
        assert client.get("/examples/b.png").content == IMAGE
        assert client.get("/examples/a%20gr%C3%B6%C3%9Fe.JPG").content == b"no image, but called one"
        for name in ("secret.txt", "c.png", "..%2Fsecret.txt"):
            assert client.get(f"/examples/{name}").status_code == 404


def test_an_image_that_is_removed_or_becomes_a_pipe_is_no_example_any_more(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / name).write_bytes(IMAGE)
    with (
        running_server(http=HttpOptions(0, examples=tmp_path), six=FakeSession()) as server,
        client_to(server) as client,
    ):
        (tmp_path / "a.png").unlink()
        (tmp_path / "b.png").unlink()
        os.mkfifo(tmp_path / "b.png")
        assert [client.get(f"/examples/{name}.png").status_code for name in "abc"] == [404, 404, 200]


def test_without_the_option_there_are_no_examples(tmp_path: Path) -> None:
    with running_server(http=HttpOptions(0), six=FakeSession()) as server, client_to(server) as client:
        assert client.get("/examples").status_code == 404


def test_with_tokens_the_examples_need_the_scope_of_classify(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(IMAGE)
    secrets = write_tokens(tmp_path / "tokens.toml", ("alice", ["classify"]), ("bob", ["admin"]))
    access = AccessControl(tmp_path / "tokens.toml")
    options = HttpOptions(0, examples=tmp_path)
    with running_server(http=options, access=access, six=FakeSession()) as server, client_to(server) as client:
        for path in ("/examples", "/examples/b.png"):
            headers = [{}, *({"authorization": f"Bearer {secret}"} for secret in secrets)]
            assert [client.get(path, headers=each).status_code for each in headers] == [401, 200, 403]


def test_of_many_images_the_first_by_name_are_offered(tmp_path: Path) -> None:
    for number in range(MAX_EXAMPLES + 5):
        (tmp_path / f"{number:03}.png").write_bytes(IMAGE)
    assert list(find_examples(tmp_path)) == [f"{number:03}.png" for number in range(MAX_EXAMPLES)]


def test_a_folder_without_images_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--examples {tmp_path}: no image there"):
        find_examples(tmp_path)
    with pytest.raises(UsageError, match="gone: not a folder"):
        find_examples(tmp_path / "gone")
