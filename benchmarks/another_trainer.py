"""Compare a study over another trainer with a study over leaven's: `python -m benchmarks.another_trainer FOLDER`.

The trainer is examples/another_trainer/train.py, which knows nothing of leaven. RECIPE describes the same model, on the
same files of token ids, for leaven's trainer. The benchmark

1. trains both from the same weights on the same batches, and compares the losses,
2. runs `leaven tune` over both, in the same space, with several seeds of the search, initial weights and data order,
3. trains the start and all answers with both trainers and fresh seeds. Differences are paired by seed.

Everything is kept in FOLDER: run the command again to resume.
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the cores

import torch
from torch import Tensor

from leaven.data.tokens import prepare
from leaven.demo import paired
from leaven.recipe.files import parse_recipe
from leaven.recipe.recipe import Recipe
from leaven.training.engine import Training
from leaven.training.trial import initialise_worker, train_trial
from leaven.tuning.command import CommandSpace, command_space
from leaven.tuning.point import Value
from leaven.tuning.study_document import StudyDocument

EXAMPLE = Path(__file__).parents[1] / "examples" / "another_trainer"
Values = Mapping[str, Value]  # by their names in the example
TRAINERS = "example", "leaven"
FRESH = 9_000  # the first seed of the comparison; no search uses such seeds
RECIPE = """
name = "gpt"

[model]
n_layers = 2
d_model = 64
n_heads = 4
n_kv_heads = 4
d_head = 16
d_ff = 256
vocab_size = 128
seq_len = 64
norm = "layernorm"
norm_eps = 1e-5
activation = "gelu"
positions = "learned"
bias = true
tied_embeddings = true

[data]
source = [{ source = "train.bin", validation = "val.bin" }]
tokens = 163_840        # 160 steps

[batch]
tokens = 1_024          # 16 sequences

[schedule]
warmup_tokens = 20_480  # 20 steps
decay = "cosine"
min_lr_ratio = 0.1

[hyperparameters]
lr = 1e-3
init_std = 0.02
weight_decay = 0.1
beta2 = 0.95
"""
PARTS = {
    "wte": ["embedding"],
    "wpe": ["positions"],
    "ln_f": ["norm.final"],
    "ln_1": ["norm.attention"],
    "ln_2": ["norm.mlp"],
    "c_attn": ["attention.query", "attention.key", "attention.value"],
    "c_proj": ["attention.out"],
    "c_fc": ["mlp.in"],
    "c_out": ["mlp.out"],
}
"""The modules of leaven's model whose parameters, one below the other, are those of a module of the example."""


def prepared(folder: Path) -> CommandSpace:
    """Copy the example to a folder, write its tokens and the recipe there, and return the example's search space."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("prepare.py", "train.py", "study.toml"):
        shutil.copy(EXAMPLE / name, folder)
    subprocess.run([sys.executable, "prepare.py"], cwd=folder, check=True)
    space = command_space(folder / "study.toml")
    ends = [f'"hyperparameters.{each.path}" = [{each.low}, {each.high}]' for each in space.dimensions]
    (folder / "recipe.toml").write_text("\n".join([RECIPE, "[tuning.octaves]", *ends, ""]), encoding="utf-8")
    return space


def recipe_with(values: Values, seed: int) -> Recipe:
    """Return the recipe with values, by their names in the example."""
    changes = {f"hyperparameters.{name}": value for name, value in values.items()}
    return parse_recipe(RECIPE, "recipe").replace({"data.seed": seed, **changes})


def example() -> ModuleType:
    """Return train.py as a module."""
    spec = importlib.util.spec_from_file_location("train", EXAMPLE / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights_for_example(names: Iterable[str], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of leaven's model by the names that they have in the example."""
    found = {}
    for name in names:
        *block, part, kind = name.split(".")
        prefix = f"layers.{block[1]}." if block else ""
        found[name] = torch.cat([ours[f"{prefix}{module}.{kind}"] for module in PARTS[part]])
    return found


def apart(line: str, values: Values, steps: int | None = None) -> tuple[float, float]:
    """Train with both from the same weights on the same batches, in the current folder. Return by how much the losses
    differ, in nats per token: at most in a step, and in the validation at the end.

    Args:
        line: the command of the example with these values.
        steps: the number of steps; by default that of the whole run.
    """
    recipe, theirs = recipe_with(values, FRESH), example()
    training = Training(recipe, prepare(recipe.data, recipe.model.vocab_size), device="cpu")
    config = theirs.parser.parse_args(shlex.split(line)[2:])
    model = theirs.GPT(config.init_std)
    model.load_state_dict(weights_for_example(model.state_dict(), dict(training.model.named_parameters())))
    samples = torch.from_numpy(training.stream.batch(0, recipe.data.tokens // recipe.model.seq_len))
    batches = [(rows[:, :-1], rows[:, 1:]) for rows in samples.split(theirs.batch_size)][:steps]
    difference = max(abs(training.step().loss - loss) for loss in theirs.train(model, iter(batches), config))
    with torch.no_grad():
        return difference, abs(training.evaluate() - model(*theirs.validation()).item())


def study(file: str, seed: int, trials: int) -> StudyDocument:
    """Run or resume a study by the command line in the current folder."""
    folder, key = Path("studies", f"{Path(file).stem}-{seed}"), "seed" if file == "study.toml" else "data.seed"
    options = ["--study", str(folder), "--trials", str(trials), "--workers", "1", "--set", f"{key}={seed}"]
    ran = subprocess.run(
        [sys.executable, "-m", "leaven", "tune", file, *options],
        env=environment(),
        check=True,
        stdout=subprocess.PIPE,
    )
    Path(f"{folder.name}.txt").write_bytes(ran.stdout)
    return StudyDocument.model_validate_json((folder / "study.json").read_text(encoding="utf-8"))


def environment() -> dict[str, str]:
    """Return environment variables with which `python` is this Python."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def loss_of(trainer: str, line: str, values: Values, seed: int) -> float:
    """Train in the current folder, and return the validation loss. ``line`` is the command of the example."""
    if trainer == "leaven":
        return train_trial(recipe_with(values, seed)).loss
    ran = subprocess.run(line, shell=True, check=True, capture_output=True, text=True, env=environment())
    return float(ran.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--searches", type=int, default=2, help="studies over each trainer")
    parser.add_argument("--seeds", type=int, default=5, help="fresh seeds of the comparison")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at once")
    given = parser.parse_args()
    space = prepared(given.folder)
    os.chdir(given.folder)

    def line(values: Values, seed: int) -> str:
        return space.file.filled({**values, "seed": seed})

    # Studies over the example and over leaven, by the seed of the search.
    wanted = [(file, 1_000 * i) for i in range(given.searches) for file in ("study.toml", "recipe.toml")]
    with ThreadPoolExecutor(given.jobs) as pool:
        documents = list(pool.map(lambda each: study(*each, given.trials), wanted))
    points: dict[str, Values] = {"start": space.values(dict.fromkeys(space.paths, 0.0))}
    for (file, seed), document in zip(wanted, documents, strict=True):
        trainer = "example" if file == "study.toml" else "leaven"
        octaves = {path.rpartition(".")[2]: x for path, x in document.octaves.items()}
        points[f"{trainer} {seed}"] = space.values(octaves)
        effects = ", ".join(
            f"{each.path.rpartition('.')[2]} {document.effect(each) or 'start'} ({each.importance:.0%})"
            for each in document.coordinates
        )
        pruned = document.count("stopped")
        print(f"{trainer} {seed}: noise {document.noise_floor:.4f}, {pruned} pruned; {effects}", flush=True)
    seeds = range(FRESH, FRESH + given.seeds)
    runs = [(trainer, point, seed) for trainer in TRAINERS for point in points for seed in seeds]
    with ProcessPoolExecutor(given.jobs, get_context("spawn"), initialise_worker) as pool:
        found = pool.map(
            loss_of,
            *zip(
                *((each, line(points[point], seed), points[point], seed) for each, point, seed in runs), strict=True
            ),
        )
        losses = dict(zip(runs, found, strict=True))
    print(
        "| values of | lr | weight decay | beta2 | init std | same weights: apart | loss in the example | in leaven |"
    )
    for name, values in points.items():
        both = [[losses[trainer, name, seed] for seed in seeds] for trainer in TRAINERS]
        cells = [f"{fmean(each):.4f} ({stdev(each):.4f})" for each in both]
        differences = "{:.1e}, {:.1e}".format(*apart(line(values, FRESH), values))
        print("|", " | ".join([name, *(f"{value:.4g}" for value in values.values()), differences, *cells]), "|")
    for first, second in combinations(list(points)[1:], 2):
        for trainer in TRAINERS:
            one, other = ([losses[trainer, name, seed] for seed in seeds] for name in (first, second))
            difference, half = paired(one, other)
            print(f"{first} minus {second}, trained by {trainer}: {difference:+.4f} +-{half:.4f}")


if __name__ == "__main__":
    main()
