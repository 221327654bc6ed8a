import pytest
from tests.training.conftest import room_for

from leaven.data.tokens import TokenSet
from leaven.documents.planning import BenchSpeed
from leaven.planning.flops import flops_per_token
from leaven.recipe.recipe import Recipe
from leaven.training.bench import bench, choose


def test_every_micro_batch_up_to_every_global_batch(tiny: Recipe, tokens: TokenSet) -> None:
    stages = [{"from_tokens": 0, "tokens": 128}, {"from_tokens": 1_000, "tokens": 256}]
    recipe = tiny.replace({"batch.stages": stages, "batch.stages_rule": "scaled"})
    calls: list[tuple[int, int]] = []
    found = bench(
        recipe, tokens, [1, 2, 8], [8, 3], limit_seconds=600, on_row=lambda done, total: calls.append((done, total))
    )
    assert [(row.global_batch, row.micro_batch) for row in found.rows] == [(3, 1), (3, 2), (8, 1), (8, 2), (8, 8)]
    assert calls == [(n, 5) for n in range(6)]
    assert found.whole
    assert found.too_large == []
    for row in found.rows:
        assert row.tflops == pytest.approx(row.tokens_per_second * flops_per_token(tiny.model) / 1e12)
        assert row.mfu > 0
        assert row.peak_gib > 0.05  # python and torch at least


def test_a_ramp_starts_where_bloom_had_a_share_of_its_speed(tiny: Recipe) -> None:
    """The speeds are BLOOM's: 8 TFLOP/s on each GPU with a batch of 16, 73 with 192, and 150 with 2,048."""
    speeds = [(2, 16, 8), (4, 16, 6), (2, 192, 73), (2, 2_048, 150), (4, 2_048, 149)]
    unused = dict.fromkeys(("tflops", "mfu", "mfu_causal", "hfu", "peak_gib"), 0.0)
    rows = [
        BenchSpeed(micro_batch=micro_batch, global_batch=batch, tokens_per_second=speed, **unused)
        for micro_batch, batch, speed in speeds
    ]
    for share, start in ((0.05, 16), (0.4, 192), (0.9, 2_048)):
        chosen = choose(rows, share, tiny.model.seq_len)
        assert chosen.micro_batch == 2
        assert (chosen.ramp_start.global_batch, chosen.ramp_start.batch_tokens) == (start, start * 32)
    assert choose(rows, 0.4, 32).ramp_start.share_of_peak == pytest.approx(73 / 150)  # type: ignore[union-attr]


def test_after_out_of_memory_larger_micro_batches_are_skipped(
    tiny: Recipe, tokens: TokenSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    room_for(monkeypatch, 2)
    found = bench(tiny, tokens, [1, 2, 4, 8], [8], limit_seconds=600)
    assert [row.micro_batch for row in found.rows] == [1, 2]
    assert found.too_large == [4, 8]


def test_a_stop_or_a_limit_keeps_what_was_measured(tiny: Recipe, tokens: TokenSet) -> None:
    done: list[int] = []
    watched = {"on_row": lambda count, total: done.append(count), "stop": lambda: done[-1] == 2}
    found = bench(tiny, tokens, [1], [1, 2, 3], limit_seconds=600, **watched)
    assert [row.global_batch for row in found.rows] == [1, 2]
    assert not found.whole
    assert [row.global_batch for row in bench(tiny, tokens, [1], [1, 2], limit_seconds=0).rows] == [1]
