import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from written import HOSTILE, write_demo

from leaven.recipe.errors import InputError
from leaven.views.page import write_page


class Reader(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in {"script", "style"}:
            self.text += data


@pytest.fixture(scope="module")
def page(demo_folder, tmp_path_factory):
    return write_page(demo_folder, tmp_path_factory.mktemp("page") / "report.html")


def test_one_file_under_five_megabytes_that_asks_no_other_host(page):
    assert page.stat().st_size < 5_000_000
    read = Reader(page)
    addresses = [
        value for tag, attributes in read.tags for name, value in attributes.items()
        if name in {"src", "href", "srcset", "action", "data", "poster"}
    ]  # fmt: skip
    assert addresses == ["data:,"]
    css = page.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in css
    assert "@import" not in css
    policy = next(a["content"] for _, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_the_same_folder_makes_the_same_page(demo_folder, page, tmp_path):
    assert write_page(demo_folder, tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_it_says_what_came_out_first(page):
    text = Reader(page).text
    assert (
        text.index("0.140 nats better than the same values copied")
        < text.index("nats per token, transferred")
        < text.index("The runs")
    )
    for said in (
        "−0.1400",
        "9 min 28 s",
        "+0.2200",
        "wheat-proxy, trial 17 of 20",
        "AMD EPYC",
        "--width 192 --depth 8",
    ):
        assert said in text


def test_every_chart_box_has_a_figure(page):
    read = Reader(page)
    boxes = {a["id"].removeprefix("chart-") for _, a in read.tags if (a.get("class") or "").startswith("chart ")}
    text = page.read_text(encoding="utf-8")
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', text, re.S).group(1))
    assert boxes == set(charts) == {"loss", "last", "gradient", "schedule", "search"}


def test_what_a_person_writes_cannot_break_out(tmp_path):
    page = write_page(write_demo(tmp_path / "demo", hostile=HOSTILE), tmp_path / "report.html")
    read = Reader(page)
    assert not [tag for tag, _ in read.tags if tag == "img"]
    assert sum(tag == "script" for tag, _ in read.tags) == 3
    assert HOSTILE in read.text
    assert "<script>window" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("part", ["proxy", "runs/transferred", "runs/copied"])
def test_a_study_or_a_run_alone_has_a_page_too(demo_folder, tmp_path, part):
    text = Reader(write_page(demo_folder / part, tmp_path / "report.html")).text
    assert "What every parameter gets" in text
    assert ("The search" in text) == (part == "proxy")
    assert ("Loss over tokens" in text) == (part != "proxy")


def test_a_demo_that_is_not_done_shows_what_there_is(demo_folder, tmp_path):
    folder = Path(shutil.copytree(demo_folder, tmp_path / "demo"))
    shutil.rmtree(folder / "runs/copied")
    document = json.loads((folder / "demo.json").read_text())
    del document["verdict"]
    document["arms"] = [arm | {"loss": None} if arm["key"] == "copied" else arm for arm in document["arms"]]
    document["machine"] = None
    (folder / "demo.json").write_text(json.dumps(document))
    text = Reader(write_page(folder, tmp_path / "report.html")).text
    assert "no run" in text
    assert "not finished" in text
    document |= {"arms": [], "target": None, "parts": []}
    (folder / "demo.json").write_text(json.dumps(document))
    assert "The search" in Reader(write_page(folder, tmp_path / "report.html")).text


def test_a_study_without_a_completed_trial_has_a_page(demo_folder, tmp_path):
    folder = Path(shutil.copytree(demo_folder / "proxy", tmp_path / "study"))
    (folder / "best.toml").unlink()
    document = json.loads((folder / "study.json").read_text())
    nothing = {"loss": None, "values": {}, "seconds": None, "tokens_per_second": None}
    trials = [{"number": number, "state": state} | nothing for number, state in enumerate(("diverged", "running"))]
    (folder / "study.json").write_text(json.dumps(document | {"trials": trials, "best": None, "noise_floor": None}))
    assert "None of 2 trials has completed yet" in Reader(write_page(folder, tmp_path / "report.html")).text


def test_without_plotly_it_says_what_to_install(demo_folder, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(InputError, match=r"pip install 'leaven\[train\]'"):
        write_page(demo_folder, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
