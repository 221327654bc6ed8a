"""Compare studies over another trainer and over leaven's: `python -m benchmarks.another_trainer FOLDER`.

The other trainer is examples/another_trainer/train.py, which knows nothing of leaven. RECIPE describes the same model
on the same files of token ids. `leaven tune` searches the values of both in the same space, with several seeds of
search, initial weights and data. Both then train the start and the answers with fresh seeds, and once from the same
weights on the same batches. Run the command again to resume.
"""

import argparse
import importlib.util
import math
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
from leaven.storage import make_folder, write_text
from leaven.training.engine import Training
from leaven.training.trial import initialise_worker, train_trial
from leaven.tuning.command import CommandSpace, command_space
from leaven.tuning.point import Value
from leaven.tuning.study_document import PRUNED, StudyDocument

EXAMPLE = Path(__file__).parents[1] / "examples" / "another_trainer"
Values = Mapping[str, Value]  # by their names in the example
SEARCHED = {"example": "study.toml", "leaven": "recipe.toml"}  # what `leaven tune` gets, by trainer
SEARCH_SEEDS = 1_000  # from the seed of one search to that of the next
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
    """Run or resume a study by the command line in the current folder. Return its document."""
    folder, key = Path("studies", f"{Path(file).stem}-{seed}"), "seed" if file == SEARCHED["example"] else "data.seed"
    options = ["--study", str(folder), "--trials", str(trials), "--workers", "1", "--set", f"{key}={seed}"]
    command = [sys.executable, "-m", "leaven", "tune", file, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return StudyDocument.model_validate_json((folder / "study.json").read_text(encoding="utf-8"))


def loss_of(trainer: str, line: str, values: Values, seed: int) -> float:
    """Train in the current folder, and return the validation loss. It is kept for the next time. ``line`` is the
    command of the example."""
    kept = Path("losses", f"{trainer}, {line}")
    if not kept.exists():
        if trainer == "leaven":
            loss = train_trial(recipe_with(values, seed)).loss
        else:
            ran = subprocess.run(line, shell=True, check=True, capture_output=True, text=True)
            loss = float(ran.stdout.split()[-1])
        write_text(kept, str(loss))
    return float(kept.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--searches", type=int, default=2, help="studies over each trainer")
    parser.add_argument("--seeds", type=int, default=5, help="fresh seeds of the comparison")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at once")
    given = parser.parse_args()
    space = prepared(given.folder)
    make_folder(given.folder / "losses")
    os.chdir(given.folder)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of the command's python

    wanted = [(trainer, SEARCH_SEEDS * i) for i in range(given.searches) for trainer in SEARCHED]
    with ThreadPoolExecutor(given.jobs) as pool:
        documents = list(pool.map(lambda each: study(SEARCHED[each[0]], each[1], given.trials), wanted))
    points = {"start": space.values(dict.fromkeys(space.paths, 0.0))}
    for (trainer, seed), document in zip(wanted, documents, strict=True):
        name = f"{trainer}, seed {seed}"
        points[name] = space.values({path.rpartition(".")[2]: x for path, x in document.octaves.items()})
        effects = ", ".join(
            f"{each.path.rpartition('.')[2]} {each.importance:.0%} {document.effect(each)}"
            for each in document.coordinates
        )
        print(
            f"{name}: noise {document.noise_floor or math.nan:.4f}, {document.count(PRUNED)} pruned; {effects}",
            flush=True,
        )

    seeds = range(FRESH, FRESH + given.seeds)
    runs = [(trainer, point, seed) for trainer in SEARCHED for point in points for seed in seeds]
    lines = [space.file.filled({**points[point], "seed": seed}) for _, point, seed in runs]
    with ProcessPoolExecutor(given.jobs, get_context("spawn"), initialise_worker) as processes:
        trainers, names, of_runs = zip(*runs, strict=True)
        found = processes.map(loss_of, trainers, lines, [points[name] for name in names], of_runs)
        losses = dict(zip(runs, found, strict=True))
    print("| values of |", " | ".join(space.paths), "| loss in example | in leaven | apart in a step, at the end |")
    for name, values in points.items():
        of_both = [[losses[trainer, name, seed] for seed in seeds] for trainer in SEARCHED]
        cells = [f"{fmean(each):.4f} ({stdev(each):.4f})" for each in of_both]
        differences = apart(space.file.filled({**values, "seed": FRESH}), values)
        cells.append(", ".join(f"{each:.1e}" for each in differences))
        print("|", " | ".join([name, *(f"{value:.4g}" for value in values.values()), *cells]), "|", flush=True)
    answers = [name for name in points if name != "start"]
    of_each = [[name for name in answers if name.startswith(trainer)] for trainer in SEARCHED]
    for pair in [*combinations([[name] for name in answers], 2), of_each]:
        for trainer in SEARCHED:
            means = [[fmean(losses[trainer, name, seed] for name in names) for seed in seeds] for names in pair]
            difference, half = paired(*means)
            print(" minus ".join(map(" and ".join, pair)), f"in {trainer}: {difference:+.4f} +-{half:.4f}")


if __name__ == "__main__":
    main()
