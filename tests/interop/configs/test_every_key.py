"""An export writes every key of a recipe, or says in a loss or a note that the target does not have it."""

from collections.abc import Mapping
from typing import Any

import pytest

from leaven.interop.configs.export import TARGETS, Export, export
from leaven.recipe.base import Part
from leaven.recipe.batch import Batch
from leaven.recipe.data import Data
from leaven.recipe.layout import Layout
from leaven.recipe.recipe import Recipe
from leaven.recipe.schedule import Schedule

PIPELINE = {"layout.pp": 2, "model.n_layers": 4}
STAGES = [{"from_tokens": 0, "tokens": 128}, {"from_tokens": 1024, "tokens": 256}]
# Another value of each key, and what the recipe needs for it.
CHANGES: Mapping[str, list[tuple[Any, dict[str, Any]]]] = {
    "layout.dp": [(2, {})],
    "layout.tp": [(2, {})],
    "layout.pp": [(2, {})],
    "layout.cp": [(2, {})],
    "layout.ep": [(2, {"layout.dp": 2})],
    "layout.zero": [(1, {"layout.dp": 2}), (2, {"layout.dp": 2}), (3, {"layout.dp": 2})],
    "layout.dp_replicate": [(2, {"layout.dp": 4, "layout.zero": 1})],
    "layout.schedule": [("gpipe", PIPELINE), ("zero-bubble", PIPELINE)],
    "layout.stages_per_rank": [(2, PIPELINE | {"layout.schedule": "interleaved"})],
    "layout.recompute": [("selective", {}), ("full", {})],
    "layout.compile": [(True, {})],
    "layout.timeout_seconds": [(60, {})],
    "precision.compute": [("bf16", {}), ("fp16", {})],
    "data.tokens": [(20_480, {})],
    "data.documents": [("isolated", {})],
    "batch.tokens": [(512, {})],
    "batch.micro_batch": [(2, {})],
    "batch.ramp": [({"start_tokens": 128, "increment_tokens": 128, "over_tokens": 1000}, {})],
    "batch.stages": [(STAGES, {})],
    "schedule.warmup_tokens": [(0, {}), (2048, {})],
    "schedule.decay": [(each, {}) for each in ("linear", "wsd", "inverse_sqrt", "constant")],
    "schedule.min_lr_ratio": [(0.3, {})],
}
# Keys that one general note is about, or that matter only with another key that the export lists as lost.
GENERAL = {
    "data.source", "data.tokenizer", "data.end_of_text", "data.seed", "data.corrupt_share",
    "batch.stages_rule", "schedule.decay_ratio",
}  # fmt: skip
PARTS: Mapping[str, type[Part]] = {"layout": Layout, "data": Data, "batch": Batch, "schedule": Schedule}


def test_the_keys_are_those_of_a_recipe() -> None:
    keys = {f"{part}.{key}" for part, kind in PARTS.items() for key in kind.model_fields}
    assert keys == CHANGES.keys() - {"precision.compute"} | GENERAL


@pytest.mark.parametrize("name", TARGETS)
def test_a_changed_key_changes_the_export_or_what_it_says(tiny: Recipe, name: str) -> None:
    if name == "megatron-module":  # refuses ZeRO 2 and 3, and otherwise writes Megatron's arguments
        pytest.skip("its arguments are those of megatron")
    silent: list[str] = []
    starts: dict[str, Export] = {}
    for key, values in CHANGES.items():
        for value, needs in values:
            changed = tiny.replace(needs | {key: value})
            start = tiny.replace({path: each for path, each in needs.items() if path != "layout.schedule"})
            text = start.model_dump_json()
            starts[text] = starts.get(text) or export(name, start)
            if export(name, changed) == starts[text]:
                silent.append(f"{key} = {value}")
    assert silent == []


@pytest.mark.parametrize("name", ["transformers", "litgpt", "deepspeed", "nanotron"])
def test_layout_keys_that_a_target_does_not_have_are_noted(tiny: Recipe, name: str) -> None:
    exported = export(name, tiny.replace({"layout.cp": 2, "layout.timeout_seconds": 60}))
    (note,) = [each for each in exported.notes if each.startswith("not exported: ")]
    assert note.startswith("not exported: layout.cp = 2, layout.timeout_seconds = 60; set this in the target")
    assert not any(each.startswith("not exported: ") for each in export(name, tiny).notes)


def test_isolated_documents_are_a_loss_of_deepspeed(tiny: Recipe) -> None:
    isolated = export("deepspeed", tiny.replace({"data.documents": "isolated"}))
    assert "data.documents" in [loss.key for loss in isolated.losses]
