"""Reports over HTTP: which are listed, and that nothing else can be opened."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urljoin

import httpx
import pytest

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.reporting.compare_page import write_comparison
from prelunet.evaluator.reporting.report_page import write_report
from prelunet.evaluator.serving.access import AccessControl
from prelunet.evaluator.serving.options import HttpOptions
from tests.helpers.fakes import FakeSession
from tests.helpers.run_folders import evaluated, write_run
from tests.helpers.tls_files import write_tokens
from tests.reporting.pages import Elements
from tests.serving.http.http_calls import ON, client_to, raw_call, request
from tests.serving.serving_harness import RunningServer, eventually, running_server

LINES = [evaluated(f"{n}.png", 0, [n % 2, 1 - n % 2], 1 + n % 2) for n in range(8)]
HOSTILE = b"<b>&\"' %2e\xff \xe2\x80\xae#?"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Write two runs, their comparison in the second, and the report of a third with a name that is not UTF-8."""
    folder = tmp_path / "runs"
    folder.mkdir()
    for place, name in enumerate((b"a", b"b", HOSTILE)):
        run = write_run(folder / os.fsdecode(name), LINES)
        os.utime(write_report(run).html, (1000 + place, 1000 + place))
    os.utime(write_comparison(folder / "a", folder / "b").html, (2000, 2000))
    return folder


@pytest.fixture
def server(runs: Path) -> Iterator[RunningServer]:
    with running_server(http=HttpOptions(0, reports=runs), six=FakeSession()) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with client_to(server) as connected:
        yield connected


def listed(client: httpx.Client) -> list[str]:
    return [each["name"] for each in client.get("/reports").json()["reports"]]


def test_reports_and_comparisons_are_listed_newest_first_with_their_errors(client: httpx.Client, runs: Path) -> None:
    report = write_report(runs / "a").report
    os.utime(runs / "a" / "report" / "report.html", (1000, 1000))
    _, comparison, hostile, b, a = client.get("/reports").json()["reports"]
    assert [each["modified"] for each in (comparison, hostile, b, a)] == [2000, 1002, 1001, 1000]
    assert a["name"] == "a/report/report.html"
    assert a["title"] == f"{report['model']['file']} on {report['dataset']['name']}: evaluation report"
    assert f"top-1 error {report['top1_error']:.2f} %" in a["summary"]
    assert report["protocol"]["name"] in a["summary"]
    assert comparison["name"] == "b/report/compared-with-a/compare.html"
    assert comparison["summary"] == "top-1: no difference; top-5: no difference"


def test_every_listed_report_is_opened_byte_for_byte_and_may_reach_nothing(client: httpx.Client, runs: Path) -> None:
    _, *names = listed(client)
    for name in names:
        answer = client.get(f"/reports/{quote(name)}")
        page = runs / name.replace("\ufffd", "\udcff")
        assert answer.content == page.read_bytes()
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "sandbox allow-scripts allow-downloads;" in policy
        assert "connect-src" not in policy
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-type"].startswith("text/html")


def test_a_new_run_appears_and_a_removed_one_is_gone(server: RunningServer, client: httpx.Client, runs: Path) -> None:
    write_report(write_run(runs / "group" / "c", LINES))
    (runs / "a" / "report" / "report.html").unlink()
    assert listed(client)[:2] == ["runs.html", "group/c/report/report.html"]
    assert "a/report/report.html" not in listed(client)
    assert client.get("/reports/a/report/report.html").status_code == 404
    counted = {"method": "prelunet.http/Reports", "status": "OK"}
    eventually(lambda: server.metric("prelunet_calls_total", **counted) == 2)


def test_links_deep_folders_and_other_files_are_neither_listed_nor_opened(
    server: RunningServer, client: httpx.Client, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.html").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "report.html").write_text("secret")
    (runs / "report.html").symlink_to(tmp_path / "secret.html")
    (runs / "linked").symlink_to(tmp_path / "outside")
    deep = runs / "1" / "2" / "3" / "4"
    deep.mkdir(parents=True)
    (deep / "report.html").write_text("deep")
    os.mkfifo(runs / "1" / "compare.html")
    assert len(listed(client)) == 6  # with the pipe, which reads as empty and blocks nobody
    for path in (
        "report.html", "linked/report.html", "1/2/3/4/report.html", "a/report/report.json", "a/run.json", "",
        "../secret.html", "..%2fsecret.html", "a/../../secret.html", str(tmp_path / "secret.html"), "%00", "a",
    ):  # fmt: skip
        found, _, body = raw_call(server, request(f"GET /reports/{path}"))
        assert (found, b"GET /reports lists all" in body) == (404, True), path


def test_the_table_of_runs_comes_first_and_links_to_each_report(client: httpx.Client, runs: Path) -> None:
    write_run(runs / "group" / "begun", LINES, images=10)
    first, *_ = client.get("/reports").json()["reports"]
    newest = max(path.stat().st_mtime for path in runs.rglob("run.json"))
    assert (first["name"], first["title"], first["modified"]) == ("runs.html", "Table of runs", newest)
    assert first["summary"].startswith("4 runs:")
    answer = client.get("/reports/runs.html")
    assert "sandbox allow-scripts allow-downloads;" in answer.headers["content-security-policy"]
    page = Elements(answer.text)
    assert "unfinished: 8 of 10 images are done" in page.text
    links = [each["href"] or "" for each in page.named("a")]
    assert len(links) == 3
    for link in links:
        opened = client.get(urljoin("/reports/runs.html", link))
        assert "<title>c.onnx on val: evaluation report</title>" in opened.text
    write_run(runs / "a", LINES[:4], images=10)
    assert "unfinished: 4 of 10 images are done" in client.get("/reports/runs.html").text
    assert client.get("/reports/a/run.json").status_code == 404


def test_the_table_of_runs_follows_no_link_and_does_not_tell_where_the_folder_is(
    client: httpx.Client, runs: Path, tmp_path: Path
) -> None:
    secret = write_run(tmp_path / "outside", LINES) / "run.json"
    secret.write_text(secret.read_text().replace("c.onnx", "secret.onnx"))
    (runs / "linked").symlink_to(tmp_path / "outside")
    (runs / "link").mkdir()
    (runs / "link" / "run.json").symlink_to(secret)
    deep = write_run(runs / "1" / "2" / "3" / "4", LINES)
    assert deep.is_dir()
    os.mkfifo(runs / "1" / "run.json")
    page = Elements(client.get("/reports/runs.html").text)
    assert "link: no run.json in this folder (Too many levels of symbolic links)" in page.text
    assert "1/run.json: damaged" in page.text
    for text in ("secret", "linked", "1/2/3/4", str(tmp_path)):
        assert text not in page.text


def test_a_folder_without_runs_has_no_table_in_its_list(client: httpx.Client, runs: Path) -> None:
    for path in runs.rglob("run.json"):
        path.unlink()
    assert listed(client)[0] == "b/report/compared-with-a/compare.html"
    assert "0 runs" in Elements(client.get("/reports/runs.html").text).text


def test_reports_require_the_scope_evaluate(runs: Path, tmp_path: Path) -> None:
    secrets = write_tokens(tmp_path / "tokens.toml", ("alice", ("classify", "admin")), ("bob", ("evaluate",)))
    access = AccessControl(tmp_path / "tokens.toml")
    with (
        running_server(http=HttpOptions(0, reports=runs), access=access, six=FakeSession()) as server,
        client_to(server) as client,
    ):
        for path in ("/reports", "/reports/runs.html", "/reports/a/report/report.html"):
            alice, bob = (client.get(path, headers={"authorization": f"Bearer {each}"}) for each in secrets)
            assert client.get(path).status_code == 401
            assert (alice.status_code, "requires the scope 'evaluate'" in alice.json()["error"]) == (403, True)
            assert bob.status_code == 200
        assert client.get("/report-viewer").status_code == 200


def test_without_the_option_there_are_no_reports() -> None:
    with running_server(http=ON, six=FakeSession()) as server, client_to(server) as client:
        assert [client.get(path).status_code for path in ("/reports", "/report-viewer")] == [404, 404]
        assert "Reports</h2>" not in client.get("/").text


def test_a_folder_that_is_none_and_reports_without_http_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--reports .*/none: not a folder"):
        HttpOptions(0, reports=tmp_path / "none")
    with pytest.raises(UsageError, match="--reports requires HTTP"):
        HttpOptions(reports=tmp_path)
