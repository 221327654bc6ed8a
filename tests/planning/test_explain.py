"""Explanations why a layout was not chosen are true and have the right numbers."""

import re

import pytest
from tests.planning.shapes import LLAMA_8B, plan

from leaven.documents.planning import Explanation
from leaven.planning.arrangement import Arrangement
from leaven.planning.explain import PARTS, explain, not_lines
from leaven.planning.layouts import LayoutCandidate
from leaven.planning.plan import ClusterPlan
from leaven.recipe.batch import Batch
from leaven.recipe.layout import Layout


@pytest.fixture(scope="module")
def llama() -> ClusterPlan:
    return plan(LLAMA_8B, Batch(tokens=4_194_304, micro_batch=1), "64xH100-80GB", "dp=64,zero=3")


def explained(plan: ClusterPlan, asked: str) -> Explanation:
    return explain(plan.exploration, plan.chosen, asked)


def test_an_explained_layout_is_compared_part_by_part(llama: ClusterPlan) -> None:
    found = explained(llama, "tp=8")
    tp8 = [one for one in llama.exploration.choices if one.arrangement.layout.tp == 8]
    fastest = min(tp8, key=lambda one: one.time.step)
    assert found.layout["tp"] == 8
    assert found.step_seconds == pytest.approx(fastest.time.step, rel=0.01)  # times within 1% are equal
    assert found.line.startswith(f"{found.step_seconds / llama.chosen.time.step - 1:+.1%} time, ")
    assert f"all-reduce {found.seconds['tensor_parallel'].asked / found.step_seconds:.0%} of the step" in found.line
    assert sum(part.asked for part in found.seconds.values()) == pytest.approx(found.step_seconds)
    assert sum(part.chosen for part in found.seconds.values()) == pytest.approx(llama.chosen.time.step)
    memory = LayoutCandidate(llama.job, Arrangement.read(found.layout)).memory
    assert sum(part.asked for part in found.gib.values()) == pytest.approx(memory.total / 2**30)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("mbs=3", "split evenly over dp 64 x micro-batch 3; a batch of .* tokens or micro-batch 1, 2, 4 or 8 would"),
        ("dp=3", "64 GPUs are not divisible by 3"),
        ("ep=2", "no experts to distribute"),
        ("cp=3", "seq_len 8192 is not divisible by 2 x 3"),
        ("dp=64,zero=0,mbs=1", r"needs \d+\.\d GiB, limit 68 of 80 GiB"),
    ],
)
def test_impossible_layouts_are_explained(llama: ClusterPlan, asked: str, message: str) -> None:
    found = explained(llama, asked)
    assert (found.fits, found.step_seconds) == (False, None)
    assert re.search(message, found.line), found.line


def test_the_choice_itself_and_what_is_not_searched(llama: ClusterPlan) -> None:
    best = plan(LLAMA_8B, 4_194_304, "64xH100-80GB")
    assert explained(best, f"zero={best.chosen.arrangement.layout.zero}").line == "this is the chosen layout"
    assert "the search leaves out ZeRO 3 with a pipeline" in explained(llama, "zero=3,pp=2").line
    assert "cannot train with it" in explained(llama, "cp=2").line


def test_the_not_lines_name_neighbours_and_are_true() -> None:
    found = plan(LLAMA_8B, 512 * 8192, "64xH100-80GB")
    assert not_lines(found.exploration, found.chosen)
    own = {key: str(getattr(found.chosen.arrangement.layout, key)) for key in ("tp", "pp", "zero", "recompute")}
    for line in not_lines(found.exploration, found.chosen):
        key, value, *others = line.split(":")[0].split(maxsplit=2)
        assert own[key] != value
        fitting = [one for one in found.exploration.layouts if str(getattr(one.arrangement.layout, key)) == value]
        alike = [one for one in fitting if differ(one.arrangement.layout, found.chosen.arrangement.layout) == {key}]
        if "needs" in line:
            assert not alike
            continue
        assert bool(alike) is not bool(others)
        fastest = (alike or fitting)[0]
        assert fastest.time.step > 1.03 * found.chosen.time.step
        more = {part: seconds - vars(found.chosen.time)[part] for part, seconds in vars(fastest.time).items()}
        grown = PARTS[max(more, key=more.__getitem__)]
        assert grown in line


def differ(one: Layout, other: Layout) -> set[str]:
    return {key for key in ("tp", "pp", "zero", "recompute") if getattr(one, key) != getattr(other, key)}
