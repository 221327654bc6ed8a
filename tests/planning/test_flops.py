"""FLOPs against the closed forms of the papers, and their published rows."""

import pytest
from tests.planning.shapes import LLAMA_8B, gpt

from leaven.planning.flops import flops_per_token, hardware_flops_per_token

MEGATRON = [(48, 6144, 64), (96, 12288, 96), (105, 20480, 128), (128, 25600, 160)]


@pytest.mark.parametrize(("n_layers", "h", "a"), MEGATRON)
def test_narayanan_2021_parameters(n_layers: int, h: int, a: int) -> None:
    shape = gpt(n_layers, h, a)
    closed = 12 * n_layers * h**2 * (1 + 13 / (12 * h) + (51_200 + 2048) / (12 * n_layers * h))
    assert shape.params == pytest.approx(closed + 2 * h, rel=1e-12)  # equation 2 leaves out the final norm


@pytest.mark.parametrize(("n_layers", "h", "a"), MEGATRON)
def test_narayanan_2021_flops_with_full_recomputation(n_layers: int, h: int, a: int) -> None:
    shape, s, v = gpt(n_layers, h, a), 2048, 51_200
    equation_3 = 96 * n_layers * h**2 * (1 + s / (6 * h) + v / (16 * n_layers * h))
    assert hardware_flops_per_token(shape, "full") == pytest.approx(equation_3, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "seconds", "mfu"),
    [
        (MEGATRON[0], 8, 4, 1.10, 41.5),
        (MEGATRON[1], 64, 64, 13.75, 51.4),
        (MEGATRON[2], 280, 280, 37.83, 56.0),
        (MEGATRON[3], 512, 512, 71.49, 56.3),
    ],
)
def test_korthikanti_2022_table_5_mfu_within_0_2_points(
    model: tuple[int, int, int], gpus: int, batch: int, seconds: float, mfu: float
) -> None:
    done = flops_per_token(gpt(*model)) * batch * 2048 / seconds
    assert 100 * done / (gpus * 312e12) == pytest.approx(mfu, abs=0.2)


def test_korthikanti_2022_counts_recomputed_attention_three_times() -> None:
    # Table 5, 22B: HFU 43.7. Its equation has s/(3h), which is three attention forwards above the model's.
    shape = gpt(48, 6144, 64)
    seconds, tokens, peak = 1.10, 4 * 2048, 8 * 312e12
    model, once = flops_per_token(shape), hardware_flops_per_token(shape, "selective")
    printed = model + 3 * (once - model)
    assert 100 * printed * tokens / seconds / peak == pytest.approx(43.7, abs=0.2)
    assert 100 * once * tokens / seconds / peak == pytest.approx(42.2, abs=0.2)


def test_torchtitan_convention_6n_plus_12lds() -> None:
    shape = LLAMA_8B
    embedding = shape.vocab_size * shape.d_model
    norms = (2 * shape.n_layers + 1) * shape.d_model
    attention = 12 * shape.n_layers * shape.d_model * shape.seq_len
    assert flops_per_token(shape) == 6 * (shape.params - embedding - norms) + attention


def test_a_causal_kernel_saves_half_of_the_attention_and_nothing_else() -> None:
    saved = flops_per_token(LLAMA_8B, "full") - flops_per_token(LLAMA_8B, "causal")
    assert saved == 6 * LLAMA_8B.n_layers * LLAMA_8B.d_model * LLAMA_8B.seq_len


@pytest.mark.parametrize(
    ("iteration_seconds", "heads", "tflops"), [(102.03, 64, 153.68), (105.89, 128, 148.08)], ids=["L947", "L949"]
)
def test_bloom_176b_tflops_from_its_iteration_times(iteration_seconds: float, heads: int, tflops: float) -> None:
    shape = gpt(70, 14_336, heads, vocab=250_880)
    done = hardware_flops_per_token(shape, "full") * 2048 * 2048
    assert done / iteration_seconds / 384 / 1e12 == pytest.approx(tflops, rel=1e-3)
