"""Layouts with which torch or gloo would compute wrong results, hang or abort are refused before anything starts.

test_layouts.py covers two more, because all its layouts evaluate between steps of a ramp: the evaluation of torch's
schedules changes the state that they keep for training, and two schedules with the same stages lose gradients.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.distributed.cases import CPU, sharded
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import layout

from leaven.distributed.compat import pretend
from leaven.distributed.pipeline import SCHEDULES
from leaven.distributed.process_group import ProcessGroup, join_process_group
from leaven.distributed.sharded_model import build_stage
from leaven.errors import InputError
from leaven.model.transformer import Stage
from leaven.planning.trainable import require_trainable
from leaven.recipe.files import parse_recipe, render
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.scaling.table import parameter_table

FOUR = {"model.n_heads": 4, "model.n_kv_heads": 4, "model.d_head": 4, "model.n_layers": 4}
RAMP = {"batch.ramp": {"start_tokens": 64, "increment_tokens": 64, "over_tokens": 256}}

REFUSED = {
    # Ranks would have parts of different lengths, and gloo would abort the process at the first collective.
    "a sequence that tensor ranks cannot share": (
        layout(tp=4) | {"model.seq_len": 30, "batch.tokens": 240},
        r"tp=4: .*seq_len 30 are not all divisible by 4; tp of 1 or 2 works",
    ),
    "a vocabulary that they cannot share": (layout(tp=4) | {"model.vocab_size": 322}, "vocabulary of 322"),
    "fewer kv heads than tensor ranks": (layout(tp=4) | {"model.n_kv_heads": 2}, "2 kv heads.*tp of 1 or 2 works"),
    # 1F1B would wait for a micro-batch that never comes.
    "fewer micro-batches than stages": (
        layout(pp=4) | {"batch.micro_batch": 4},
        r"pp=4: the smallest batch of 8 sequences gives a rank only 2 micro-batches, and 60% .* lower",
    ),
    "fewer of them where the ramp begins": (layout(pp=4) | RAMP, "the smallest batch of 2 sequences"),
    # A stage without layers hangs.
    "fewer layers than stages": (layout(pp=8), r"pp=8: there are only 4 layers"),
    "fewer layers than stages of several on a rank": (
        layout(pp=4, schedule="interleaved", stages_per_rank=2),
        r"pp=4 x stages_per_rank=2: there are only 4 layers",
    ),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_layouts_that_would_hang_or_abort_are_refused(changes: dict[str, Any], said: str, tiny: Recipe) -> None:
    recipe = tiny.replace(FOUR | changes)
    with pytest.raises(InputError, match=said) as refused:
        require_trainable(recipe, recipe.layout.ranks)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_schedule_that_computes_wrong_gradients_is_refused(zero: int, tiny_text: str) -> None:
    """ZeRO 2 and 3 free what the second half of the backward pass needs."""
    text = tiny_text + f'[layout]\ndp = 2\npp = 2\nzero = {zero}\nschedule = "zero-bubble"\n'
    with pytest.raises(InputError, match=rf"zero-bubble.* in two halves, and zero = {zero} frees .* set zero = 1"):
        parse_recipe(text, "recipe.toml")


@pytest.mark.parametrize(("there", "wrong"), [("2.11.0+cu130", True), ("2.12.1", True), ("2.13.0+cpu", False)])
def test_zero_bubble_is_refused_where_torch_computes_it_wrong(there: str, wrong: bool, tiny: Recipe) -> None:
    recipe = tiny.replace(FOUR | layout(pp=2, schedule="zero-bubble"))
    with patch("leaven.planning.trainable.version", lambda _: there):
        if not wrong:
            return require_trainable(recipe, 2)
        with pytest.raises(InputError, match="wrong gradients in torch 2.1.* install torch 2.13, or use"):
            require_trainable(recipe, 2)


@pytest.mark.parametrize(
    ("processes", "said"),
    [
        (1, "there is one process; start the run with torchrun --nproc-per-node 8"),
        (16, "there are 16 processes; dp=4 would work"),
        (6, "there are 6 processes; change dp, tp or pp so that their product is the number of processes"),
    ],
)
def test_a_wrong_number_of_processes_is_refused(processes: int, said: str, tiny: Recipe) -> None:
    recipe = tiny.replace(FOUR | layout(dp=2, tp=2, pp=2))
    with pytest.raises(InputError, match=f"dp 2 x tp 2 x pp 2 is 8 ranks, and {said}"):
        require_trainable(recipe, processes)


def test_the_printed_changes_for_one_device_are_a_valid_recipe(tiny: Recipe) -> None:
    parts = layout(dp=4, dp_replicate=2, ep=2, zero=2, pp=2, schedule="interleaved", stages_per_rank=2)
    recipe = tiny.replace(FOUR | parts)
    with pytest.raises(InputError) as refused:
        require_trainable(recipe, 1)
    changes = str(refused.value).partition("on one device with ")[2].split("--set ")[1:]
    one = parse_recipe(render(recipe), "tiny", [change.strip() for change in changes])
    assert one.layout == Layout()
    require_trainable(one, 1)


def schedules_built(recipe: Recipe) -> list[int]:
    """Return which numbers of micro-batches are used when 1 to 40 are requested. torch must accept each of them."""
    sizes = recipe.layout
    pretend(0, sizes.ranks)
    group = ProcessGroup.arranged(0, sizes, torch.device("cpu"))
    model = sharded(recipe, group, torch.device("meta"))
    assert model._pipeline is not None
    taken = sorted({model.schedulable(count) for count in range(1, 41)})
    for count in taken:
        model._pipeline._schedule_for(count, torch.Size((1, recipe.model.seq_len)))
    return taken


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_takes_any_number_of_micro_batches_filled_up(schedule: str, ranks: Pool, tiny: Recipe) -> None:
    """torch's interleaved schedules refuse 64 micro-batches over 12 ranks. Its 1F1B refuses fewer micro-batches than
    stages."""
    stages = 2 if schedule in {"interleaved", "zero-bubble"} else 1
    recipe = tiny.replace({"model.n_layers": 24} | layout(pp=12, schedule=schedule, stages_per_rank=stages))
    taken = ranks(1, schedules_built, recipe)[0]
    expected = {"gpipe": range(1, 41), "1f1b": range(12, 41)}
    assert taken == list(expected.get(schedule, (12, 24, 36, 48)))


def forwards(recipe: Recipe) -> list[int]:
    """Return the number of forward passes of this process's stage in each of two steps."""
    counts = []
    with join_process_group(recipe.layout, CPU) as group:
        model = sharded(recipe, group)
        tokens = torch.zeros(1, recipe.model.seq_len, dtype=torch.int64)
        for _ in range(2):
            with patch.object(Stage, "forward", autospec=True, side_effect=Stage.forward) as forward:
                model.forward_backward(4 * [(tokens, tokens, None)], 1.0)
            counts.append(forward.call_count)
    return counts


def test_shape_inference_runs_no_extra_pass(ranks: Pool, tiny: Recipe) -> None:
    assert ranks(2, forwards, tiny.replace(layout(pp=2))) == [[4, 4], [4, 4]]


def test_recomputing_does_not_rename_parameters(tiny: Recipe) -> None:
    """torch's checkpoint wrapper renames them, but a parameter's initial value depends on its name."""
    names = []
    for recompute in ("none", "full"):
        recipe = tiny.replace({"layout.recompute": recompute})
        how: dict[str, Any] = {"layout": recipe.layout, "dtype": torch.float32, "device": torch.device("meta")}
        stage = build_stage(recipe.model, parameter_table(recipe), (0, recipe.model.n_layers), **how)
        names.append([name for name, _ in stage.model.named_parameters()])
    assert names[0] == names[1]
    assert {*names[0]} == {parameter.name for parameter in tiny.model.parameters()}
