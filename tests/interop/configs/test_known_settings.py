"""Every setting that an import knows changes its result, or its table says why it has none."""

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.interop.configs.test_from_torchtitan import TOML
from tests.interop.configs.test_from_torchtitan import imported as from_torchtitan_file
from tests.interop.configs.test_import import CONFIG, EXPERTS, MINIMAL, folder

from leaven.errors import InputError
from leaven.interop.configs import from_megatron, from_torchtitan, from_transformers
from leaven.interop.configs.draft import Imported

RUN = f"{MINIMAL} --vocab-size 512 --lr 1e-3 --global-batch-size 8 --train-iters 1000"
SCRIPTS = [
    RUN,
    MINIMAL,
    f"{RUN} --position-embedding-type rope --lr-decay-style WSD --recompute-granularity full",
    f"{RUN} --group-query-attention --num-query-groups 4 --window-size 8,0 --disable-bias-linear",
    f"{RUN} --num-query-groups 2 --decoupled-lr 1e-2 --use-megatron-fsdp --reset-position-ids",
    f"{RUN} --reset-attention-mask --num-layers 4 --pipeline-model-parallel-size 2 "
    "--data-parallel-sharding-strategy optim_grads",
    f"{RUN} {EXPERTS} --swiglu --moe-aux-loss-coeff 0.1 --context-parallel-size 2",
    f"{RUN} {EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
]
TRAINING = {"max_steps": 100, "learning_rate": 1e-3, "lr_scheduler_type": "cosine_with_min_lr"}
# Values of words, tables and switches for which a switch on or off, and the words of the table, are not enough.
WORDS: dict[str, list[Any]] = {
    "window-size": ["16,0"],
    "window-attn-skip-freq": ["2"],
    "rampup-batch-size": ["'2 2 300'"],
    "step-batch-size-schedule": ["'0:2 1M:8'"],
    "lr-wsd-decay-style": ["minus_sqrt"],
    "moe-layer-freq": ["'([0]*1+[1]*1)'"],
    "moe-router-load-balancing-type": ["none"],
    "optim": ["sgd"],
    "lr_scheduler_type": ["linear"],
    "lr_scheduler_kwargs": [{"min_lr_rate": 0.5}],
    "accelerator_config": [{"split_batches": True}],
    "model.name": ["qwen3"],
    "model.flavor": ["70B"],
    "training.dtype": ["bfloat16"],
    "parallelism.pipeline_parallel_schedule": ["GPipe"],
}


def values_of(name: str, row: Mapping[str, Any]) -> Iterable[Any]:
    counts = [row["min"]] if "min" in row else []
    by_kind: dict[str, list[Any]] = {
        "switch": [True, False],
        "count": [*counts, 1, 2, 8, 64, 512, 2048, 2**20],
        "number": [0.25, 0.002, 1e-4, 20],
    }
    return WORDS.get(name) or by_kind.get(row["kind"]) or [*row.get("values", ()), "word"]


def effects(
    table: Mapping[str, Mapping[str, Any]], starts: Iterable[Any], read: Callable[[Any, str, Any], Imported]
) -> set[str]:
    """Return the settings that change the recipe or what is listed, or for which a value is refused.

    ``read(start, name, value)`` imports a configuration with one more setting, or without one if the name is "".
    """

    def outcome(start: Any, name: str, value: Any) -> Any:
        try:
            found = read(start, name, value)
        except InputError as error:
            return str(error) if name in str(error) else None  # a refusal for another reason shows nothing
        return found.recipe.model_dump(exclude={"why"}), found.unread, found.unknown

    changed = set()
    for start in starts:
        before = outcome(start, "", None)
        assert before is not None
        for name in table.keys() - changed:
            found = [outcome(start, name, value) for value in values_of(name, table[name])]
            if any(each not in (None, before) for each in found):
                changed.add(name)
    return changed


def assert_declared(table: Mapping[str, Mapping[str, Any]], changed: set[str]) -> None:
    assert sorted(table.keys() - changed) == sorted(name for name, row in table.items() if "unused" in row)


def megatron(start: str, name: str, value: Any) -> Imported:
    word = "" if from_megatron.TABLE["flags"].get(name, {}).get("kind") == "switch" else value
    return from_megatron.read(f"{start} --{name} {word}" if name else start, "a", "x", 8)


def test_flags_of_megatron() -> None:
    table = from_megatron.TABLE["flags"]
    assert_declared(table, effects(table, SCRIPTS, megatron))


INCOMPLETE = [
    f"{MINIMAL} --lr $LR --global-batch-size 8 --train-iters 1000",
    f"{MINIMAL} --lr 1e-3 --train-iters 1000",
    f"{MINIMAL} --lr 1e-3 --train-iters 1000 --global-batch-size $BATCH",
    f"{MINIMAL} --lr 1e-3 --global-batch-size 8",
    f"{MINIMAL} --lr 1e-3 --global-batch-size 8 --train-iters $STEPS --lr-decay-style WSD",
    f"{MINIMAL} --lr 1e-3 --step-batch-size-schedule '0:2 1M:8' --train-samples 1000 --lr-warmup-iters 20",
]


# Flags whose every value asks, beside some others, for what the recipe has without them
AGREEING = {
    "add-qkv-bias", "openai-gelu", "use-rotary-position-embeddings", "use-megatron-fsdp", "use-distributed-optimizer",
    "moe-router-pre-softmax", "moe-router-load-balancing-type",
    "num-virtual-stages-per-pipeline-rank",  # refused in words of a recipe
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("start", [RUN, *INCOMPLETE])
def test_each_flag_of_megatron_is_either_used_or_listed(start: str) -> None:
    table = {
        flag: row
        for flag, row in from_megatron.TABLE["flags"].items()
        if f"--{flag} " not in f"{start} " and "unused" not in row
    }
    before = megatron(start, "", None).recipe.model_dump(exclude={"why"})

    def read(start: str, name: str, value: Any) -> Imported:
        found = megatron(start, name, value)
        assert f"--{name}" not in found.unread or found.recipe.model_dump(exclude={"why"}) == before
        return found

    assert table.keys() - effects(table, [start], read) <= AGREEING


def test_fields_of_transformers(tmp_path: Path) -> None:
    def read(start: dict[str, Any], name: str, value: Any) -> Imported:
        return from_transformers.read(folder(tmp_path, CONFIG, start | ({name: value} if name else {})), "x", 2)

    table = from_transformers.TABLE["fields"]
    assert_declared(table, effects(table, [TRAINING], read))


def test_keys_of_torchtitan(tmp_path: Path) -> None:
    def read(start: dict[str, Any], name: str, value: Any) -> Imported:
        document = json.loads(json.dumps(start))
        if name:
            section, key = name.split(".")
            document.setdefault(section, {})[key] = value
        return from_torchtitan_file(tmp_path, document)

    table = from_torchtitan.TABLE["keys"]
    start = tomllib.loads(TOML)
    piped = start | {"parallelism": {"pipeline_parallel_degree": 2, "data_parallel_replicate_degree": 2}}
    assert_declared(table, effects(table, [start, piped], read))
