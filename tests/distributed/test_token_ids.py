"""Token ids of other programs, on several processes: the files are read once, and losses and resume are those of one
process."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.data.written import documents, hugging_face, llm_c, megatron, nanogpt, numpy_file
from tests.distributed.cases import dtype_of
from tests.distributed.pool import Pool
from tests.distributed.test_layouts import layout
from tests.training.conftest import losses

from leaven.data import readers, token_source
from leaven.data.tokens import TokenSet, prepare
from leaven.distributed.exchange import rank_zero_first
from leaven.distributed.process_group import join_process_group
from leaven.recipe.recipe import Recipe
from leaven.training import trainer
from leaven.training.run_folder import RunFolder
from leaven.training.trainer import train

Reading = tuple[float, float, int]  # when a rank begins and ends its preparation, and how many sources it reads


def run(recipe: Recipe, folder: Path, stop_after: int = 1_000) -> Reading:
    """Prepare and train, as `leaven train` does. The last process stops after a number of steps."""
    read, times = [0], [0.0, 0.0]
    survey = token_source._survey

    def counted(*arguments: Any) -> Any:
        read[0] += 1
        return survey(*arguments)

    with (
        dtype_of("float64"),
        join_process_group(recipe.layout, torch.device("cpu")) as group,
        patch.object(token_source, "_survey", counted),
        patch.object(readers, "SETTLED_NS", 0),  # the files have just been written
        patch.object(trainer, "plain_torch", nullcontext),  # keeps float64
    ):

        def prepared() -> TokenSet:
            times[0] = time.monotonic()
            if group.is_first:
                time.sleep(0.2)
            found = prepare(recipe.data, recipe.model.vocab_size)
            times[1] = time.monotonic()
            return found

        tokens = rank_zero_first(group, prepared)
        last = group.rank == group.size - 1
        train(recipe, tokens, folder, group=group, stop=lambda: last and len(losses(folder)) >= stop_after)
    return times[0], times[1], read[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "degrees", [pytest.param((2, 1, 1), id="dp2"), pytest.param((2, 2, 2), id="dp2 tp2 pp2", marks=pytest.mark.slow)]
)
def test_losses_and_resume_are_those_of_one_process(
    degrees: tuple[int, int, int], ranks: Pool, tiny: Recipe, tmp_path: Path
) -> None:
    texts = [documents(seed) for seed in range(5)]
    names = [
        megatron(tmp_path / "a.bin", texts[0]),
        llm_c(tmp_path / "b.bin", texts[1]),
        nanogpt(tmp_path / "c.bin", texts[2]),
        numpy_file(tmp_path / "d.npy", texts[3]),
        hugging_face(tmp_path / "set", texts[4]),
    ]
    sources: list[dict[str, Any]] = [{"source": name} for name in names]
    sources[0]["validation"] = megatron(tmp_path / "held.bin", documents(9))
    changes = {"data.source": sources, "data.tokens": 2_048, "batch.micro_batch": 2, "model.n_kv_heads": 2}
    one = tiny.replace(changes)
    many = one.replace(layout(*degrees))
    size = many.layout.ranks
    (_, end, first), *others = ranks(size, run, many, tmp_path / "many", 3)
    assert first == 6  # the files, once
    assert [(begin >= end, read) for begin, _, read in others] == [(True, 0)] * (size - 1)
    assert 3 <= len(losses(tmp_path / "many")) < 8
    ranks(size, run, many, tmp_path / "many")
    run(one, tmp_path / "one")
    assert len(losses(tmp_path / "one")) == 8
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), abs=1e-12)
    finish = [RunFolder(tmp_path / name).finish() for name in ("one", "many")]
    assert None not in finish
    assert finish[1]["loss"] == pytest.approx(finish[0]["loss"], abs=1e-12)  # type: ignore[index]
