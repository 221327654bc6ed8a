"""Parameters from a published shape, against counts that somebody else published."""

import pytest

from leaven.catalogue.counting import count_parameters
from leaven.catalogue.runs import load_runs

RUNS = {run.id: run for run in load_runs()}
COMPLETE = [id for id, run in RUNS.items() if run.params_from_shape is not None]


def test_only_three_shapes_are_incomplete() -> None:
    """All others are held to the published count, or their file is refused: tests/catalogue/test_files.py."""
    assert set(RUNS) - set(COMPLETE) == {"glam-1.2t", "idefics-80b", "mimo-v2-flash"}


# Trained and published by others; of experts, what a token passes through.
ACTIVE = {
    "olmoe-1b-7b": 1.28e9,
    "deepseek-moe-16b": 2.8e9,
    "deepseek-v2": 21e9,
    "deepseek-v3": 37e9,
    "kimi-k2": 32.6e9,
    "moonlight-16b-a3b": 2.87e9,
}


@pytest.mark.parametrize(("id", "published"), ACTIVE.items())
def test_the_active_parameters_of_experts_are_those_published(id: str, published: float) -> None:
    run = RUNS[id]
    assert run.data is not None
    count = count_parameters(run.arch, run.data.seq_len)
    assert count is not None
    assert run.params_active == pytest.approx(published, rel=1e-3)
    assert count.active == pytest.approx(published, rel=0.03)
    assert count.total == pytest.approx(run.params_total, rel=0.03)


def test_layerwise_widths_are_those_of_the_released_model() -> None:
    """OpenELM 270M by hand: 12 to 20 query heads of 64 over 16 layers, FFNs of 768 to 5120."""
    run = RUNS["openelm-270m"]
    heads = [12] * 5 + [16] * 7 + [20] * 4
    widths = [*range(768, 1793, 256), 2048, *range(2560, 3841, 256), *range(4352, 5121, 256)]
    layers = sum(
        1280 * 64 * (2 * h + 2 * h // 4) + 3 * 1280 * f + 2 * 1280 + 2 * 64
        for h, f in zip(heads, widths, strict=True)
    )
    assert run.params_from_shape == layers + 32_128 * 1280 + 1280


def test_every_stated_std_is_what_its_formula_gives() -> None:
    formulas = {
        "sqrt(2/(5*d_model))": lambda d, n: (2 / (5 * d)) ** 0.5,
        "1/sqrt(d_model)": lambda d, n: d**-0.5,
        "sqrt(1/(3*d_model))": lambda d, n: (1 / (3 * d)) ** 0.5,
        "2/(n_layers*sqrt(d_model))": lambda d, n: 2 / (n * d**0.5),
        "1/(n_layers*sqrt(d_model))": lambda d, n: 1 / (n * d**0.5),
        "1/sqrt(d_model)/sqrt(2*n_layers)": lambda d, n: d**-0.5 / (2 * n) ** 0.5,
    }
    checked = 0
    for run in RUNS.values():
        if run.init is None:
            continue
        for formula, std in (
            (run.init.std_formula, run.init.std),
            (run.init.residual_std_formula, run.init.residual_std),
        ):
            if formula in formulas and std is not None:
                assert formulas[formula](run.arch.d_model, run.arch.n_layers) == pytest.approx(std, rel=0.01), run.id
                checked += 1
    assert checked >= 27
