"""The layout search compared with a plain loop over all layouts."""

import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.planning.shapes import LLAMA_8B, SMALL, gpt, plan

from leaven.errors import InputError
from leaven.planning.arrangement import Arrangement, parse_layout, shape_refusal
from leaven.planning.hardware import parse_cluster
from leaven.planning.layouts import Exploration, Job, LayoutCandidate, explore, layouts, ranked
from leaven.planning.training_codes import LEAVEN_BF16, TrainingCode, training_code
from leaven.recipe.batch import Batch
from leaven.recipe.layout import Layout
from leaven.recipe.shape import ModelShape

LONG = LLAMA_8B.model_copy(update={"n_layers": 6, "n_heads": 16, "d_model": 2048, "n_kv_heads": 4, "d_ff": 6144})
DEEP = LLAMA_8B.model_copy(update={"seq_len": 2048})


def everything(job: Job) -> list[LayoutCandidate]:
    """Evaluate every arrangement, without the order and the early end of the search."""
    gpus, node, found = job.cluster.gpus, job.cluster.accelerator.node_size, []
    layers, seq_len = job.model.n_layers, job.model.seq_len
    degrees = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for tp, pp, cp, zero, replicate, v, recompute in product(
        degrees, degrees, degrees, range(4), degrees, (1, 2, 4, 8), ("none", "full")
    ):
        dp, rest = divmod(gpus, tp * pp * cp)
        if rest or not dp or tp > node or (gpus > node and node % tp) or (pp > 1 and zero > 1):
            continue
        if (cp > 1 and seq_len // cp < 4096) or (dp * cp == 1 and zero) or pp * v > layers:
            continue
        shared_by = dp // replicate
        in_node = max(1, node // (tp * cp))
        if replicate > 1 and (zero < 3 or shared_by not in {n * in_node for n in (1, 2, 4, 8)} or shared_by == 1):
            continue
        schedule = "interleaved" if v > 1 else "1f1b"
        try:
            layout = Layout.model_validate(
                {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "zero": zero, "dp_replicate": replicate}
                | {"stages_per_rank": v, "recompute": recompute, "schedule": schedule}
            )
            if shape_refusal(job.model, layout) is None:
                possible = job.arrangements(layout)
                found += [LayoutCandidate(job, how) for how in possible]
        except (ValidationError, InputError):
            continue
    return found


@settings(max_examples=12)
@given(
    st.sampled_from([SMALL, LONG, DEEP]),
    st.sampled_from(["4xA100-40GB", "6xH100", "8xA100-40GB", "16xH100", "24xL40S"]),
    st.sampled_from([24, 64, 96]),
)
def test_the_search_misses_nothing(model: object, gpus: str, sequences: int) -> None:
    job = Job(model, Batch(tokens=sequences * model.seq_len), parse_cluster(gpus))  # type: ignore[arg-type, attr-defined]
    seen, there = explore(job), [one for one in everything(job) if one.fits]
    assert {one.arrangement for one in seen.fitting} == {one.arrangement for one in there}
    if there:
        trained = [one for one in there if one.trained]
        assert seen.choices[0].time == ranked(trained)[0].time


def test_megatron_interleaves_only_even_stages_and_whole_groups_of_micro_batches() -> None:
    """Megatron-LM stops at other schedules: training/arguments.py and core/pipeline_parallel/schedules.py."""
    megatron = training_code("megatron-flash")
    for n_layers, sequences in ((12, 24), (12, 20), (14, 24)):
        model = LONG.model_copy(update={"n_layers": n_layers})
        job = Job(model, Batch(tokens=sequences * model.seq_len), parse_cluster("8xA100-40GB"), by_leaven=False)

        def interleaved(code: TrainingCode, job: Job = job) -> list[Arrangement]:
            found = [one.arrangement for one in explore(replace(job, code=code)).fitting]
            return [how for how in found if how.layout.stages_per_rank > 1]

        possible = interleaved(replace(megatron, even_stages=False))
        even = [
            how
            for how in possible
            if how.grad_accumulation % how.layout.pp == 0
            and n_layers % (how.layout.pp * how.layout.stages_per_rank) == 0
        ]
        assert len(possible) > len(even)
        assert set(interleaved(megatron)) == set(even)
        assert bool(even) == (n_layers == 12)


def test_the_pareto_front_has_every_layout_that_no_other_beats() -> None:
    found = plan(LONG, 2**20, "16xH100", by_leaven=False).exploration
    assert len(found.pareto) > 2
    for one in found.fitting:
        beaten = any(
            o.time.step <= one.time.step and o.memory.total <= one.memory.total for o in found.pareto if o is not one
        )
        assert beaten != (one in found.pareto)


def test_tensor_parallel_groups_lie_in_a_node() -> None:
    def degrees(model: ModelShape, gpus: str) -> set[int]:
        return {layout.tp for layout in layouts(Job(model, Batch(tokens=2**16), parse_cluster(gpus)))}

    assert degrees(SMALL, "6xH100") == {1, 2}
    twelve = SMALL.model_copy(update={"vocab_size": 32_256, "d_ff": 2304, "seq_len": 768})
    assert degrees(twelve, "6xH100") == {1, 2, 3, 6}
    assert degrees(twelve, "48xH100") == {1, 2, 4}


def test_layouts_that_leaven_cannot_train_are_reported_and_not_chosen() -> None:
    job = Job(LONG, Batch(tokens=64 * LONG.seq_len), parse_cluster("16xH100"))
    seen = explore(job)
    assert all(one.trained for one in seen.choices)
    slow, fast = ranked([one for one in seen.fitting if one.arrangement.layout.cp == 1])[:2]
    beyond = next(one for one in seen.fitting if one.arrangement.layout.cp == 2)
    nothing = Exploration(job, (beyond,), (), None)
    assert nothing.untrained is beyond
    assert Exploration(job, (slow, fast, beyond), (), None).untrained is (
        beyond if beyond.time.step < 0.98 * slow.time.step else None
    )
    others = explore(replace(job, by_leaven=False))
    assert others.untrained is None
    assert others.choices == others.fitting


@pytest.mark.parametrize(
    ("gpus", "sequences", "fewer"),
    [(513, 512, 512), (26, 64, 24), (9_999_999, 512, 2048)],  # the last is dp 512 x tp 4
)
def test_a_number_of_gpus_that_no_layout_divides_names_the_nearest(gpus: int, sequences: int, fewer: int) -> None:
    with pytest.raises(InputError, match=rf"over {gpus}xH100[^;]*; {fewer:,} GPUs would work$"):
        plan(SMALL, sequences * 1024, f"{gpus}xH100")
    assert plan(SMALL, sequences * 1024, f"{fewer}xH100").chosen.fits


@pytest.mark.parametrize(
    ("gpus", "micro_batch", "message"),
    [
        (128, 8, "micro-batches of 8 over .* would work; "),
        (7, 3, "dp 7 x micro-batch 3; .* would work; "),
        (2048, 8, ""),
    ],
)
def test_an_error_names_the_micro_batch_only_if_auto_would_work(gpus: int, micro_batch: int, message: str) -> None:
    deep = SMALL.model_copy(update={"n_layers": 14})
    with pytest.raises(InputError) as raised:
        plan(deep, Batch(tokens=2**16, micro_batch=micro_batch), f"{gpus}xH100")
    assert ("--set batch.micro_batch=auto" in str(raised.value)) == bool(message)
    assert re.search(message, str(raised.value))
    if message:
        assert plan(deep, 2**16, f"{gpus}xH100").chosen.fits


def test_an_error_names_a_vocabulary_that_tp_divides() -> None:
    odd = gpt(128, 25_600, 160, vocab=50_257)
    with pytest.raises(InputError, match="a vocabulary of 50,304 instead of 50,257 would fit, since tp divides it"):
        plan(odd, 3072 * 2048, "3072xA100-80GB")
    padded = odd.model_copy(update={"vocab_size": 50_304})
    assert plan(padded, 3072 * 2048, "3072xA100-80GB").chosen.fits


def test_an_error_names_a_layout_that_leaven_cannot_train_but_fits() -> None:
    with pytest.raises(InputError, match="; leaven can plan and export, but not train, --layout ") as raised:
        plan(LLAMA_8B, 256 * 8192, "4096xH100-80GB")
    written = str(raised.value).rsplit("--layout ", 1)[1]
    layout, _ = parse_layout(written, 4096)
    assert layout.cp > 1
    assert plan(LLAMA_8B, 256 * 8192, "4096xH100-80GB", written).chosen.fits


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_model_that_waits_for_the_host_is_not_split(gpus: int) -> None:
    """Kernels of a small model are short: splitting it makes them shorter, and does not make the host faster."""
    small = gpt(8, 256, 4, 4_096, 512, dropout=0.0)
    job = Job(small, Batch(tokens=64 * 512), parse_cluster(f"{gpus}xH100-SXM-80GB"), LEAVEN_BF16)
    chosen = explore(job).fitting[0]
    assert chosen.time.host > 0.5 * chosen.time.step
    assert (chosen.arrangement.layout.tp, chosen.arrangement.layout.pp) == (1, 1)


def test_a_small_model_with_short_sequences_has_few_large_micro_batches() -> None:
    """The time of the host grows with their number."""
    small = gpt(4, 256, 4, 4_096, 256, dropout=0.0)
    found = explore(
        Job(small, Batch(tokens=2**18), parse_cluster("1xH100-SXM-80GB"), LEAVEN_BF16, compile=True)
    ).fitting
    assert found[0].arrangement.micro_batch == 256  # 65,536 tokens
    of_64 = next(one for one in found if one.arrangement.micro_batch == 64)
    assert of_64.time.step > 3 * found[0].time.step
