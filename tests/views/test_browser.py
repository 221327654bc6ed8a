"""The page in a real browser: it draws, it stays inside its window, it asks for nothing, it follows the theme."""

from pathlib import Path

import pytest
import studied
from chromium import BINARY, Browser
from planned import planned
from written import HOSTILE, slopes_check, write_demo, write_losses_check

from leaven.views.catalogue import write_catalogue
from leaven.views.checks import write_check
from leaven.views.page import write_page
from leaven.views.plan import write_plan

pytestmark = [
    pytest.mark.skipif(BINARY is None, reason="no chromium or google-chrome on the PATH"),
    pytest.mark.xdist_group("browser"),  # one browser, and one set of pages
]

# Elements that reach beyond the window and do not lie in a box that scrolls.
OVERFLOWING = """[...document.querySelectorAll("main *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > document.documentElement.clientWidth + 1 && !e.closest(".scroll");
}).map(e => e.tagName + "." + e.getAttribute("class"))"""
MARKS = """Object.fromEntries([...document.querySelectorAll(".chart")].map(c =>
  [c.id, c.querySelectorAll(".scatterlayer .point, .scatterlayer path.js-line, .barlayer .point").length]))"""
# Charts are drawn anew, a little later, when the window changes.
FITTED = """[...document.querySelectorAll(".chart")].every(c =>
  Math.abs(c.querySelector(".main-svg")?.getBoundingClientRect().width - c.clientWidth) <= 1)"""
# Axis and tick labels that stick out of their chart.
CLIPPED = """[...document.querySelectorAll(".chart")].flatMap(c => {
  const box = c.getBoundingClientRect();
  return [...c.querySelectorAll("text")].filter(t => {
    const r = t.getBoundingClientRect();
    const [across, down] = [[r.left, r.right, box.left, box.right], [r.top, r.bottom, box.top, box.bottom]];
    return r.width && [across, down].some(([a, b, low, high]) => a < low - 1 || b > high + 1);
  }).map(t => c.id + ": " + t.textContent);
})"""


@pytest.fixture(scope="module")
def pages(demo_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    modules = studied.study()
    searches = {"modules": modules, "durations": studied.durations(studied.study(4, 30, 1)),
                "lost": studied.all_diverged(modules)}  # fmt: skip
    return {
        **{
            name: write_page(studied.write(folder / name, study), folder / f"{name}.html")
            for name, study in searches.items()
        },
        "demo": write_page(demo_folder, folder / "demo.html"),
        "run": write_page(demo_folder / "runs/copied", folder / "run.html"),
        "catalogue": write_catalogue(folder / "catalogue.html"),
        "check of slopes": write_check(slopes_check(), folder / "slopes.html"),
        "check of runs": write_page(write_losses_check(folder / "check"), folder / "losses.html"),
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize(
    "kind", ["demo", "modules", "durations", "lost", "run", "catalogue", "check of slopes", "check of runs"]
)
def test_a_page_draws_and_stays_inside_its_window(browser: Browser, pages: dict[str, Path], kind: str):
    draws_and_stays_inside(browser, pages[kind], *((390, 1600) if kind == "demo" else (390,)))


def test_a_demo_as_it_was_left_draws(browser: Browser, real_demo: Path):
    draws_and_stays_inside(browser, real_demo / "report.html", 390, 1280)


DRAWN = ("1f1b", "zero-bubble", "too large")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    return {way: write_plan(folder / f"{way}.html", planned(way), "rye", "leaven plan rye.toml") for way in DRAWN}


@pytest.mark.parametrize("way", DRAWN)
def test_a_plan_draws_and_stays_inside_its_window(browser: Browser, plans: dict[str, Path], way: str):
    draws_and_stays_inside(browser, plans[way], 390)


def draws_and_stays_inside(browser: Browser, page: Path, *widths: int) -> None:
    """A page that is opened in a window of the first width, which then gets the others."""
    browser.window(widths[0])
    browser.open(page)
    for width in widths:
        browser.window(width)
        browser.until(FITTED)
        assert browser.complaints == []
        assert browser.requests == [page.resolve().as_uri()]
        assert browser.evaluate("document.documentElement.dataset.charts") == "drawn"
        marks = browser.evaluate(MARKS)
        assert marks
        assert all(marks.values()), marks
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.evaluate(OVERFLOWING) == []
        assert browser.evaluate(CLIPPED) == []


def test_charts_follow_the_theme_and_paper_is_light(browser: Browser, pages: dict[str, Path]):
    ink = "getComputedStyle(document.querySelector('#chart-loss .xtick text')).fill"
    browser.window(1280)
    browser.open(pages["demo"])
    light = browser.evaluate(ink)
    browser.window(1280, dark=True)
    browser.until(f"{ink} !== '{light}'")
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    browser.until(f"{ink} === '{light}'")
    assert browser.evaluate("document.querySelector('#chart-loss .main-svg').clientWidth") <= 680
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    browser.until(f"{ink} !== '{light}'")


def test_tables_sort_and_runs_can_be_hidden(browser: Browser, pages: dict[str, Path]):
    browser.window(1280)
    browser.open(pages["demo"])
    first = "[...document.querySelectorAll('.parameters tbody.summary tr')].map(r => r.cells[0].textContent)"
    before = browser.evaluate(first)
    browser.evaluate("document.querySelector('.parameters th button').click()")
    assert browser.evaluate(first) == sorted(before)
    browser.evaluate("document.getElementById('by-layer').click()")
    shown = "[...document.querySelectorAll('.parameters tbody')].map(b => b.getClientRects().length > 0)"
    assert browser.evaluate(shown) == [False, True]
    dots = "document.querySelectorAll('#chart-loss .point').length"
    all_dots = browser.evaluate(dots)
    browser.evaluate("document.querySelector('.legend button').click()")
    browser.until(f"{dots} < {all_dots}")


def test_a_study_tells_its_first_trials_and_all_on_request(browser: Browser, pages: dict[str, Path]):
    browser.window(1280)
    browser.open(pages["modules"])
    shown = "[...document.querySelectorAll('.trials tbody tr')].filter(r => r.getClientRects().length)"
    numbers = f"{shown}.map(r => +r.cells[0].textContent)"
    assert len(browser.evaluate(numbers)) == 30
    browser.evaluate("document.querySelector('.trials th button').click()")
    assert browser.evaluate(numbers) == list(range(30))  # the first in the new order
    browser.evaluate("document.querySelector('.all-rows').click()")
    assert browser.evaluate(numbers) == list(range(64))
    told = "document.querySelector('.multipliers').closest('section').querySelector('.readout').textContent"
    browser.evaluate("document.querySelector('.multipliers svg').dispatchEvent(new Event('click', {bubbles: true}))")
    assert browser.evaluate(told).startswith("every block, lr, layer by layer: ")


def test_hostile_words_are_only_words(browser: Browser, tmp_path: Path):
    page = write_page(write_demo(tmp_path / "demo", hostile=HOSTILE), tmp_path / "report.html")
    browser.window(390)
    browser.open(page)
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.evaluate("window.owned") is None
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate(OVERFLOWING) == []
