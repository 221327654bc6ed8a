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


@pytest.mark.long
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


LAYOUT = {"layout.dp": 2, "layout.tp": 2, "layout.pp": 2, "layout.zero": 3, "layout.timeout_seconds": 60}
THREE = "layout.tp = 2, layout.pp = 2, layout.timeout_seconds = 60"
ELSEWHERE = "set this in accelerate, FSDP or DeepSpeed"
BITS = "it changes at most the last bits of the loss"
# What each target says of LAYOUT.
NOT_EXPORTED: Mapping[str, list[str]] = {
    "litgpt": [f"{THREE} are not exported: litgpt pretrain has no such setting"],
    "transformers": [
        f"layout.tp = 2, layout.pp = 2 are not exported: {ELSEWHERE}, whichever has it",
        f"layout.zero = 3 is not exported: {ELSEWHERE}; leaven export config --to deepspeed writes it",
        f"layout.timeout_seconds = 60 is not exported: set this in transformers if possible; {BITS}",
    ],
    "deepspeed": [f"{THREE} are not exported: set this in DeepSpeed if possible; {BITS}"],
    "nanotron": [f"layout.timeout_seconds = 60 is not exported: set this in nanotron if possible; {BITS}"],
    "torchtitan": [f"layout.timeout_seconds = 60 is not exported: set this in torchtitan if possible; {BITS}"],
}


def layout_notes(exported: Export) -> list[str]:
    return [note for note in exported.notes if "layout." in note and "not exported" in note]


@pytest.mark.parametrize("name", NOT_EXPORTED)
def test_each_layout_key_that_is_not_exported_is_noted_once(tiny: Recipe, name: str) -> None:
    exported = export(name, tiny.replace({"model.n_layers": 4} | LAYOUT))
    assert layout_notes(exported) == NOT_EXPORTED[name]
    assert not any(loss.key.startswith("layout") for loss in exported.losses)
    assert not any("settings of accelerate" in note for note in exported.notes)
    assert layout_notes(export(name, tiny)) == []


def test_expert_parallelism_is_one_note_of_transformers(tiny: Recipe) -> None:
    exported = export("transformers", tiny.replace({"layout.dp": 2, "layout.ep": 2}))
    (note,) = layout_notes(exported)
    assert note.startswith(
        "layout.ep = 2 is not exported: expert parallelism of transformers is chosen when the model"
    )
    assert "layout.ep" not in [loss.key for loss in exported.losses]


def test_nanotron_says_which_pipeline_schedules_it_has(tiny: Recipe) -> None:
    interleaved = {"layout.schedule": "interleaved", "layout.stages_per_rank": 2}
    (note,) = layout_notes(export("nanotron", tiny.replace(PIPELINE | interleaved)))
    assert note.startswith(
        'layout.schedule = "interleaved", layout.stages_per_rank = 2 are not exported: nanotron has'
    )


@pytest.mark.parametrize(("zero", "says"), [(0, " becomes 3"), (1, " becomes 3"), (3, "")])
def test_litgpt_uses_fsdp_on_several_devices_only(tiny: Recipe, zero: int, says: str) -> None:
    several, one = (
        [
            note
            for note in export("litgpt", tiny.replace({"layout.zero": zero, "layout.dp": dp})).notes
            if "FSDP" in note
        ]
        for dp in (2, 1)
    )
    (note,) = several
    assert note.startswith(f"layout.zero = {zero}{says}: litgpt uses FSDP (HYBRID_SHARD) on several devices")
    assert one == []


def test_isolated_documents_are_a_loss_of_deepspeed(tiny: Recipe) -> None:
    isolated = export("deepspeed", tiny.replace({"data.documents": "isolated"}))
    assert "data.documents" in [loss.key for loss in isolated.losses]
