"""Train exported recipes with their targets, and compare the losses with leaven's: `make prove-exports`.

    python -m benchmarks.prove_exports [TARGET ...] [--page]

For each case, leaven writes the initial weights of a small recipe in Hugging Face's format, its configuration for the
target, and the tokens of every batch. The target's own trainer trains from these weights on these tokens, on the
processor in fp32, and its losses are compared with leaven's. Where an export declares a loss, or a note says that
the lr is late, leaven also trains the recipe with that difference alone, which measures its effect, and with all
differences of the case together, which has to give the target's losses. Targets that are not installed are skipped by
name. With ``--page`` the table in docs/how-to/export.md is replaced. The exit code is 1 if a target trains otherwise
than its export says, or if no target was trained.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer

from leaven.data.tokens import TokenSet, prepare
from leaven.interop.architectures import nearest
from leaven.interop.configs.compare import ParameterSettings, ResolvedRecipe
from leaven.interop.configs.export import default_path, export, target, write
from leaven.interop.configs.per_parameter import CANDIDATES
from leaven.interop.weights import write_huggingface
from leaven.recipe.files import parse_recipe
from leaven.recipe.recipe import Recipe
from leaven.recipe.schedule import Schedule
from leaven.scaling.table import ParameterTable, parameter_table
from leaven.training.engine import Training
from leaven.training.metrics import Step

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "export.md"
BEGIN, END = "<!-- make prove-exports -->\n", "<!-- end of make prove-exports -->\n"
HEAD = (
    "| target | recipe | apart | in the last step | what the target does differently: effect | apart with this |",
    "|---|---|---|---|---|---|",
)
ROUNDING = 1e-5
"""Losses of two trainers that differ by less are equal up to rounding in fp32, in nats per token."""

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


class TargetSchedule(Schedule):
    """A schedule with a target's lr, which may be that of some tokens before the end of a step."""

    batch_tokens: int  # number of tokens in a step
    late_in_warmup: float = 0.0  # steps by which the lr is late during the warm-up
    late_after: float = 0.0  # steps by which the lr is late after the warm-up

    def multiplier(self, tokens: float, horizon: int) -> float:
        warms_up = tokens - max(self.late_in_warmup, 1) * self.batch_tokens < self.warmup_tokens
        late = self.late_in_warmup if warms_up else self.late_after
        return super().multiplier(tokens - late * self.batch_tokens, horizon)


@dataclass(frozen=True)
class Variant:
    """A recipe as leaven trains it, perhaps with differences of a target."""

    recipe: Recipe
    table: ParameterTable
    lr: Mapping[str, float] = field(default_factory=dict)  # fields of TargetSchedule

    @classmethod
    def of(cls, recipe: Recipe) -> "Variant":
        return cls(recipe, parameter_table(recipe))

    def losses(self, tokens: TokenSet) -> list[float]:
        """Train with leaven on a processor. Return the loss of each step, in nats per token."""
        return [step.loss for step in self.steps(tokens)]

    def steps(self, tokens: TokenSet) -> list[Step]:
        values = self.recipe.schedule.model_dump() | {"batch_tokens": self.recipe.batch.tokens} | self.lr
        recipe = self.recipe.model_copy(update={"schedule": TargetSchedule(**values)})
        with mock.patch("leaven.training.engine.parameter_table", return_value=self.table):
            training = Training(recipe, tokens, device="cpu")
        return [training.step() for _ in range(recipe.steps)]

    def given(self, values: Mapping[str, Mapping[str, float]]) -> "Variant":
        """Return the variant with other values of the parameter table, by name of the parameter and quantity."""
        rows = tuple(replace(row, **values.get(row.name, {})) for row in self.table.rows)
        return replace(self, table=replace(self.table, rows=rows))

    def folded(self) -> "Variant":
        """Return a variant without multipliers that trains alike, except that clipping acts on other gradients."""
        plain = ResolvedRecipe(self.recipe).plain
        variant = self.given({name: vars(settings) for name, settings in plain.items()})
        return replace(variant, table=replace(variant.table, attention_scale=self.recipe.model.d_head**-0.5))


@dataclass(frozen=True)
class TargetDifference:
    """What a target does differently from a recipe."""

    name: str  # of the row in the table on the page
    # gives leaven's variant this difference; the second argument has the target's settings by parameter
    change: Callable[[Variant, Mapping[str, ParameterSettings]], Variant]
    loss: str | None = None  # beginning of the key of the loss that the export declares, if it is one
    note: str | None = None  # words of the export's note about a late lr, if it is one
    start: bool = False  # whether only initial weights differ, which every case takes from leaven


def late(name: str, note: str, **lr: float) -> TargetDifference:
    """Return the difference of a target whose lr is late, by fields of TargetSchedule."""
    return TargetDifference(name, lambda variant, _: replace(variant, lr={**variant.lr, **lr}), note=note)


def says(
    loss: str, changes: Mapping[str, Any], name: str = "", note: str | None = None, **lr: float
) -> TargetDifference:
    """Return a difference that a recipe can express, by the changes of the recipe and fields of TargetSchedule."""

    def change(variant: Variant, _: Mapping[str, ParameterSettings]) -> Variant:
        return replace(Variant.of(variant.recipe.replace(changes)), lr={**variant.lr, **lr})

    return TargetDifference(name or f"`{loss}`", change, loss, note)


def gives(quantity: str, *, start: bool = False) -> TargetDifference:
    """Return the difference of a target that gives parameters its own values of a quantity, such as the lr."""

    def change(variant: Variant, given: Mapping[str, ParameterSettings]) -> Variant:
        return variant.given({name: {quantity: getattr(each, quantity)} for name, each in given.items()})

    return TargetDifference(f"`{quantity}`", change, f"{quantity} of", start=start)


# Cases
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProofCase:
    """A recipe that a target trains."""

    target: str
    title: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # relative to RECIPE, by dotted path
    differences: Sequence[TargetDifference] = ()


PER_MODULE = {
    "hyperparameters.modules": {
        "embedding": {"lr": 2.0, "init_std": 2.0},
        "attention.query": {"lr": 0.5, "init_std": 1.4},
        "mlp.out": {"weight_decay": 5.0, "eps": 10.0, "beta2": 2.0},
    },
    "hyperparameters.depth": {"lr": [1.0, 1.5], "init_std": [1.0, 0.5]},
}
# Four times the width, twice the depth and four times the head of its base: branches, logits and attention have
# multipliers.
TRANSFERRED = {
    "scaling.base": {"width": 8, "depth": 1, "batch_tokens": 512, "tokens": 51_200, "d_head": 4},
    "hyperparameters.residual": 0.7,
}
NO_CLIP = {"hyperparameters.grad_clip": 0.0}
L2 = {"hyperparameters.optimizer": "adam", "hyperparameters.weight_decay": 1e-3}
TIED = {"model.tied_embeddings": True}
QWEN3 = {"model.qk_norm": True}
NEOX = {
    "model.norm": "layernorm",
    "model.activation": "gelu",
    "model.bias": True,
    "model.n_kv_heads": 2,
    "model.d_ff": 128,
}
GPT2 = NEOX | {"model.positions": "learned"} | TIED
BLOOM = NEOX | {"model.positions": "alibi", "model.embedding_norm": True} | TIED
EXPERTS = {"number": 8, "active": 2, "d_expert": 32, "balance": "none"}
QWEN3_MOE = QWEN3 | {"model.experts": EXPERTS}
GLM4_MOE = {"model.experts": EXPERTS | {"router": "sigmoid", "shared": 1, "dense_layers": 1, "weight_scale": 2.5}}
ISOLATED = {"data.documents": "isolated"}  # torchtitan has no other
KEYS = {"hyperparameters.modules": {"attention.key": {"init_std": 1.4}}}
FOLDED = TargetDifference(
    "clipping of folded weights", lambda variant, _: variant.folded(), "hyperparameters.grad_clip"
)
LATE_DECAY = late("decay one step late", "decay is one step late", late_after=1)
TWO_STEPS = "warm-up is two steps late, and its decay one step"
TWO_LATE = late("warm-up two steps late, decay one", TWO_STEPS, late_in_warmup=2, late_after=1)
LATE_BY_MICRO_BATCH = late(
    "lr one micro-batch late", "late by one of 2 micro-batches", late_in_warmup=0.5, late_after=0.5
)
CASES = (
    ProofCase("transformers", "Llama"),
    ProofCase("transformers", "Llama, Adam with L2", L2),
    ProofCase("transformers", "Qwen3, values per module and layer", QWEN3 | PER_MODULE),
    ProofCase("transformers", "Llama, transferred, not clipped", TRANSFERRED | NO_CLIP),
    ProofCase("transformers", "Qwen3, transferred", TRANSFERRED | QWEN3, (FOLDED,)),
    ProofCase("transformers", "Llama, tied, transferred, not clipped", TRANSFERRED | NO_CLIP | TIED),
    ProofCase("transformers", "GPT-2", GPT2),
    ProofCase(
        "transformers",
        "GPT-2, transferred, not clipped",
        TRANSFERRED | NO_CLIP | GPT2,
        (gives("lr"), gives("weight_decay"), gives("eps")),
    ),
    ProofCase(
        "transformers",
        "GPT-2 without biases",
        GPT2 | {"model.bias": False},
        (says("model.bias", {"model.bias": True}),),
    ),
    ProofCase("transformers", "GPT-NeoX, values per module and layer", NEOX | PER_MODULE, (gives("lr"),)),
    ProofCase("transformers", "BLOOM", BLOOM),
    ProofCase("transformers", "Qwen3-MoE, transferred, not clipped", TRANSFERRED | NO_CLIP | QWEN3_MOE),
    ProofCase("transformers", "GLM-4-MoE, values per module and layer", GLM4_MOE | PER_MODULE),
    ProofCase("transformers", "Llama, linear", {"schedule.decay": "linear"}),
    ProofCase("transformers", "Llama, wsd", {"schedule.decay": "wsd"}),
    ProofCase(
        "transformers",
        "Llama, inverse sqrt",
        {"schedule.decay": "inverse_sqrt", "schedule.min_lr_ratio": 0.5, "schedule.warmup_tokens": 5_000},
    ),
    ProofCase("transformers", "Llama, constant", {"schedule.decay": "constant"}),
    ProofCase(
        "transformers",
        "Llama, clipped per module",
        {"hyperparameters.grad_clip": {"mode": "per-module", "limit": 0.1}},
        (says("hyperparameters.grad_clip.mode", {"hyperparameters.grad_clip": 0.1}),),
    ),
    ProofCase("torchtitan", "Llama", ISOLATED, (LATE_DECAY,)),
    ProofCase(
        "torchtitan",
        "Llama, tied, transferred, Adam with L2, not clipped",
        ISOLATED | L2 | TIED | TRANSFERRED | NO_CLIP,
        (LATE_DECAY,),
    ),
    ProofCase("torchtitan", "Qwen3, values per module and layer", ISOLATED | QWEN3 | PER_MODULE, (LATE_DECAY,)),
    ProofCase(
        "torchtitan",
        "Qwen3, transferred",
        ISOLATED | QWEN3 | TRANSFERRED,
        (gives("init_mean", start=True), FOLDED, LATE_DECAY),
    ),
    ProofCase("torchtitan", "Llama, packed", {}, (says("data.documents", ISOLATED), LATE_DECAY)),
    ProofCase(
        "torchtitan",
        "Llama, wsd, other keys",
        ISOLATED | KEYS | {"schedule.decay": "wsd"},
        (gives("init_std", start=True), LATE_DECAY),
    ),
    ProofCase("deepspeed", "Llama", {}, (TWO_LATE,)),
    ProofCase("deepspeed", "Qwen3, transferred", QWEN3 | TRANSFERRED | PER_MODULE, (TWO_LATE,)),
    ProofCase(
        "deepspeed",
        "Llama, constant, no warm-up",
        {"schedule.decay": "constant", "schedule.warmup_tokens": 0},
        (
            says(
                "schedule.warmup_tokens",
                {"schedule.warmup_tokens": 1_024},
                "warm-up of two steps, two steps late",
                TWO_STEPS,
                late_in_warmup=2,
                late_after=1,
            ),
        ),
    ),
    ProofCase("litgpt", "Llama", {}, (gives("init_std", start=True), gives("weight_decay"), LATE_BY_MICRO_BATCH)),
    ProofCase(
        "litgpt", "GPT-NeoX", NEOX, (gives("init_std", start=True), gives("weight_decay"), LATE_BY_MICRO_BATCH)
    ),
    ProofCase(
        "litgpt",
        "Llama, litgpt's init and decay",
        {
            "hyperparameters.init": "tinyllama",
            "hyperparameters.init_std": None,
            "hyperparameters.decay_norm_and_bias": True,
        },
        (LATE_BY_MICRO_BATCH,),
    ),
    ProofCase(
        "litgpt",
        "Qwen3, values per module and layer",
        QWEN3 | PER_MODULE,
        (
            *(gives(quantity) for quantity in ("lr", "weight_decay", "beta2", "eps")),
            gives("init_std", start=True),
            LATE_BY_MICRO_BATCH,
        ),
    ),
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
    prepare_module = importlib.import_module("prepare")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "export"))
    values = folder / "export" / "parameters.json"
    optimizer = prepare_module.prepare(model, values)
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
        optimizers=(optimizer, prepare_module.schedule(optimizer, values)),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_torchtitan(folder: Path) -> list[float]:
    # torchtitan takes a machine without accelerator for one with CUDA.
    torch._utils._get_available_device_type = lambda: "cpu"
    # On a processor only FlexAttention that is not compiled has gradients.
    flex_attention = importlib.import_module("torch.nn.attention.flex_attention")
    flex_attention._validate_device = lambda *_: None
    from torchtitan.components import metrics
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.distributed import utils as distributed_utils
    from torchtitan.models.common import attention

    memory = {"device_name": "cpu", "reset_peak_stats": lambda: None}
    memory["get_peak_stats"] = lambda: metrics.DeviceMemStats(*[0.0] * 6)
    metrics.build_device_memory_monitor = lambda: SimpleNamespace(**memory)
    distributed_utils.set_pg_timeouts = lambda **_: None  # calls what gloo, and torch 2.13, do not have
    attention.FlexAttention._compiled_flex_attn = staticmethod(flex_attention.flex_attention)
    attention._compiled_create_block_mask = attention.create_block_mask
    losses: list[float] = []
    end_of_text = json.loads((folder / "weights" / "config.json").read_text(encoding="utf-8"))["eos_token_id"]

    class IsolatedSamples(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for row in batches(folder):
                index, ends = torch.arange(len(row) - 1), row[:-1] == end_of_text
                positions = index - (index * ends.roll(1)).cummax(0).values  # number of a token in its document
                yield (
                    {"input": row[:-1], "positions": positions},
                    row[1:].masked_fill(row[:-1] == end_of_text, -100),
                )

    class Loader(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            pass

        def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            super().__init__(
                IsolatedSamples(), dp_rank=dp_rank, dp_world_size=dp_world_size, batch_size=local_batch_size
            )

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
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: (
        losses.append(loss),
        log(step, loss, *rest, **more),
    )
    trainer.train()
    trainer.close()
    return losses


def with_litgpt(folder: Path) -> list[float]:
    torch._dynamo.config.disable = True  # it compiles every model, which takes longer here than all steps
    import csv

    import yaml
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
    config = yaml.safe_load(path.read_text(encoding="utf-8"))["model_config"]
    name = "qwen3" if config["norm_qk"] else "llama"  # names the tensors of the weights
    name_to_config[name] = config
    convert_hf_checkpoint(folder / "weights", model_name=name)
    read.pop("config")
    sys.argv = ["litgpt", "proof"]  # read once more when litgpt saves
    pretrain.setup(**vars(read) | {"data": Samples(), "initial_checkpoint_dir": folder / "weights"})
    (log,) = (folder / "out").rglob("metrics.csv")
    with log.open(encoding="utf-8") as lines:
        return [float(row["loss"]) for row in csv.DictReader(lines) if row.get("loss")]


def with_deepspeed(folder: Path) -> list[float]:
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    import leaven

    recipe = Recipe.model_validate_json((folder / "recipe.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder / "weights")
    at = recipe.base
    config = nearest(recipe.base_shape)[0].config(recipe.base_shape)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
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
        loss = engine(input_ids=rows[:, :-1], labels=rows, shift_labels=rows[:, 1:].contiguous()).loss
        accumulated += loss.item() / engine.gradient_accumulation_steps()
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            losses.append(accumulated)
            accumulated = 0.0
        engine.step()
    return losses


@dataclass(frozen=True)
class TargetTrainer:
    """How a target is installed, and trained on a processor."""

    packages: Sequence[str]  # names on the package index; the first one's version is shown
    train: Callable[[Path], list[float]]  # trains the files in a folder


TRAINERS = {
    "transformers": TargetTrainer(("transformers", "accelerate"), with_transformers),
    "torchtitan": TargetTrainer(("torchtitan",), with_torchtitan),
    "deepspeed": TargetTrainer(("deepspeed",), with_deepspeed),
    "litgpt": TargetTrainer(("litgpt", "jsonargparse"), with_litgpt),
}
# What a launcher such as torchrun sets, for one process.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
ENVIRONMENT = ALONE | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def train_in_process(case: ProofCase, folder: Path) -> list[float]:
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
        raise RuntimeError(f"{case.target}, {case.title}: {done.stdout[-1800:]}")
    found: list[float] = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    return found


# Proofs
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """How far the losses of a case are apart, in nats per token: the largest difference of a step."""

    case: ProofCase
    apart: float  # of the target from leaven
    at_end: float  # the same in the last step
    effects: Mapping[str, float]  # by name of a difference: of leaven with this difference alone from leaven
    left: float  # of the target from leaven with all differences

    @property
    def row(self) -> str:
        """The row of the table on the page."""
        effects = "; ".join(f"{name}: {effect:.1e}" for name, effect in self.effects.items()) or "nothing"
        cells = (
            label(self.case.target),
            self.case.title,
            f"{self.apart:.1e}",
            f"{self.at_end:.1e}",
            effects,
            f"{self.left:.1e}",
        )
        return f"| {' | '.join(cells)} |"


def prove(case: ProofCase, recipe: Recipe, tokens: TokenSet, run: Callable[[ProofCase, Path], list[float]]) -> Proof:
    """Train a case with its target, by ``run``, and with leaven, and compare the losses."""
    recipe = recipe.replace(case.changes)
    architecture = nearest(recipe.model, trained=True)[0]
    run_recipe = ResolvedRecipe(recipe)
    settings = next(CANDIDATES[case.target](run_recipe, recipe.model, architecture)).given
    if target(case.target).plain:  # the settings are those of folded weights
        factors = run_recipe.folding
        settings = {
            name: each.folded(1 / factors.get(name, 1.0), run_recipe.decoupled) for name, each in settings.items()
        }
    start = Variant.of(recipe)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), case, recipe, tokens)
        theirs = run(case, Path(folder))
    ours = start.losses(tokens)
    effects, together = {}, start
    for difference in case.differences:
        effects[difference.name] = apart(ours, difference.change(start, settings).losses(tokens))
        if not difference.start:
            together = difference.change(together, settings)
    left = apart(ours if together is start else together.losses(tokens), theirs)
    return Proof(case, apart(ours, theirs), abs(ours[-1] - theirs[-1]), effects, left)


def write_files(folder: Path, case: ProofCase, recipe: Recipe, tokens: TokenSet) -> None:
    """Write what a target needs: its configuration, the initial weights, and the samples in their order."""
    exported = export(case.target, recipe)
    name, late_notes = f"{case.target}, {case.title}", [note for note in exported.notes if " late" in note]
    for loss in exported.losses:
        if not any(each.loss and loss.key.startswith(each.loss) for each in case.differences):
            raise ValueError(f"{name}: the export loses {loss.text}, which the case does not list")
    for note in late_notes:
        if not any(each.note and each.note in note for each in case.differences):
            raise ValueError(f"{name}: the export says '{note}', which the case does not list")
    for each in case.differences:
        if each.loss and not any(loss.key.startswith(each.loss) for loss in exported.losses):
            raise ValueError(f"{name}: the case lists {each.name}, which the export does not lose")
        if each.note and not any(each.note in note for note in late_notes):
            raise ValueError(f"{name}: the case lists {each.name}, which no note of the export says")
    path = folder / "export" / default_path(case.target, recipe.name)
    write(exported, path if "" in exported.files else folder / "export")
    start = Variant.of(recipe)
    if case.target == "deepspeed":  # its client multiplies, so the weights must not be multiplied
        start = start.folded()
    text = tokens.tokenizer_path.read_text(encoding="utf-8")
    write_huggingface(
        folder / "weights",
        recipe.model,
        start.table,
        dict(Training(recipe, tokens, device="cpu").model.named_parameters()),
        tokenizer=text,
        end_of_text=(Tokenizer.from_str(text).id_to_token(tokens.end_of_text), tokens.end_of_text),
    )
    samples = recipe.steps * recipe.batch.tokens // recipe.model.seq_len
    np.save(folder / "samples.npy", tokens.stream(recipe.model.seq_len, recipe.data.seed).batch(0, samples))
    (folder / "recipe.json").write_text(recipe.model_dump_json(), encoding="utf-8")


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference of a step; infinity if a loss is not finite."""
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def label(name: str) -> str:
    """Return the name and the installed version of a target."""
    return f"{target(name).title} {importlib.metadata.version(name)}"


def missing(name: str) -> list[str]:
    """Return the packages that a target needs and that are not installed."""
    return [package for package in TRAINERS[name].packages if importlib.util.find_spec(package) is None]


def renewed(page: str, rows: Mapping[str, Sequence[str]], below: str) -> str:
    """Return a page with new rows of the table, by target, and a line below. Rows of other targets stay."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    lines = []
    for name in TRAINERS:
        kept = [line for line in table.splitlines() if line.startswith(f"| {target(name).title} ")]
        lines += rows.get(name) or kept
    return before + BEGIN + "\n".join((*HEAD, *lines, "", below)) + "\n" + END + after


def small_recipe(folder: Path) -> Recipe:
    """Write a text into a folder, and return the recipe that trains on it. The text is Python's asyncio; every
    definition at the top level of a module is a document."""
    modules = sorted((Path(os.__file__).parent / "asyncio").glob("*.py"))
    documents = [part for module in modules for part in module.read_text(encoding="utf-8").split("\n\n\n")]
    lines = [json.dumps({"text": text}) for text in documents]
    (folder / "asyncio.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return parse_recipe(RECIPE.replace("FOLDER", str(folder)), "proof")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: {' '.join(TRAINERS)}")
    parser.add_argument("--page", action="store_true", help="replace the table in docs/how-to/export.md")
    parser.add_argument("--train", nargs=2, metavar=("TARGET", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        name, folder = arguments.train
        losses = TRAINERS[name].train(Path(folder))
        (Path(folder) / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
        return 0
    if unknown := set(arguments.targets) - TRAINERS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(TRAINERS)}")
    wanted = arguments.targets or list(TRAINERS)
    for name in wanted:
        if packages := missing(name):
            print(f"skipped {name}: {', '.join(packages)} not installed")
    with tempfile.TemporaryDirectory() as text:
        recipe = small_recipe(Path(text))
        tokens = prepare(recipe.data, recipe.model.vocab_size)
    other = Variant.of(recipe.replace({"batch.micro_batch": recipe.batch.tokens // recipe.model.seq_len}))
    steps = Variant.of(recipe).steps(tokens)
    rounding = apart([step.loss for step in steps], other.losses(tokens))
    clipped = sum(step.grad_norm > recipe.hyperparameters.grad_clip.limit for step in steps)
    below = (
        f"Leaven with another micro-batch is {rounding:.1e} apart from itself; in the first recipe, clipping acts in "
        f"{clipped} of {len(steps)} steps."
    )
    print(below)
    proofs = []
    print(*HEAD, sep="\n")
    for case in CASES:
        if case.target in wanted and not missing(case.target):
            proofs.append(prove(case, recipe, tokens, train_in_process))
            print(proofs[-1].row, flush=True)
    if arguments.page:
        rows = {name: [proof.row for proof in proofs if proof.case.target == name] for name in TRAINERS}
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), rows, below), encoding="utf-8")
    return int(not proofs or any(not proof.left <= ROUNDING for proof in proofs))


if __name__ == "__main__":
    sys.exit(main())
