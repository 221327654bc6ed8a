"""Train exported recipes with their targets, and compare the losses with leaven's: `make prove-exports`.

    python -m benchmarks.prove_exports [TARGET ...] [--page]

For each case, leaven writes the initial weights of a small recipe in Hugging Face's format, its configuration for the
target, and the tokens of every batch. The target's own trainer trains from these weights on these tokens, on the
processor in fp32, and its losses are compared with leaven's. Where an export declares a loss, or a note says that
the lr is late, leaven also trains the recipe with that difference alone, which measures its effect, and with all
differences of the case together, which has to give the target's losses. Targets that are not installed are skipped by
name. With ``--page`` the table in docs/how-to/export.md is replaced.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from leaven.data.tokens import TokenSet, prepare
from leaven.interop.architectures import nearest
from leaven.interop.configs.compare import QUANTITIES, ParameterSettings, ResolvedRecipe
from leaven.interop.configs.export import export, target, write
from leaven.interop.configs.per_parameter import CANDIDATES, identifier
from leaven.interop.weights import write_huggingface
from leaven.recipe.files import parse_recipe
from leaven.recipe.recipe import Recipe
from leaven.recipe.schedule import Schedule
from leaven.scaling.table import ParameterTable, folding, parameter_table
from leaven.training.engine import Training

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "export.md"
BEGIN, END = "<!-- make prove-exports -->\n", "<!-- end -->\n"

RECIPE = """
name = "proof"

[model]
n_layers = 2
d_model = 32
n_heads = 2
n_kv_heads = 1
d_head = 16
d_ff = 96
vocab_size = 512
seq_len = 64

[data]
source = "FOLDER/*.jsonl"
tokens = 51_200

[batch]
tokens = 512
micro_batch = 4

[schedule]
warmup_tokens = 5_120

[hyperparameters]
lr = 0.01
eps = 1e-4
grad_clip = 0.5
init_std = 0.1

[stability]
on_spike = "off"
"""

# Leaven's trainer, with what a target does differently
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A recipe as leaven trains it, perhaps with differences of a target."""

    recipe: Recipe
    table: ParameterTable
    late_in_warmup: float = 0.0  # steps by which the lr is late during the warm-up
    late_after: float = 0.0  # steps by which the lr is late after the warm-up


class LateSchedule(Schedule):
    """A schedule in which the lr is that of some tokens before the end of a step."""

    batch_tokens: int  # number of tokens in a step
    late_in_warmup: float  # in steps, for steps that begin in the warm-up
    late_after: float  # in steps, for the other steps

    def multiplier(self, tokens: float, horizon: int) -> float:
        warms_up = tokens - self.batch_tokens < self.warmup_tokens
        late = self.late_in_warmup if warms_up else self.late_after
        return super().multiplier(tokens - late * self.batch_tokens, horizon)


def train(variant: Variant, tokens: TokenSet) -> list[float]:
    """Train with leaven. Return the loss of each step, in nats per token."""
    schedule = LateSchedule(
        **variant.recipe.schedule.model_dump(),
        batch_tokens=variant.recipe.batch.tokens,
        late_in_warmup=variant.late_in_warmup,
        late_after=variant.late_after,
    )
    recipe = variant.recipe.model_copy(update={"schedule": schedule})
    with mock.patch("leaven.training.engine.parameter_table", return_value=variant.table):
        training = Training(recipe, tokens, device="cpu")
    return [training.step().loss for _ in range(recipe.steps)]


Change = Callable[[Variant, Mapping[str, ParameterSettings]], Variant]


@dataclass(frozen=True)
class Difference:
    """What a target does differently from a recipe."""

    key: str  # beginning of the key of the export's loss, or of its note
    change: Change  # gives leaven's variant this difference; the second argument has the target's settings
    start: bool = False  # whether only the initial weights differ, which every case takes from leaven


def late(note: str, in_warmup: float, after: float) -> Difference:
    """Return the difference of a target whose lr is late by these numbers of steps."""
    return Difference(note, lambda variant, _: replace(variant, late_in_warmup=in_warmup, late_after=after))


def says(key: str, changes: Mapping[str, Any]) -> Difference:
    """Return a difference that a recipe can express, by the changes of the recipe."""
    return Difference(key, lambda variant, _: replace(variant, recipe=variant.recipe.replace(changes)))


def gives(quantity: str, start: bool = False) -> Difference:
    """Return the difference of a target that gives parameters its own values of a quantity, such as the lr."""

    def change(variant: Variant, given: Mapping[str, ParameterSettings]) -> Variant:
        values = {name: {quantity: getattr(settings, quantity)} for name, settings in given.items()}
        return replace(variant, table=_with(variant.table, values))

    return Difference(f"{quantity} of", change, start)


def fold(variant: Variant, _: Mapping[str, ParameterSettings]) -> Variant:
    """Return a variant without multipliers that trains alike, except that clipping acts on other gradients."""
    model, table = variant.recipe.model, variant.table
    factors = folding(model, table)
    decoupled = variant.recipe.hyperparameters.optimizer == "adamw"
    values = {
        row.name: vars(
            replace(
                ParameterSettings(**{quantity: getattr(row, quantity) for quantity in QUANTITIES}).folded(
                    factors.get(row.name, 1.0), decoupled
                ),
                multiplier=1.0,
            )
        )
        for row in table.rows
    }
    return replace(variant, table=replace(_with(table, values), attention_scale=model.d_head**-0.5))


def _with(table: ParameterTable, values: Mapping[str, Mapping[str, float]]) -> ParameterTable:
    return replace(table, rows=tuple(replace(row, **values.get(row.name, {})) for row in table.rows))


FOLDED = Difference("hyperparameters.grad_clip", fold)

# Cases
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A recipe that a target trains."""

    target: str
    title: str
    changes: Mapping[str, Any]  # relative to RECIPE, by dotted path
    differences: Sequence[Difference] = ()


ISOLATED = {"data.documents": "isolated"}  # torchtitan has no other
# Values that differ between modules and layers.
PER_MODULE = {
    "hyperparameters.modules": {
        "embedding": {"lr": 2.0, "init_std": 2.0},
        "attention.query": {"lr": 0.5, "init_std": 1.4},
        "mlp.out": {"weight_decay": 5.0, "eps": 10.0, "beta2": 2.0},
    },
    "hyperparameters.depth": {"lr": [1.0, 1.5], "init_std": [1.0, 0.5]},
}
# Four times the width and twice the depth of its base, so that branches, logits and attention have multipliers.
TRANSFERRED = {
    "scaling.base": {"width": 8, "depth": 1, "batch_tokens": 512, "tokens": 51_200, "d_head": 4},
    "hyperparameters.residual": 0.7,
}
NO_CLIP = {"hyperparameters.grad_clip": 0.0}
QWEN3 = {"model.qk_norm": True}
BIASED = {"model.norm": "layernorm", "model.activation": "gelu", "model.bias": True, "model.n_kv_heads": 2}
NEOX = BIASED | {"model.d_ff": 128}
GPT2 = NEOX | {"model.positions": "learned", "model.tied_embeddings": True}
BLOOM = NEOX | {"model.positions": "alibi", "model.embedding_norm": True, "model.tied_embeddings": True}
WSD = {"schedule.decay": "wsd", "schedule.min_lr_ratio": 0.0}

ONE_STEP_LATE = late("transformers' first step has lr 0", 1, 1)
CASES = (
    Case("transformers", "Llama", {}),
    Case("transformers", "Llama, Adam with L2", {"hyperparameters.optimizer": "adam"}),
    Case("transformers", "Qwen3, values per module and layer", QWEN3 | PER_MODULE),
    Case("transformers", "Llama, transferred, no clipping", TRANSFERRED | NO_CLIP),
    Case("transformers", "Qwen3, transferred", TRANSFERRED | QWEN3, (FOLDED,)),
    Case("transformers", "GPT-2", GPT2),
    Case("transformers", "GPT-NeoX", NEOX),
    Case("transformers", "BLOOM", BLOOM),
    Case("transformers", "GPT-NeoX, values per module and layer", NEOX | PER_MODULE, (gives("lr"),)),
    Case("transformers", "Llama, linear", {"schedule.decay": "linear"}, (ONE_STEP_LATE,)),
    Case("transformers", "Llama, wsd", WSD, (ONE_STEP_LATE,)),
    Case("transformers", "Llama, constant", {"schedule.decay": "constant"}, (ONE_STEP_LATE,)),
    Case("torchtitan", "Llama", ISOLATED),
    Case("torchtitan", "Llama, Adam with L2, tied", ISOLATED | {"hyperparameters.optimizer": "adam", "model.tied_embeddings": True}),
    Case("torchtitan", "Qwen3, values per module and layer", ISOLATED | QWEN3 | PER_MODULE),
    Case("deepspeed", "Llama", {}),
    Case("litgpt", "Llama", {}),
)

# The targets' trainers. Each trains the files in a folder, and returns the loss of each step.
# --------------------------------------------------------------------------------------------------------------------


def batches(folder: Path) -> torch.Tensor:
    """Return the samples of a case in their order, [N, seq_len + 1] token ids."""
    return torch.from_numpy(np.load(folder / "samples.npy"))


def with_transformers(folder: Path) -> list[float]:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    sys.path.insert(0, str(folder / "export"))
    prepare_model = importlib.import_module("prepare").prepare
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "export"))
    optimizer = prepare_model(model, folder / "export" / "parameters.json")
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder / "weights").state_dict())
    arguments = json.loads((folder / "export" / "training_args.json").read_text(encoding="utf-8")) | {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
    }
    samples = [
        {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]} for row in batches(folder)
    ]  # the loss shifts labels itself unless it is given shifted ones
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**arguments),
        train_dataset=samples,
        optimizers=(optimizer, None),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_torchtitan(folder: Path) -> list[float]:
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader

    losses: list[float] = []
    end_of_text = json.loads((folder / "weights" / "config.json").read_text(encoding="utf-8"))["eos_token_id"]

    class Samples(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for row in batches(folder):
                ends = (row[:-1] == end_of_text).nonzero()[:, 0].tolist()
                starts = [0, *(end + 1 for end in ends)]
                positions = torch.cat([torch.arange(b - a) for a, b in zip(starts, [*starts[1:], len(row) - 1])])
                yield (
                    {"input": row[:-1], "positions": positions},
                    row[1:].masked_fill(row[:-1] == end_of_text, -100),
                )

    class Loader(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            pass

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            super().__init__(Samples(), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size)

    sys.path.insert(0, str(folder / "export"))
    (module,) = (folder / "export").glob("*.py")
    config = getattr(importlib.import_module(module.stem), module.stem)()
    config.dataloader = Loader.Config()
    config.hf_assets_path = str(folder / "weights")
    config.dump_folder = str(folder / "out")
    config.checkpoint = CheckpointManager.Config(
        enable=True, load_only=True, initial_load_path=str(folder / "weights"), initial_load_in_hf=True
    )
    config.metrics.log_freq = 1
    trainer = config.build()
    log = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: (losses.append(loss), log(step, loss, *rest, **more))
    trainer.train()
    trainer.close()
    return losses


def with_litgpt(folder: Path) -> list[float]:
    import csv

    from jsonargparse import ArgumentParser
    from litgpt import pretrain
    from litgpt.config import name_to_config
    from litgpt.data import DataModule
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint

    class Samples(DataModule):
        def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
            self.batch_size = batch_size

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(batches(folder), batch_size=self.batch_size)

        val_dataloader = train_dataloader

    (path,) = (folder / "export").glob("*.yaml")
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_function_arguments(pretrain.setup)
    read = parser.instantiate_classes(
        parser.parse_args(["--config", str(path), "--out_dir", str(folder / "out"), "--logger_name", "csv"])
    )
    name_to_config["proof"] = {**vars(read.model_config)}
    convert_hf_checkpoint(folder / "weights", model_name="proof")
    read.pop("config")
    pretrain.setup(**read | {"data": Samples(), "initial_checkpoint_dir": folder / "weights"})
    (log,) = (folder / "out").rglob("metrics.csv")
    with log.open(encoding="utf-8") as lines:
        return [float(row["loss"]) for row in csv.DictReader(lines) if row.get("loss")]


def with_deepspeed(folder: Path) -> list[float]:
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    import leaven

    recipe = leaven.Recipe.model_validate_json((folder / "recipe.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder / "weights")
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "base"))
    at = recipe.base
    groups = leaven.parametrize(
        model,
        base=base,
        hyperparameters=recipe.hyperparameters,
        ratios=leaven.Ratios(batch=recipe.batch.tokens / at.batch_tokens, tokens=recipe.data.tokens / at.tokens),
        rule=recipe.scaling.rule,
        initialise=False,
    )
    (path,) = (folder / "export").glob("*.json")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=str(path))
    losses: list[float] = []
    accumulated = 0.0
    for rows in torch.split(batches(folder), engine.train_micro_batch_size_per_gpu()):
        loss = engine(input_ids=rows[:, :-1], labels=rows[:, 1:], shift_labels=rows[:, 1:]).loss
        accumulated += loss.item() / engine.gradient_accumulation_steps()
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            losses.append(accumulated)
            accumulated = 0.0
        engine.step()
    return losses


@dataclass(frozen=True)
class Trainer:
    """How a target is installed, and trained on a processor."""

    packages: Sequence[str]  # names on the package index; the first one's version is shown
    train: Callable[[Path], list[float]]  # trains the files in a folder


TRAINERS = {
    "transformers": Trainer(("transformers", "accelerate"), with_transformers),
    "torchtitan": Trainer(("torchtitan",), with_torchtitan),
    "deepspeed": Trainer(("deepspeed",), with_deepspeed),
    "litgpt": Trainer(("litgpt", "jsonargparse"), with_litgpt),
}
# What a launcher such as torchrun sets, for one process. Compiling for a processor takes longer than all steps.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
ENVIRONMENT = ALONE | {"TORCH_COMPILE_DISABLE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def train_in_process(case: Case, folder: Path) -> list[float]:
    """Train with a case's target in a process of its own. Return the loss of each step."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.prove_exports", "--train", case.target, str(folder)],
        env=os.environ | ENVIRONMENT,
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{case.target}, {case.title}: {done.stdout[-3000:]}")
    found: list[float] = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    return found

# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """The losses of a case compared with leaven's: the largest difference of a step, in nats per token."""

    case: Case
    steps: int
    loss: float  # leaven's, in the last step
    apart: float  # of the target from leaven
    apart_at_end: float  # in the last step
    effects: Mapping[str, float]  # by what is different: of leaven with this difference alone from leaven
    left: float | None  # of the target from leaven with all differences


def write_files(folder: Path, case: Case, recipe: Recipe, tokens: TokenSet) -> None:
    """Write what a target needs: its configuration, the initial weights, and the samples in their order."""
    exported = export(case.target, recipe)
    path = Path(target(case.target).path.format(name=recipe.name, identifier=identifier(recipe.name)))
    if "" in exported.files:
        (folder / "export").mkdir()
    write(exported, folder / "export" / path.name if "" in exported.files else folder / "export")
    start = Variant(recipe, parameter_table(recipe))
    weights = dict(Training(recipe, tokens, device="cpu").model.named_parameters())
    if case.target == "deepspeed":  # the client's hooks multiply
        start = replace(start, table=fold(start, {}).table)
    architecture = nearest(recipe.model)[0]
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(architecture.config(recipe.base_shape)))
    from tokenizers import Tokenizer

    text = tokens.tokenizer_path.read_text(encoding="utf-8")
    end = (Tokenizer.from_str(text).id_to_token(tokens.end_of_text), tokens.end_of_text)
    write_huggingface(folder / "weights", recipe.model, start.table, weights, tokenizer=text, end_of_text=end)
    samples = recipe.steps * recipe.batch.tokens // recipe.model.seq_len
    np.save(folder / "samples.npy", tokens.stream(recipe.model.seq_len, recipe.data.seed).batch(0, samples))
    (folder / "recipe.json").write_text(recipe.model_dump_json(), encoding="utf-8")


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference of a step."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def prove(case: Case, recipe: Recipe, tokens: TokenSet, run: Callable[[Case, Path], list[float]]) -> Proof:
    """Train a case with its target and with leaven, and compare the losses."""
    recipe = recipe.replace(case.changes)
    run_recipe = ResolvedRecipe(recipe)
    candidate = next(CANDIDATES[case.target](run_recipe, recipe.model, nearest(recipe.model, trained=True)[0]))
    start = Variant(recipe, parameter_table(recipe))
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), case, recipe, tokens)
        theirs = run(case, Path(folder))
    ours = train(start, tokens)
    effects, together = {}, start
    for difference in case.differences:
        effects[difference.key] = apart(ours, train(difference.change(start, candidate.given), tokens))
        if not difference.start:
            together = difference.change(together, candidate.given)
    left = apart(train(together, tokens), theirs) if together is not start else None
    return Proof(case, recipe.steps, ours[-1], apart(ours, theirs), abs(ours[-1] - theirs[-1]), effects, left)


def small_recipe(folder: Path) -> Recipe:
    """Write a text into a folder, and return the recipe that trains on it. The text is Python's asyncio; every
    definition at the top level of a module is a document."""
    modules = sorted((Path(os.__file__).parent / "asyncio").glob("*.py"))
    documents = [part for module in modules for part in module.read_text(encoding="utf-8").split("\n\n\n")]
    lines = [json.dumps({"text": text}) for text in documents]
    (folder / "asyncio.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return parse_recipe(RECIPE.replace("FOLDER", str(folder)), "proof")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--train", nargs=2, metavar=("TARGET", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        name, folder = arguments.train
        losses = TRAINERS[name].train(Path(folder))
        (Path(folder) / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as text:
        recipe = small_recipe(Path(text))
        tokens = prepare(recipe.data, recipe.model.vocab_size)
    for case in CASES:
        if arguments.targets and case.target not in arguments.targets:
            continue
        try:
            print(prove(case, recipe, tokens, train_in_process))
        except RuntimeError as error:
            print(error)


if __name__ == "__main__":
    main()
