"""Wrong input gives one line on standard error that names the mistake, exit code 2, and no files."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Verb

from leaven.data.tokens import prepare
from leaven.recipe.files import read_recipe, write_recipe

EXAMPLE = Path(__file__).parents[2] / "examples/350m.toml"
H100 = "--gpus 32xH100-80GB"
SIZE = "--params 1B --tokens 20B"

FACTORY = """
import torch

def model(width, depth):
    model = torch.nn.Sequential(torch.nn.Embedding(64, width), torch.nn.Linear(width, 64))
    return model, torch.optim.AdamW(model.parameters())
"""
# Recipes that cannot be trained: the value of --set, and a part of the message.
BAD_RECIPES = {
    "'batch.ramp={start_tokens = 512, increment_tokens = 32, over_tokens = 99}'": "starts at 512 tokens",
    "data.source=short.txt": "tokens",
    "data.source=/absent/*.txt": "/absent/*.txt",
    "model.vocab_size=128": "vocab_size",
    "layout.tp=2": "torchrun",
}
REFUSED = {
    "nonsense": "nonsense",
    "recipes lits": "Did you mean 'list'?",
    "train": "leaven train RECIPE",
    "laws --flop 1e22": "Possible options: --flops",
    "show": "--rule NAME",
    "show tiny.toml --set hyperparameters.init=wang": "--set hyperparameters.init_std=",
    # recipes, laws, hardware
    "recipes show pythia-71m": "did you mean pythia-70m",
    "recipes list --kind sparse": "no run has kind 'sparse'",
    "recipes list --params 7B": "1B..10B",
    "recipes list --where 'peak_lr>nan'": "nan",
    "recipes list --csv --json": "--csv",
    "recipes nearest --params 7B": "--like RECIPE",
    "recipes nearest --params 7B --tokens 2T --factor nan": "nan",
    "recipes check pythia-1b": "leaven recipes show pythia-1b",
    "recipes check other.toml": "tool: no such key",
    "laws --params 1e400 --tokens 1B": "--params",
    "laws --tokens 1B": "--params is missing",
    "laws --flops 1e22 --params 1B": "--flops",
    f"laws {SIZE} --params-non-embedding 2B": "--params-non-embedding",
    "hardware abacus": "leaven hardware",
    # new
    "new OUT": "--from-weights DIR",
    "new OUT --params 1B": "--tokens 20000000000",
    "new OUT --time 3h --params 1B": "--time cannot be combined with --params",
    "new OUT --time 3 --gpus 1xA10": "--time 3: not a time in h, d or w",
    "new OUT --params 1B --from-weights x": "cannot be combined with --params",
    f"new OUT {SIZE} --experts 8": "--experts needs --active; for example --experts 64 --active 8",
    f"new OUT {SIZE} --active 8": "--active needs --experts",
    f"new OUT {SIZE} --experts 8 --active 8": "--active 8: give fewer than --experts 8",
    "new OUT --experts 8 --active 2 --time 3h": "--experts cannot be combined with --time",
    f"new OUT {SIZE} --experts 8 --active 2 --from olmo-1b": "--experts cannot be combined with --from",
    f"new OUT {SIZE} --gpus 8xZ9": "Z9",
    f"new OUT {SIZE} --from olmo2": "did you mean",
    f"new OUT {SIZE} --source none.txt": "none.txt",
    f"new OUT {SIZE} --source empty.txt": "is empty",
    f"new OUT {SIZE} --proxy 2B": "--proxy 2 B",
    f"new none/out.toml {SIZE}": "the folder none of none/out.toml does not exist; create it",
    f"new a-proxy.toml {SIZE}": "-proxy",
    f"new tiny.toml {SIZE}": "exists; give another name, or add --force",
    f"new . {SIZE} --force": "is a folder; give the name of a file",
    "show tiny.toml --set model.n_layers=100000": "n_layers",
    "new OUT --from-weights /absent": "/absent: no such folder",
    # transfer
    "transfer tiny.toml -o OUT": "--width",
    "transfer tiny.toml --like nowhere.toml -o OUT": "nowhere.toml: no such file",
    "transfer tiny.toml --like target.toml --set model.activation=gelu -o OUT": "model.activation is swiglu",
    "transfer tiny.toml --like target.toml --set hyperparameters.lr=0.1 -o OUT": "takes this value from tiny.toml",
    "transfer tiny.toml --width 1e9 -o OUT": "the widest published model",
    "transfer tiny.toml --width 0": "--width",
    "transfer tiny.toml --tokens x": "is not a quantity",
    "transfer tiny.toml --width 32 -o tiny.toml/x.toml": "cannot be written",
    "transfer tiny.toml --width 32 -o other.toml": "--force",
    "transfer tiny.toml --width 32 -o ./tiny.toml --force": "input",
    "transfer tiny.toml --like target.toml -o target.toml --force": "input",
    # plan
    "plan": "leaven plan RECIPE --gpus COUNTxNAME",
    "plan tiny.toml": "--gpus is missing",
    "plan bloom-175b --gpus 8xH100": "did you mean bloom-176b",
    f"plan 350m.toml {H100} --mfu 0.4": "--budget",
    f"plan 350m.toml {H100} --share 1.4": "--share: input should be less than or equal to 1",
    f"plan 350m.toml {H100} --price free": "--price free",
    f"plan bloom-176b {H100} --measure": "--measure",
    "plan --budget '8xH100 x 2d' --mfu 40": "between 0 and 1",
    "plan --share 0.9 --budget '8xH100 x 2d'": "--share",
    # check, bench, tune, train, demo, report
    "check coordinates tiny.toml --widths 7,9": "width 7 does not give a whole number",
    "check coordinates tiny.toml --widths 16,17": "error: width 17 does not give a whole number",
    "check coordinates tiny.toml --widths 32,x": "--widths: 'x' is not a quantity",
    "check gradients tiny.toml --alpha 0.5": "--alpha",
    "check coordinates tiny.toml --seeds 1000000000": "--seeds: input should be less than or equal to 1000",
    "check init tiny.toml --run OUT --scales 16x2,32x2 --seeds 1001": "--seeds: input should be less",
    "check equivalence theirs:model --run OUT --scale 16": "--scale: 16 is not a size",
    "check transfer theirs:model --run OUT --scales 16x1,32x1 --set data.seed=1": "--set",
    "check transfer tiny.toml --run OUT --scales 16x2,32x2 --source made-up": "--source",
    "check transfer tiny.toml --run OUT --scales 16x2,32x2 --tokens 1k": "--tokens",
    "check init theirs:model --run OUT --scales 16x1,32x1": "give a recipe file",
    "check transfer tiny.toml --run OUT --scales 16x2": "two scales",
    "check transfer tiny.toml --scales 16x2,32x2": "--run is missing; to train tiny.toml, give e.g. --run runs/check",
    "check collapse tiny.toml --run OUT": "--scales is missing; to train tiny.toml, give e.g. --scales 64x4,128x4",
    "check transfer tiny.toml --run OUT --scales 16x2,32x2 --value beta": "tiny.toml cannot be combined with --value",
    "check transfer absent": "absent: no such file or folder; give a recipe, or the results of runs",
    "check transfer absent.csv": "absent.csv: no such file or folder",
    "check transfer rows.csv --seeds 2": "rows.csv cannot be combined with --seeds; leave one of them out",
    "check transfer rows.csv": "rows.csv has one size only, width 64; a check of transfer compares two or more",
    "check collapse rows.csv": "its columns with values are width, lr, loss; a loss curve needs tokens or",
    "check transfer rows.tsv": "rows.tsv: cannot read this format; give the logs as a file that ends in .csv",
    "check coordinates rows.csv": "rows.csv: this check needs a recipe; only the checks transfer and collapse read",
    "check transfer ROWS.CSV": "ROWS.CSV has one size only, width 64; a check of transfer compares two or more",
    "check decay tiny.toml --run OUT": "--scales 64x4,128x4 or --durations 1,2,4",
    "check duration theirs:model --run OUT --scale 16x1 --write o.toml": "--write",
    "bench tiny.toml --micro-batch 16": "--micro-batch 1",
    "bench tiny.toml --noise-from absent": "metrics.jsonl",
    "bench tiny.toml --noise-from absent --micro-batch 2": "--noise-from cannot be combined with --micro-batch",
    "check memory tiny.toml --rank 0 --all-stages": "--all-stages cannot be combined with --rank",
    "new mine.toml --source a.txt --params 1M --source=b.txt": "--source is given more than once; give it once",
    "check memory tiny.toml --layout tp=2 --layout pp=2": "error: --layout is given more than once",
    "transfer tiny.toml -oone.toml -oother.toml": "error: --output is given more than once",
    "show tiny.toml --set data.seed=1 --set data.seed=2": "and --set data.seed=2 set the same value; leave one out",
    "show tiny.toml --rule mup": "--rule cannot be combined with RECIPE; leave one of them out",
    "bench tiny.toml --noise-multiple 2": "(without --noise-from) cannot be combined with --noise-multiple; leave",
    "tune tiny.toml --study tiny.toml": "a file",
    "tune tiny.toml --study OUT --set data.source=short.txt": "tokens",
    # the text is too short as well, but an earlier study is read before the text
    "tune tiny.toml --study OUT --set data.source=short.txt --from-study /absent": "/absent",
    "train absent.toml": "no such file",
    "train tiny.toml --run tiny.toml": "a file",
    "train tiny.toml --run OUT --log-to tensorbord": "tensorboard, wandb, trackio",
    "train tiny.toml --run OUT --set start.weights=/absent": "/absent: no such folder",
    "train tiny.toml --run OUT --set data.tokenizer=TOKENIZER": "400",
    "train tiny.toml --skip-tokens 5k": "--rewind-to",
    "train tiny.toml --run=": "--run= has an empty value; is a shell variable empty?",
    "train tiny.toml --run OUT --rewind-to 5k": "there is no run in",
    "train tiny.toml --set stability.rollback_lr=0.5": "rollback_lr_tokens",
    "demo --run tiny.toml": "a file",
    "demo --run OUT --source '/absent/*.txt'": "/absent",
    "demo --run OUT --size full --quick": "--quick contradicts --size full",
    "report": "PATH is missing",
    "report . --catalogue": "--catalogue",
    "report tiny.toml": "a file",
    # export, import, sample
    "export config plain.toml --to jax": "megatron, torchtitan, deepspeed, nanotron",
    "export config plain.toml": "leaven export config RECIPE --to TARGET",
    "export config /absent --to litgpt": "/absent: no such file",
    "export config plain.toml --to nanotron -o tiny.toml": "tiny.toml",
    "import config plain.toml --from jax": "'transformers', 'megatron'",
    "import config plain.toml": "--from is missing",
    "import config . --from megatron": ".: this is a folder; give the path of the script or the list of flags",
    "import config . --from torchtitan": ".: this is a folder; give the path of torchtitan's TOML or JSON file",
    "import config /absent --from megatron": "/absent: no such file",
    "import config /absent --from transformers": "/absent: no such file",
    "import config plain.toml --from megatron": "--num-layers",
    "import config plain.toml --from transformers": "JSON",
    "import config plain.toml --from megatron -o tiny.toml": "exists; give another name",
    "export weights . OUT": "holds no recipe.toml",
    "export weights RUN RUN": "exists already",
    "export weights RUN OUT --tokens 1k": "no checkpoint at 1,000 tokens; there are 5_120, 10_240",
    "export weights RUN RUN/recipe.toml/out": "a file of this name exists where a folder is needed",
    "sample /absent Once": "leaven train --run has written",
    "sample RUN x --top-p 2": "--top-p",
    "sample RUN caf\udce9": "UTF-8",
}
CASES = REFUSED | {f"train tiny.toml --run OUT --set {change}": says for change, says in BAD_RECIPES.items()}


@pytest.fixture
def folder(tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.toml").write_text(tiny_text)
    (tmp_path / "plain.toml").write_text(tiny_text.replace("qk_norm = true", "qk_norm = false"))
    (tmp_path / "other.toml").write_text("[tool]\nx = 1\n")
    for name in ("rows.csv", "ROWS.CSV", "rows.tsv"):
        (tmp_path / name).write_text("width,lr,loss\n64,0.1,3\n64,0.2,2\n64,0.4,3\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("one line\n")
    shutil.copy(EXAMPLE, tmp_path)
    (tmp_path / "theirs.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize("command", CASES)
def test_wrong_input_is_one_line_and_writes_nothing(
    leaven: Verb, folder: Path, scaled_run: Path, command: str
) -> None:
    small = read_recipe(folder / "tiny.toml")
    if "target.toml" in command:
        changes = {"model": small.model.scaled(32, 4).model_dump(), "scaling.base": small.base.model_dump()}
        write_recipe(small.replace(changes), folder / "target.toml")
    if "TOKENIZER" in command:
        command = command.replace("TOKENIZER", str(prepare(small.data, 400).tokenizer_path))
    words = [word.replace("OUT", "out.toml").replace("RUN", str(scaled_run)) for word in shlex.split(command)]
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    run_before = sorted(scaled_run.rglob("*"))
    code, out, err = leaven(*words)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert CASES.get(command, "400") in line
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before
    assert sorted(scaled_run.rglob("*")) == run_before
