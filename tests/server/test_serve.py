"""Test the pages of `leaven serve`: access, updates and the planner, also in a real browser."""

import errno
import html
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn
from tests.cli.conftest import Verb, leaven  # noqa: F401
from tests.views.chromium import BINARY, Browser
from tests.views.written import proxy, write_run

from leaven.documents import sealed
from leaven.planning.plan import plan_recipe
from leaven.recipe.files import read_recipe, write_recipe
from leaven.server import app
from leaven.server import folders as module
from leaven.server.app import application
from leaven.server.folders import find, row
from leaven.tuning.study_document import StudyDocument, StudyTrial
from leaven.views import folders

TOKEN = "a-token-that-nobody-guesses"
RUN = "/folder/0/runs/wheat"
TRIAL = StudyTrial(0, "complete", loss=3.0, values={}, seconds=1.0, tokens_per_second=1.0)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    write_run(root / "runs/wheat", proxy(), 2.4)
    (root / "study").mkdir()
    study = StudyDocument(name="wheat", method="random", space=(), trials=(TRIAL,))
    (root / "study/study.json").write_text(json.dumps(sealed(json.loads(study.model_dump_json()))))
    write_recipe(proxy(), root / "study/centre.toml")
    return root


@pytest.fixture(scope="module")
def port(roots: Path) -> Iterator[int]:
    server = uvicorn.Server(uvicorn.Config(application([roots], TOKEN), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Return the status, headers and text of the answer to a request with the cookie."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers={"Cookie": f"leaven-{port}={TOKEN}"} | headers)
    answer = connection.getresponse()
    body = answer.read()
    encoded = answer.headers.get("Content-Encoding") == "gzip"
    return answer.status, dict(answer.headers), "" if encoded else body.decode()


def test_only_the_token_opens_a_page(port: int) -> None:
    for path in ("/", "/plan", "/published", "/plotly.js", RUN, "/nothing"):
        for cookie in ("", f"leaven-{port}=guess", f"leaven={TOKEN}"):
            assert get(port, path, Cookie=cookie)[0] == 403
    assert get(port, "/?token=guess", Cookie="")[0] == 403
    status, headers, _ = get(port, f"/?token={TOKEN}", Cookie="")
    assert (status, headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=strict"} <= set(headers["set-cookie"].split("; "))


def test_another_host_name_another_method_and_unknown_folders_are_refused(
    port: int, roots: Path, tmp_path: Path
) -> None:
    assert get(port, "/", Host=f"evil.example:{port}")[0] == 403
    assert get(port, "/", "POST")[0] == 405
    (roots / "notes").mkdir(exist_ok=True)
    (roots / "notes/metrics.txt").write_text("private")
    shutil.copytree(roots / "runs/wheat", tmp_path / "elsewhere")
    (roots / "link").symlink_to(tmp_path / "elsewhere")
    for path in ("..", "link", "%2e%2e/study", "notes", "study/..", "runs/wheat/../wheat", "/etc", "study%00"):
        assert get(port, f"/folder/0/{path}")[0] in {307, 404}, path
    assert get(port, "/folder/1/study")[0] == 404
    (roots / "link").unlink()


def test_a_page_is_sent_again_only_after_a_change(port: int, roots: Path) -> None:
    metrics = roots / "runs/wheat/metrics.jsonl"
    for path in ("/", RUN):
        status, headers, page = get(port, path)
        assert status == 200
        assert headers["etag"] in page.replace("&#34;", '"')
        assert get(port, path, **{"If-None-Match": headers["etag"]})[0] == 304
        with metrics.open("a") as file:
            file.write("\n")
        status, after, _ = get(port, path, **{"If-None-Match": headers["etag"]})
        assert status == 200
        assert after["etag"] != headers["etag"]


def test_the_list_has_every_folder_with_its_state(port: int, roots: Path) -> None:
    broken = roots / "broken"
    broken.mkdir()
    (broken / "study.json").write_text("{")
    _, _, page = get(port, "/")
    assert "1 run, 2 studies" in page
    for words in ("runs/wheat", "finished", "invalid JSON"):
        assert words in page
    shutil.rmtree(broken)


def test_a_folder_that_cannot_be_listed_is_named(port: int, roots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a network disk that is away, or a folder of another user. A folder may also be removed meanwhile."""
    scandir, fault = os.scandir, OSError(errno.ESTALE, "Stale file handle", str(roots / "runs"))

    def away(path: object) -> object:
        if str(path) == str(roots / "runs"):
            raise fault
        return scandir(path)

    monkeypatch.setattr(os, "scandir", away)
    page = get(port, "/")[2]
    assert f"1 study. Folders that cannot be listed: {roots / 'runs'} (Stale file handle)." in page
    fault = FileNotFoundError(errno.ENOENT, "No such file or directory", str(roots / "runs"))
    assert "cannot be listed" not in get(port, "/")[2]


def test_the_list_reads_of_a_run_only_what_it_shows(roots: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "faults", None)
    rows = {each.found.kind: each for each in (row(found, time.time()) for found in find([roots]))}
    assert rows["run"].loss is not None


def test_a_folder_whose_name_is_not_utf8_is_listed_and_opens(port: int, roots: Path) -> None:
    folder = roots / os.fsdecode(b"bad\xff")
    try:
        shutil.copytree(roots / "study", folder)
    except OSError:
        pytest.skip("this file system takes only names in UTF-8")
    status, _, page = get(port, "/")
    assert status == 200
    (address,) = re.findall(r'"(/folder/0/bad[^"]*)"', page)
    assert get(port, address)[0] == 200
    shutil.rmtree(folder)


def test_a_time_beyond_the_calendar_and_a_link_to_nowhere_hide_nothing(
    roots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = [each for each in find([roots]) if each.kind == "run"]
    (link := found.folder / "0.json").symlink_to("nowhere")
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: sorted(scandir(path), key=lambda entry: entry.name))
    assert str(found.folder / "metrics.jsonl") in found.stats
    link.unlink()
    for late, year in ((10.0**12, "9999"), (-(10.0**12), "1970")):
        times = [SimpleNamespace(st_mtime=late)]
        monkeypatch.setattr(module, "_files", lambda *_, times=times: enumerate(times))
        assert found.when.startswith(year)


def test_long_numbers_in_an_address_are_no_folder(port: int) -> None:
    digits = "9" * 5000
    assert get(port, f"/folder/{digits}/x")[0] == 404


def test_the_planner_answers_as_leaven_plan_does_and_prints_its_command(
    leaven: Verb,  # noqa: F811
    port: int,
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "mine.toml"
    size = ("--params", "1B", "--tokens", "20B")
    assert leaven("new", recipe, *size, "--gpus", "8 x A100-80GB", "--proxy", "none")[0] == 0
    plan = plan_recipe(read_recipe(recipe), "8xA100-80GB", "tp=2")
    _, _, page = get(port, "/plan?size=1B&tokens=20B&gpus=8+x+A100-80GB&layout=tp%3D2&price=%242")
    assert f"{plan.chosen.memory.total / 2**30:.1f} of 80 GiB" in page
    assert f"{plan.speed.mfu:.1%}" in page
    (command,) = re.findall(r"<code>(leaven new .*?)</code>", html.unescape(page))
    new, plan_command = map(shlex.split, command.split(" && "))
    assert new == ["leaven", "new", "mine.toml", *size, "--gpus", "8 x A100-80GB"]
    assert plan_command[3:] == ["--gpus", "8 x A100-80GB", "--layout", "tp=2", "--price", "$2"]


@pytest.mark.parametrize(
    ("size", "gpus"),
    [
        ("1B", "7xH100-80GB"),
        ("1B", "12xH100-80GB"),
        ("300M", "24xA100-80GB"),
        ("7B", "1000xH100-80GB"),
        ("llama2-7b", "64xA100-80GB"),
    ],
)
def test_the_command_gives_the_plan_of_the_page(
    leaven: Verb,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: str,
    gpus: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = dict.fromkeys(("layout", "price"), "") | {"size": size, "tokens": "20B", "gpus": gpus}
    page = app._planned(given)[0].document()
    for command in app._command(given).split(" && "):
        code, output, _ = leaven(*shlex.split(command)[1:], "--json")
        assert code == 0
    printed = json.loads(output)
    for key in ("layout", "memory", "speed", "days", "alternatives"):
        assert printed[key] == json.loads(page.model_dump_json())[key], key


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("size=7B&tokens=x", "x"),
        ("size=no-such-run", "no-such-run"),
        ("size=70B&tokens=2T&gpus=1xRTX-4090", "fit"),
        ("size=%3Cscript%3E1", "&lt;script&gt;1"),
        ("size=1B&tokens=20B&gpus=8xA100-80GB&price=free", "price"),
        ("size=llama2-7b&gpus=64xA100-80GB&layout=tp%3D7", "tp"),
        pytest.param(f"size=llama2-7b&gpus=64xA100-80GB&layout=tp%3D{'9' * 5000}", "is too long", id="long layout"),
    ],
)
def test_wrong_input_to_the_planner_is_said_on_the_page(port: int, query: str, words: str) -> None:
    status, _, page = get(port, f"/plan?{query}")
    assert status == 200
    assert '<form class="planner"' in page
    assert words in page
    assert "<script>1" not in page


@pytest.mark.long
@pytest.mark.skipif(BINARY is None, reason="no chromium or google-chrome on the PATH")
def test_in_a_browser_pages_change_by_themselves_and_the_planner_as_one_types(
    port: int, roots: Path, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{port}"
    with Browser(tmp_path) as browser:
        browser.window(390, dark=True)
        for path in (f"/?token={TOKEN}", "/published", "/plan"):
            browser.open(url + path)
            assert browser.evaluate("document.documentElement.scrollWidth") <= 390, path
        typed = "const field = document.querySelector('[name=size]'); field.value = 'llama1-13b';"
        browser.evaluate(typed + "field.dispatchEvent(new Event('input', { bubbles: true }))")
        browser.until("document.querySelector('h1').textContent == 'llama1-13b'")
        assert browser.evaluate("location.search").startswith("?size=llama1-13b")
        browser.until("!!document.querySelector('#chart-memory .main-svg')")
        browser.open(url + RUN)
        before = browser.evaluate("document.querySelector('main').textContent")
        with (roots / "runs/wheat/events.jsonl").open("a") as file:
            file.write(json.dumps({"event": "validation", "tokens": 4_000_000, "loss": 1.2345}) + "\n")
        browser.until(f"document.querySelector('main').textContent != {json.dumps(before)}")
        browser.until("!!document.querySelector('#chart-loss .main-svg')")
        assert not browser.complaints
        assert all(request.startswith(url) for request in browser.requests)


@pytest.mark.long
def test_the_command_prints_its_address_and_ends_at_ctrl_c(leaven: Verb, roots: Path) -> None:  # noqa: F811
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.listen()
        code, _, error = leaven("serve", roots, "--port", port)
        assert (code, f"--port {port}" in error) == (2, True)
    command = [sys.executable, "-m", "leaven", "serve", str(roots), "--port", str(port)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    address = running.stdout.readline().split()[-1]
    token = address.rpartition("=")[2]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert get(port, "/", Cookie=f"leaven-{port}={token}")[0] == 200
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait(30) == 0


@pytest.mark.parametrize(("folder", "words"), [("", "no run, study, check or demo"), ("none", "there is no folder")])
def test_what_cannot_be_served_is_one_line(leaven: Verb, tmp_path: Path, folder: str, words: str) -> None:  # noqa: F811
    code, _, error = leaven("serve", tmp_path / folder)
    assert (code, words in " ".join(error.split())) == (2, True), error
