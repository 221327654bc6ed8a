"""The published runs in leaven's terms, and the search for the nearest ones."""

import pytest
from tests.catalogue.published import model_shape

from leaven.catalogue.neighbours import nearest, size_ratio
from leaven.catalogue.runs import Stack, find_run, load_runs
from leaven.errors import InputError

BUILDABLE = 57  # pre-norm, ordinary attention, nothing in parallel


def test_a_model_that_leaven_can_build_has_the_published_parameter_count() -> None:
    shapes = {run.id: shape for run in load_runs() if (shape := model_shape(run)) is not None}
    assert len(shapes) == BUILDABLE
    for id, shape in shapes.items():
        run = find_run(id)
        within = 0 if run.params.precision == "exact" else 0.03
        assert shape.params == pytest.approx(run.params_total + (run.params.shape_excess or 0), rel=within), id


def test_published_values_in_the_terms_of_leaven() -> None:
    bloom = find_run("bloom-176b")
    assert bloom.decay == "cosine"
    assert bloom.warmup_fraction == pytest.approx(375e6 / 366e9, rel=1e-4)
    assert bloom.residual_init_std == pytest.approx(0.0048 / 140**0.5)
    pythia = find_run("pythia-70m")
    assert pythia.warmup_fraction == pytest.approx(0.01)
    assert pythia.init_std == pytest.approx((2 / (5 * 512)) ** 0.5, rel=1e-4)
    assert pythia.residual_init_std == pytest.approx(2 / (6 * 512**0.5), rel=1e-4)
    assert find_run("smollm2-135m").decay == "wsd"
    assert find_run("olmo2-7b").residual_init_std == 0.02  # the same std everywhere
    assert find_run("dclm-411m-1x").residual_init_std is None  # differs from layer to layer
    assert find_run("llama1-65b").init_std is None
    assert find_run("olmoe-1b-7b").tokens_per_parameter == pytest.approx(5.1e12 / 1.28e9)  # that a token uses
    assert find_run("gpt3-175b").lr_sources == (
        "Language Models are Few-Shot Learners (arXiv 2005.14165), Table 2.1",  # the field's own, not the group's
    )


def test_nearest_stays_within_the_factor_unless_it_has_no_run() -> None:
    found = nearest(1_000_000_000, 10**12, limit=200, factor=1.2)
    assert {run.id for run, _ in found} == {
        *("pythia-1b", "bloom-1b1", "tinyllama-1.1b", "olmo-1b", "starcoderbase-1b")
    }
    assert all(size_ratio(run, 1_000_000_000) <= 1.2 for run, _ in found)
    (beyond, _), *_ = nearest(5_000_000, 10**9, limit=1)  # nothing there: the nearest all the same
    assert size_ratio(beyond, 5_000_000) == pytest.approx(70_426_624 / 5e6)
    with pytest.raises(InputError, match="at least 1"):
        nearest(10**9, 10**9, limit=1, factor=0.5)


def test_the_same_stack_comes_before_the_same_size() -> None:
    stack = Stack(norm_placement="output", qk_norm=True, optimizer="adamw")
    assert nearest(6_900_000_000, 2 * 10**12, limit=1)[0][0].id == "olmo-7b"
    found = [run.id for run, _ in nearest(6_900_000_000, 2 * 10**12, limit=3, stack=stack)]
    assert found[:2] == ["olmo2-7b", "olmo-7b"]  # the rest of the OLMo 2 lineage has no second vote
    assert stack.fits(find_run("olmo2-32b").stack)
    assert Stack(optimizer="adamw").fits(find_run("gpt3-175b").stack)  # adam with decay 0.1 is what AdamW does
    assert not Stack(qk_norm=True).fits(find_run("mimo-v2-flash").stack)  # not known to have it


def test_another_kind_or_optimizer_has_its_own_neighbours() -> None:
    assert [run.id for run, _ in nearest(7 * 10**9, 5 * 10**12, limit=1, kind="moe")] == ["olmoe-1b-7b"]
    muon = nearest(16 * 10**9, 5 * 10**12, limit=9, kind="moe", stack=Stack(optimizer="muon"))
    assert [run.id for run, _ in muon] == ["moonlight-16b-a3b"]
    with pytest.raises(InputError, match="no published vlm run with adam or adamw"):
        nearest(80 * 10**9, 10**11, limit=1, kind="vlm")


def test_incomparable_learning_rates_are_left_out() -> None:
    by_mup = find_run("cerebras-gpt-2.7b-mup")
    found = {run.id for run, _ in nearest(by_mup.params_total, by_mup.tokens or 0)}
    assert "cerebras-gpt-2.7b" in found
    assert not {by_mup.id, "apertus-8b"} & found  # muP; AdEMAMix


def test_an_octave_of_tokens_counts_as_an_eighth_of_an_octave_of_parameters() -> None:
    run = find_run("mt-nlg-530b")
    assert nearest(run.params_total * 2, run.tokens, limit=1)[0] == (run, pytest.approx(1.0))
    assert nearest(run.params_total, run.tokens * 4, limit=1)[0] == (run, pytest.approx(0.25))
