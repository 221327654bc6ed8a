"""Published initialisations: published numbers, a table by hand, and combinations with scaling rules."""

import math
from collections.abc import Mapping

import pytest
from pydantic import ValidationError

from leaven.catalogue.runs import find_run
from leaven.errors import InputError
from leaven.recipe.files import parse_recipe
from leaven.recipe.hyperparameters import Hyperparameters
from leaven.recipe.init_std import COMPARED, INITS, SCALES_BRANCHES, InitName
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape, Parameter, Role
from leaven.scaling.rules import RULES
from leaven.scaling.table import parameter_table
from leaven.scaling.transfer import transfer

LLAMA = {"n_layers": 4, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_head": 16, "d_ff": 144}
LLAMA |= {"vocab_size": 97, "seq_len": 32}


def matrices(**change: object) -> Mapping[str, tuple[Parameter, ModelShape]]:
    shape = ModelShape.model_validate(LLAMA | change)
    return {p.name.removesuffix(".weight"): (p, shape) for p in shape.parameters() if len(p.shape) == 2}


def std(init: str, name: str, **change: object) -> float:
    parameter, shape = matrices(**change)[name]
    return COMPARED[init].std(parameter, shape.n_layers, shape.gated)


def wide(d: int, n_layers: int = 4) -> dict[str, object]:
    return {"n_layers": n_layers, "d_model": d, "n_heads": d // 16, "n_kv_heads": d // 16, "d_ff": 4 * d}


@pytest.mark.parametrize(
    ("init", "d", "expected"),
    [
        ("mt-nlg", 14_336, "0.00482"),  # BLOOM-176B
        ("mt-nlg", 20_480, "0.00403"),  # MT-NLG 530B
        ("mt-nlg", 7_680, "0.006588"),  # BloombergGPT
        ("mt-nlg", 768, "0.02083"),
        ("small-init", 11_600, "0.00587220219514703"),  # BigScience's 104B, second try
        ("small-init", 2_048, "0.01398"),  # TinyLlama
        ("wang", 768, "0.02282"),
        ("mitchell", 4_096, "0.01562"),
        ("fan-in", 576, "0.041667"),  # SmolLM2 135M
        ("fan-in", 2_048, "0.02210"),  # StarCoder
        ("openelm", 3_072, "0.018042"),  # OpenELM 3B
        ("mup", 256, "0.08000"),  # Cerebras-GPT's base
        ("mup", 1_024, "0.04000"),
        ("gpt2", 1_024, "0.02000"),
        ("depth-scaled", 1_024, "0.02000"),
    ],
)
def test_published_stds(init: str, d: int, expected: str) -> None:
    found = std(init, "layers.1.attention.query", **wide(d))
    assert f"{found:.{len(expected) - 2}f}" == expected


@pytest.mark.parametrize(
    ("init", "run"),
    [
        ("gpt2", "gpt2-124m-llmc"),
        ("wang", "gpt-neox-20b"),
        ("wang", "pythia-70m"),
        ("mt-nlg", "bloom-176b"),
        ("tinyllama", "tinyllama-1.1b"),
        ("openelm", "openelm-3b"),
    ],
)
def test_published_runs_have_the_std_of_their_init(init: str, run: str) -> None:
    """Their configuration files, where BLOOM's says 0.0048 for 0.00482."""
    found, arch = find_run(run), find_run(run).arch
    change = wide(arch.d_model, arch.n_layers)
    assert std(init, "layers.0.mlp.in", **change) == pytest.approx(found.init_std, rel=0.005)
    for output in ("attention.out", "mlp.out"):
        assert std(init, f"layers.5.{output}", **change) == pytest.approx(found.residual_init_std, rel=0.005)


D, FF, DEPTH = 64, 144, 4
SMALL, LECUN = math.sqrt(2 / 5 / D), 1 / 8
TABLE = {  # embedding, inputs, attention.out and mlp.out of block 0 and of block 3, unembedding
    "gpt2": (0.02, 0.02, *[0.02 / math.sqrt(8)] * 4, 0.02),
    "small-init": (SMALL, SMALL, *[SMALL] * 4, SMALL),
    "mt-nlg": (1 / math.sqrt(3) / 8, 1 / math.sqrt(3) / 8, *[1 / math.sqrt(3) / 8 / math.sqrt(8)] * 4, None),
    "wang": (SMALL, SMALL, *[2 / DEPTH / 8] * 4, SMALL),
    "tinyllama": (SMALL, SMALL, *[1 / DEPTH / 8] * 4, SMALL),
    "fan-in": (LECUN, LECUN, *[LECUN, 1 / 12] * 2, LECUN),
    "openelm": (LECUN, LECUN, *[LECUN / math.sqrt(2 * DEPTH)] * 4, LECUN),
    "mitchell": (
        LECUN,
        LECUN,
        *(1 / math.sqrt(2 * D), 1 / math.sqrt(2 * FF)),
        *(1 / math.sqrt(8 * D), 1 / math.sqrt(8 * FF)),
        LECUN,
    ),
    "depth-scaled": (1.0, 0.02, *[0.02 / math.sqrt(2)] * 2, *[0.02 / math.sqrt(8)] * 2, LECUN),
}


@pytest.mark.parametrize("init", INITS)
def test_the_table_row_by_row(init: str) -> None:
    embedding, inside, attention_0, mlp_0, attention_3, mlp_3, unembedding = TABLE[init]
    assert std(init, "embedding") == pytest.approx(embedding)
    for name in ("attention.query", "attention.key", "attention.value", "mlp.gate"):
        assert std(init, f"layers.3.{name}") == pytest.approx(inside)
    for layer, attention, mlp in ((0, attention_0, mlp_0), (3, attention_3, mlp_3)):
        assert std(init, f"layers.{layer}.attention.out") == pytest.approx(attention)
        assert std(init, f"layers.{layer}.mlp.out") == pytest.approx(mlp)
    assert std(init, "unembedding") == pytest.approx(unembedding or inside)
    assert std(init, "positions", positions="learned") == pytest.approx(inside)


def test_inits_that_a_recipe_cannot_name() -> None:
    """nanochat: zero projections, q k v 1 / sqrt(d), the MLP's first matrix x0.4. DeepNet: Xavier normal, with
    (8 L)^-1/4 for MLP, value and output. muP: variance over width."""
    assert [std("nanochat", f"layers.0.{name}") for name in ("attention.out", "mlp.out")] == [0, 0]
    assert std("nanochat", "layers.0.mlp.in") == pytest.approx(0.4 / 8)
    assert (std("nanochat", "embedding"), std("nanochat", "unembedding")) == (0.8, 0.001)
    gain = 32**-0.25
    assert std("deepnet", "layers.0.attention.query") == pytest.approx(math.sqrt(2 / (D + D)))
    assert std("deepnet", "layers.0.attention.value") == pytest.approx(gain * math.sqrt(2 / (D + D / 2)))
    assert std("deepnet", "layers.0.mlp.out") == pytest.approx(gain * math.sqrt(2 / (D + FF)))
    assert std("mup", "layers.0.mlp.in", **wide(512)) / std("mup", "layers.0.mlp.in", **wide(2048)) == 2
    assert std("mup", "layers.0.mlp.out") == pytest.approx(std("mup", "layers.0.mlp.in") / math.sqrt(2 * DEPTH))
    assert COMPARED.keys() - INITS.keys() == {"nanochat", "deepnet", "mup"}


def test_a_tied_matrix_starts_as_the_unembedding() -> None:
    """torchtitan skips the embedding's N(0, 1) there: logits of RMS sqrt(d) would be the start."""
    for init in INITS:
        assert std(init, "embedding", tied_embeddings=True) == std(init, "unembedding")


def named(recipe: Recipe, init: str, **more: object) -> Recipe:
    return recipe.replace({"hyperparameters.init": init, "hyperparameters.init_std": None, **more})


def test_names_of_inits_and_rules_agree_with_the_tables() -> None:
    assert InitName.__args__ == ("rule", *INITS)
    assert {name for name, rule in RULES.items() if rule.residual.text != "1"} == SCALES_BRANCHES
    still = {name for name, rule in RULES.items() if {c.text for c in rule.cells["init_variance"].values()} == {"1"}}
    assert still == {"standard"}


def test_init_std_and_a_named_init_do_not_go_together(tiny_text: str) -> None:
    with pytest.raises(ValidationError, match="remove init_std"):
        Hyperparameters(lr=0.1, init="gpt2", init_std=0.02)
    with pytest.raises(ValidationError, match="init_std: missing; give it, or name .* gpt2, small-init"):
        Hyperparameters(lr=0.1)
    found = parse_recipe(tiny_text, "x", ["hyperparameters.init=wang", "hyperparameters.init_std="])
    assert found.hyperparameters.init == "wang"
    with pytest.raises(InputError, match="the recipe has no such value"):
        parse_recipe(tiny_text, "x", ["hyperparameters.init_sdt="])
    with pytest.raises(InputError, match="init: input should be 'rule', 'gpt2'.* not 'xavier'"):
        parse_recipe(tiny_text, "x", ["hyperparameters.init=xavier"])


WIDER, DEEPER, LONGER = {"width": 32}, {"depth": 4}, {"tokens": 40_960, "batch_tokens": 512}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("init", INITS)
def test_init_and_rule_never_both_scale_the_std(tiny: Recipe, init: str, rule: str) -> None:
    """Where a named init is allowed, the rule does not change it and no branch is scaled twice."""
    start = named(tiny, init, **{"scaling.rule": rule})
    for grown, says in ((WIDER, "would also scale this std"), (DEEPER, "the depth would count twice"), (LONGER, "")):
        scales = rule in {"completep", "complete-d-p"}
        same_at_any_depth = init in {"small-init", "fan-in"}
        refused = (grown is WIDER and rule != "standard") or (grown is DEEPER and scales and not same_at_any_depth)
        if refused:
            with pytest.raises(InputError, match=says):
                transfer(start, **grown)
            continue
        big = transfer(start, **grown)
        table = parameter_table(big)
        for row in table.rows:
            if len(row.shape) == 2:
                parameter = Parameter(row.name, row.shape, row.role, row.module, row.layer)
                assert row.init_std == INITS[init].std(parameter, big.model.n_layers, big.model.gated)
        if rule in SCALES_BRANCHES and grown is DEEPER:
            out = table["layers.3.attention.out.weight"]
            before = parameter_table(start)["layers.1.attention.out.weight"].init_std
            assert (out.multiplier, out.init_std) == (0.5, before)


def test_multipliers_of_modules_and_depth_multiply_a_named_init(tiny: Recipe) -> None:
    modules = {"attention.out": {"init_std": 3.0}, "unembedding": {"init_std": 0.0}}
    plain = parameter_table(named(tiny, "mitchell"))
    tuned = parameter_table(
        named(
            tiny,
            "mitchell",
            **{"hyperparameters.modules": modules, "hyperparameters.depth": {"init_std": (1.0, 2.0)}},
        )
    )
    for name, factor in {
        "layers.0.attention.out.weight": 3.0,
        "layers.1.attention.out.weight": 6.0,
        "layers.1.mlp.out.weight": 2.0,
        "embedding.weight": 1.0,
        "unembedding.weight": 0.0,
    }.items():
        assert tuned[name].init_std == pytest.approx(factor * plain[name].init_std)
    assert all(tuned[row.name].init_std == 0 for row in plain.rows if row.role in {Role.HIDDEN_NORM, Role.QK_NORM})
