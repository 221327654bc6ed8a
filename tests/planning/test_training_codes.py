"""Bytes a parameter, by part."""

import pytest
from tests.planning.shapes import MEGATRON_BF16, NANOTRON

from leaven.planning.training_codes import LEAVEN_BF16, TrainingCode, states

FP32 = TrainingCode(compute_copy=0)


def gb(code: TrainingCode) -> dict[str, float]:
    return {state.name: state.bytes / 1e9 for state in states(7e9, code)}


def test_7b_in_fp32_with_adam_are_112_gb_and_140_only_with_a_master_copy_beside() -> None:
    assert gb(FP32) == {"weights": 28, "gradients": 28, "moments": 56}
    assert sum(gb(FP32).values()) == 112
    twice = TrainingCode(optimizer=12, master=4, compute_copy=0)
    assert sum(gb(twice).values()) == 140
    assert gb(twice)["master weights"] == 28


@pytest.mark.parametrize(("code", "each"), [(LEAVEN_BF16, 16), (NANOTRON, 20), (MEGATRON_BF16, 20)])
def test_bytes_a_parameter_of_other_codes(code: TrainingCode, each: int) -> None:
    found = states(1.0, code)
    assert sum(state.bytes_each for state in found) == each == sum(state.bytes for state in found)
    assert all(state.why for state in found)


def test_moments_of_8_bits_and_of_muon() -> None:
    assert sum(gb(FP32.with_moments("adam-8bit")).values()) == 7 * (4 + 4 + 2)
    muon = NANOTRON.with_moments("muon")
    assert (muon.optimizer, muon.optimizer_of_matrices) == (12, 8)
    assert muon.with_moments("adam") == NANOTRON
    kept = {state.name: state.bytes / 1e9 for state in states(7e9, FP32.with_moments("muon"), matrices=6e9)}
    assert kept == {"weights": 28, "gradients": 28, "momentum of matrices": 24, "moments": 8}
