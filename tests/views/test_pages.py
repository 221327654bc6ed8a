"""Test that each page is complete, self-contained and escaped, and that a browser draws it without errors."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as go
import pytest
import studied
from chromium import BINARY, Browser
from planned import planned
from written import HOSTILE, collapse_check, demo, slopes_check, write_demo, write_losses_check

from leaven.catalogue.runs import load_runs
from leaven.documents.checks import CheckDocument, VerdictCurve
from leaven.documents.planning import Price
from leaven.errors import InputError
from leaven.views.catalogue_page import catalogue_page
from leaven.views.check_page import check_page
from leaven.views.comparison import comparison_page
from leaven.views.demo import headline
from leaven.views.page import folder_page
from leaven.views.plan_page import plan_page

pytestmark = pytest.mark.xdist_group("pages")  # one browser, and one set of pages
needs_browser = pytest.mark.skipif(BINARY is None, reason="no chromium or google-chrome on the PATH")

VOID = {"meta", "link", "br", "wbr", "input"}
# A text at the top of each page, and the names of its charts.
RUN = {"loss", "last", "lr", "batch", "gradient"}
PAGES: dict[str, tuple[str, set[str]]] = {
    "demo": ("is 0.610 nats lower than with these values copied", {"standard", "complete-d-p"}),
    "run": ("Finished: after 4.93 M tokens, the validation loss is", RUN),
    "study": ("is the best of 64", {"search", "curves", "front"}),
    "catalogue": ("published runs of 70.4 M to", {"lr", "batch", "tokens", "init"}),
    "check of slopes": ("FAILED: 2 of", {"width-change", "width-end", "depth-change", "depth-end"}),
    "check of runs": ("FAILED: 1 of", {"losses", "best-width"}),
    "check of curves": ("FAILED: 1 of", {"normalised", "deviation"}),
    "comparison": ("runs/moved has the lowest validation loss, 2.8101", RUN),
    "plan": ("The run fits in memory: ", {"memory", "passes", "layouts"}),
}  # fmt: skip


def write(name: str, folders: Path, folder: Path) -> Path:
    out = folder / f"{name}.html"
    plan = planned("1f1b")
    price = Price(amount=2.5, currency="$")
    made: dict[str, Callable[[], str]] = {
        "demo": lambda: folder_page(write_demo(folder / "hostile", demo(HOSTILE))),
        "run": lambda: folder_page(folders / "runs/moved"),
        "study": lambda: folder_page(studied.write(folder / "study", studied.durations(studied.study(14)))),
        "catalogue": lambda: catalogue_page(load_runs()),
        "check of slopes": lambda: check_page(slopes_check()),
        "check of curves": lambda: check_page(collapse_check()),
        "check of runs": lambda: folder_page(write_losses_check(folder / "check")),
        "comparison": lambda: comparison_page([folders / "runs/copied", folders / "runs/moved"], out)[0],
        "plan": lambda: plan_page(plan, plan.document(price=price), "rye-7b", f"leaven plan '{HOSTILE}'"),
    }
    out.write_text(made[name](), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def pages(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {name: write(name, folders, folder) for name in PAGES}


class Reader(HTMLParser):
    """Read the tags of a page with attributes, and the text outside scripts and styles. Unbalanced tags fail."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in {"script", "style"}:
            self.text += data


def charts(page: Path) -> dict[str, go.Figure]:
    """Return the charts of a page. Keys that plotly does not know fail."""
    text = page.read_text(encoding="utf-8")
    found = json.loads(re.search(r'id="charts">(.*?)</script>', text, re.S)[1])
    return {name: go.Figure(data | {"layout": data["layout"] | {"template": found["template"]}})
            for name, data in found["figures"].items()}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_complete_and_self_contained(name, pages):
    page, (said, names) = pages[name], PAGES[name]
    read = Reader(page.read_text(encoding="utf-8"))
    assert page.stat().st_size < 5_000_000
    assert said in " ".join(read.text.split())
    boxes = [a["id"].removeprefix("chart-") for _, a in read.tags if (a.get("class") or "").startswith("chart ")]
    drawn = charts(page)
    assert sorted(boxes) == sorted(drawn)
    assert {box for box in boxes if not box.startswith("slice-")} == names
    assert all(figure.data for figure in drawn.values())
    for tag, attributes in read.tags:
        assert tag not in {"img", "iframe", "object", "base", "form"}
        assert not {"src", "srcset", "action", "data", "poster"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    links = {attributes["href"] for tag, attributes in read.tags if "href" in attributes and tag != "a"}
    assert links == {"data:,"}
    css = page.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in css
    assert "@import" not in css
    policy = next(a["content"] for _, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


@pytest.mark.parametrize("name", ["demo", "check of slopes", "check of curves", "plan"])
def test_hostile_text_is_escaped(name, pages):
    read = Reader(pages[name].read_text(encoding="utf-8"))
    assert sum(tag == "script" for tag, _ in read.tags) == 3
    assert HOSTILE in read.text
    assert "<script>window" not in pages[name].read_text(encoding="utf-8")


@pytest.mark.long
def test_pages_are_reproducible(pages, folders, tmp_path):
    assert write("study", folders, tmp_path).read_bytes() == pages["study"].read_bytes()


def test_an_unfinished_demo_has_no_page(tmp_path):
    folder = write_demo(tmp_path, demo().model_copy(update={"result": None, "runs": []}))
    with pytest.raises(InputError, match="run the same leaven demo again to resume it"):
        folder_page(folder)


@pytest.mark.parametrize(
    ("gain", "noise", "says"),
    [
        (0.5, 0.01, "is 0.610 nats lower than with these values copied (95% interval 0.585 to 0.635, 3 seeds)."),
        (-0.5, 0.01, "is 0.390 nats HIGHER than with these values copied"),
        (0.0, 0.1, "is, within noise, the same as with these values copied: 0.200 nats lower"),
    ],
)
def test_the_headline_says_what_was_found(gain, noise, says):
    result, drift = headline(demo(gain=gain, noise=noise))
    assert result.startswith(f"At 2 times the width, the loss with the small model's values moved by the rule {says}")
    assert "goes from 0.008 to 0.004 or less with copied values, and stays at 0.008 with moved values." in drift


def test_missing_plotly_is_an_error(folders, monkeypatch):
    from leaven.views import render

    render._plotly_packed.cache_clear()
    render.plotly_gzipped.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(InputError, match=r"pip install 'leaven\[train\]'"):
        folder_page(folders / "proxy")


# Elements that are wider than the window and are not in a box that scrolls.
OVERFLOWING = """[...document.querySelectorAll("main *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > document.documentElement.clientWidth + 1 && !e.closest(".scroll");
}).map(e => e.tagName + "." + e.getAttribute("class"))"""
MARKS = """Object.fromEntries([...document.querySelectorAll(".chart")].map(c =>
  [c.id, c.querySelectorAll(".scatterlayer .point, .scatterlayer path.js-line, .barlayer .point").length]))"""
# Whether charts have the width of their box. They are drawn again shortly after the window changes.
FITTED = """[...document.querySelectorAll(".chart")].every(c =>
  Math.abs(c.querySelector(".main-svg")?.getBoundingClientRect().width - c.clientWidth) <= 1)"""
# Labels of axes and ticks that are partly outside their chart.
CLIPPED = """[...document.querySelectorAll(".chart")].flatMap(c => {
  const box = c.getBoundingClientRect();
  return [...c.querySelectorAll("text")].filter(t => {
    const r = t.getBoundingClientRect();
    const [across, down] = [[r.left, r.right, box.left, box.right], [r.top, r.bottom, box.top, box.bottom]];
    return r.width && [across, down].some(([a, b, low, high]) => a < low - 1 || b > high + 1);
  }).map(t => c.id + ": " + t.textContent);
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.long
@needs_browser
@pytest.mark.parametrize(
    "name",
    [
        "demo",
        "study",
        "plan",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("catalogue", "check of curves")),
    ],
)
def test_charts_draw_and_fit_a_narrow_window(browser: Browser, pages: dict[str, Path], name: str):
    page = pages[name]
    browser.window(390, dark=name in {"study", "plan"})
    browser.open(page)
    browser.until(FITTED)
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.evaluate("document.documentElement.dataset.charts") == "drawn"
    marks = browser.evaluate(MARKS)
    assert all(marks.values()), marks
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser.evaluate(OVERFLOWING) == []
    assert browser.evaluate(CLIPPED) == []
    assert browser.evaluate("window.owned") is None


@pytest.mark.long
@needs_browser
def test_a_page_follows_window_theme_and_print_and_its_tables_sort(browser: Browser, pages: dict[str, Path]):
    browser.window(1280)
    browser.open(pages["run"])
    ink = "getComputedStyle(document.querySelector('#chart-loss .xtick text')).fill"
    light = browser.evaluate(ink)
    browser.window(1600, dark=True)
    browser.until(f"{ink} !== '{light}'")
    browser.until(FITTED)
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    browser.until(f"{ink} === '{light}'")
    assert browser.evaluate("document.querySelector('#chart-loss .main-svg').clientWidth") <= 680
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    browser.until(f"{ink} !== '{light}'")
    first = "[...document.querySelectorAll('.parameters tbody tr')].map(r => r.cells[0].textContent)"
    before = browser.evaluate(first)
    browser.evaluate("document.querySelector('.parameters th button').click()")
    assert browser.evaluate(first) == sorted(before)
    browser.open(pages["demo"])
    dots = "document.querySelectorAll('#chart-standard .point').length"
    all_dots = browser.evaluate(dots)
    browser.evaluate("document.querySelector('.legend button').click()")
    browser.until(f"{dots} < {all_dots}")


@needs_browser
def test_a_study_shows_all_trials_on_request(browser: Browser, pages: dict[str, Path]):
    browser.window(1280)
    browser.open(pages["study"])
    shown = "[...document.querySelectorAll('.trials tbody tr')].filter(r => r.getClientRects().length)"
    numbers = f"{shown}.map(r => +r.cells[0].textContent)"
    assert len(browser.evaluate(numbers)) == 30
    browser.evaluate("document.querySelector('.trials th button').click()")
    assert browser.evaluate(numbers) == list(range(30))  # the first in the new order
    browser.evaluate("document.querySelector('.all-rows').click()")
    assert browser.evaluate(numbers) == list(range(64))
    readout = "document.querySelector('.bands').closest('section').querySelector('.readout').textContent"
    browser.evaluate("document.querySelector('.bands svg').dispatchEvent(new Event('click', {bubbles: true}))")
    assert browser.evaluate(readout).startswith("every block, lr, layer by layer: ")


def strings(part):
    """Return all texts of a part of a chart."""
    if isinstance(part, str):
        return [part]
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    return [text for each in parts for text in strings(each)]


def hostile_study(folder: Path) -> Path:
    """Write a study in which every text is hostile."""
    state = studied.durations(studied.study(14))
    first = replace(state.dimensions[0], unit="choice", levels=(HOSTILE,) * 20, low=0.0, high=19.0)
    trials = tuple(replace(each, worker=HOSTILE) for each in state.trials)
    changes = {"name": HOSTILE, "progress": HOSTILE, "trials": trials, "dimensions": (first, *state.dimensions[1:])}
    return studied.write(folder, studied.replace(state, **changes))


def hostile_sweep() -> CheckDocument:
    x, module = [1.0, 2.0], HOSTILE
    curves = [VerdictCurve(module=module, axis=HOSTILE, quantity="loss", x=x, y=[3.0, 3.1])]
    curves.append(VerdictCurve(module=module, axis=HOSTILE, quantity="best", x=x, y=[1.0, 1.1]))
    return slopes_check().model_copy(
        update={"check": "lr", "curves": curves, "settings": {"unit": HOSTILE, "seeds": 1}}
    )


@pytest.mark.long
def test_no_text_becomes_a_link_in_a_chart(pages, tmp_path):
    made = {name: pages[name].read_text(encoding="utf-8") for name in ("check of slopes", "check of curves", "demo")}
    made |= {"study": folder_page(hostile_study(tmp_path / "study")), "sweep": check_page(hostile_sweep())}
    texts = {name: strings(json.loads(re.search(r'id="charts">(.*?)</script>', page, re.S)[1])["figures"])
             for name, page in made.items()}  # fmt: skip
    assert {name for name, found in texts.items() if any("evil" in text for text in found)} == made.keys() - {"demo"}
    live = re.compile(r"<(a|img|script)\b|%\{x\}")
    assert {name: found for name in texts if (found := list(filter(live.search, texts[name])))} == {}
