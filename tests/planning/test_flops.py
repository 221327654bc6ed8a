"""FLOPs compared with the closed forms and the published rows of papers."""

from collections import Counter

import pytest
from tests.planning.shapes import LLAMA_8B, gpt

from leaven.catalogue.runs import find_run
from leaven.planning.flops import flops_per_token, forward_flops, hardware_flops_per_token, utilisation
from leaven.planning.published import published_blueprint
from leaven.recipe.recipe import Recipe

MEGATRON = [(48, 6144, 64), (96, 12288, 96), (105, 20480, 128), (128, 25600, 160)]


@pytest.mark.parametrize(("n_layers", "h", "a"), MEGATRON)
def test_narayanan_2021_parameters_and_flops_with_full_recomputation(n_layers: int, h: int, a: int) -> None:
    shape, s, v = gpt(n_layers, h, a), 2048, 51_200
    equation_2 = 12 * n_layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * n_layers * h))
    assert shape.params == pytest.approx(equation_2 + 2 * h, rel=1e-12)  # it leaves out the final norm
    equation_3 = 96 * n_layers * h**2 * (1 + s / (6 * h) + v / (16 * n_layers * h))
    assert hardware_flops_per_token(shape, "full") == pytest.approx(equation_3, rel=1e-12)


def test_torchtitan_convention_6n_plus_12lds() -> None:
    shape = LLAMA_8B
    embedding = shape.vocab_size * shape.d_model
    norms = (2 * shape.n_layers + 1) * shape.d_model
    attention = 12 * shape.n_layers * shape.d_model * shape.seq_len
    assert flops_per_token(shape) == 6 * (shape.params - embedding - norms) + attention


def test_a_causal_kernel_saves_half_of_the_attention_and_nothing_else() -> None:
    saved = flops_per_token(LLAMA_8B, "full") - flops_per_token(LLAMA_8B, "causal")
    assert saved == 6 * LLAMA_8B.n_layers * LLAMA_8B.d_model * LLAMA_8B.seq_len


@pytest.mark.parametrize("window", [1, 100, 8192, 9000])
def test_a_window_counts_the_keys_that_a_query_attends_to(window: int) -> None:
    """Counted query by query; every fourth layer attends to all keys. A causal kernel skips half of the diagonal."""
    shape = LLAMA_8B.model_copy(update={"window": window, "global_every": 4})
    s = shape.seq_len
    inside = sum(min(query + 1, window) for query in range(s)) - min(window, s) / 2
    pairs = 24 * inside + 8 * (s * (s + 1) / 2 - s / 2)
    assert forward_flops(shape, "causal").attention == pytest.approx(4 * shape.d_model * pairs / s)
    full = 24 * min(window, s) + 8 * s
    assert forward_flops(shape).attention == 4 * shape.d_model * full
    assert forward_flops(shape).matrices == forward_flops(LLAMA_8B).matrices


def test_mfu_causal_mfu_and_hfu_follow_their_formulas(tiny: Recipe) -> None:
    """L 2, d 16 (q 16, kv 8), d_ff 32, V 320, T 32: N without the embedding, and 12 L d s for attention."""
    n = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32) + 320 * 16
    attention = 12 * 2 * 16 * 32
    full = 6 * n + attention
    used = utilisation(tiny.model, "none", 0.5)
    assert used == pytest.approx({"mfu": 0.5, "mfu_causal": 0.5 * (6 * n + attention / 2) / full, "hfu": 0.5})
    again = utilisation(tiny.model, "full", 0.5)
    assert again["hfu"] == pytest.approx(0.5 * (full + 2 * (n - 320 * 16) + attention / 3) / full)


def test_experts_count_for_the_tokens_that_are_sent_to_them_and_latent_attention_by_its_own_widths() -> None:
    """DeepSeek-V3 by hand: 58 sparse layers, 8 of 256 experts and a shared one; 128 heads of 192 and 128."""
    model = published_blueprint(find_run("deepseek-v3").arch, 4096)
    found = Counter({"attention.core": 3 * forward_flops(model).attention})
    for block in model.blocks:
        found.update({row.name: 3 * row.flops for row in block.matmuls})
    assert sum(found.values()) + 6 * model.embedding == flops_per_token(model)
    assert found["mlp.experts.in"] == 6 * 58 * 8 * 7168 * 2048
    assert found["mlp.shared.in"] == 6 * 58 * 7168 * 2048
    assert found["mlp.router"] == 6 * 58 * 7168 * 256
    assert found["mlp.in"] == 6 * 3 * 7168 * 18_432
    assert found["attention.core"] == 6 * 61 * 128 * (192 + 128) * 4096
    assert found["attention.key_value"] == 6 * 61 * 512 * 128 * (128 + 128)
