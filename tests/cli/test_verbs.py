"""The verbs as a user meets them: contracts of --json, exit codes, one line for bad input."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaven.recipe.files import read_recipe

Verb = Callable[..., tuple[int, str, str]]


def document(result: tuple[int, str, str]) -> Any:
    code, out, _ = result
    assert code == 0
    return json.loads(out)  # one document, nothing else


def test_show(leaven: Verb, tiny_file: Path) -> None:
    shown = document(leaven("show", tiny_file, "--json"))
    assert shown["totals"]["params"] == sum(math.prod(row["shape"]) for row in shown["parameters"])
    assert set(shown["ratios"].values()) == {1.0}
    code, out, _ = leaven("show", tiny_file)
    assert code == 0
    for module in read_recipe(tiny_file).model.modules:
        assert module in out


def test_show_of_a_named_init_and_of_one_that_is_too_large(leaven: Verb, tiny_file: Path) -> None:
    named = ("--set", "hyperparameters.init=wang", "--set", "hyperparameters.init_std=")
    shown = document(leaven("show", tiny_file, *named, "--json"))
    assert (shown["init"]["name"], shown["warnings"]) == ("wang", [])
    assert shown["optimizer"]["name"] == "adamw"
    code, _, err = leaven("show", tiny_file, "--set", "hyperparameters.init_std=0.5")
    assert code == 0
    assert "warning: init std 0.5 of attention.query is 3.5 x sqrt(1 / (3 d)) = 0.144" in err
    code, _, err = leaven("show", tiny_file, "--set", "hyperparameters.init=wang")
    assert (code, err.count("\n")) == (2, 1)
    assert "--set hyperparameters.init_std=" in err


def test_transfer_writes_the_big_recipe_with_comments_kept(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.toml"
    scale = ("--width", "32", "--depth", "4", "--batch-tokens", "512", "--tokens", "1M")
    shown = document(leaven("transfer", tiny_file, *scale, "-o", big, "--json"))
    assert shown["ratios"] == {"width": 2, "depth": 2, "batch": 2, "tokens": pytest.approx(1e6 / 10_240)}
    assert "# as small as a transformer gets" in big.read_text()
    again = document(leaven("show", big, "--json"))
    assert again["parameters"] == shown["parameters"]
    assert read_recipe(big).why


def test_transfer_of_nothing_wrong_writes_nothing(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    code, out, err = leaven("transfer", tiny_file, "--width", "24", "-o", tmp_path / "big.toml")
    assert (code, out) == (2, "")
    assert err.startswith("error: --width: width 24 is not a multiple")
    assert not (tmp_path / "big.toml").exists()


def test_transfer_warns_with_numbers_where_it_leaves_tested_ranges(leaven: Verb, tiny_file: Path) -> None:
    code, out, err = leaven("transfer", tiny_file, "--depth", "80", "--d-ff", "48", "--kv-heads", "2", "--json")
    assert code == 0
    shown = json.loads(out)
    assert {warning["about"] for warning in shown["warnings"]} == {"depth ratio", "tokens per parameter"}
    assert err.startswith("warning: depth x40 of the base, tested from x0.0312 to x32")
    assert len(err.splitlines()) == 2
    assert [row["shape"] for row in shown["parameters"] if row["name"] == "layers.9.mlp.in.weight"] == [[48, 16]]
    assert shown["scale"]["base"]["d_ff"] == 32
    near = leaven("transfer", tiny_file, "--width", "32", "--json")
    assert json.loads(near[1])["warnings"] == []
    assert near[2] == ""


def test_transfer_warns_of_a_ramp_it_drops_and_of_adam(leaven: Verb, tiny_file: Path) -> None:
    ramp = "batch.ramp={start_tokens = 128, increment_tokens = 64, over_tokens = 2_000}"
    changes = ("--set", ramp, "--set", "hyperparameters.optimizer=adam")
    code, out, err = leaven("transfer", tiny_file, "--batch-tokens", "32", "--width", "32", *changes, "--json")
    assert code == 0
    assert {"ramp", "optimizer"} <= {warning["about"] for warning in json.loads(out)["warnings"]}
    assert "warning: the batch ramp is dropped: a batch of one sequence" in err
    assert "warning: complete-d-p multiplies the weight decay of" in err


@pytest.mark.parametrize("name", ["standard", "mup", "completep", "complete-d-p"])
def test_show_rule_prints_every_cell_with_its_source(leaven: Verb, name: str) -> None:
    shown = document(leaven("show", "--rule", name, "--json"))
    assert shown["rule"] == name
    assert all(cell["source"] for row in shown["roles"].values() for cell in row.values())
    assert all(cell["source"] for cell in shown["shared"].values())
    code, out, _ = leaven("show", "--rule", name)
    assert code == 0
    text = " ".join(out.split())
    for cell in shown["roles"]["hidden_weight"].values():
        assert cell["source"] in text
    assert "…" not in out


def test_show_wants_a_recipe_or_a_known_rule(leaven: Verb) -> None:
    assert "--rule completp: no such rule; there are standard, mup" in leaven("show", "--rule", "completp")[2]
    assert "takes a recipe file, or --rule NAME" in leaven("show")[2]


def test_show_says_what_is_clipped_and_why_no_rule_moves_it(leaven: Verb, tiny_file: Path) -> None:
    clip = ("--set", 'hyperparameters.grad_clip={mode = "running", limit = 2.0}')
    shown = document(leaven("show", tiny_file, *clip, "--json"))["clip"]
    assert (shown["mode"], shown["limit"]) == ("running", 2.0)
    assert "moved by no rule" in shown["why"]
    assert "moved by no rule" in " ".join(leaven("show", tiny_file)[1].split())


def test_recipes_and_laws(leaven: Verb) -> None:
    listed = document(leaven("recipes", "list", "--json"))
    assert len(listed) >= 10
    assert {"id", "params", "tokens", "peak_lr", "batch_tokens", "source"} <= listed[0].keys()
    different = document(leaven("recipes", "diff", "pythia-70m", "bloom-176b", "--json"))
    assert {"path", "a", "b"} <= different[0].keys()
    assert document(leaven("recipes", "nearest", "--params", "7B", "--tokens", "2T", "--json"))
    laws = document(leaven("laws", "--params", "1B", "--tokens", "20B", "--json"))
    assert {"law", "lr", "batch_tokens", "in_range", "conditions", "source"} <= laws[0].keys()
    step = next(law for law in laws if law["law"].startswith("Step"))
    assert step["lr"] == pytest.approx(1.0e-3, rel=0.03)  # 1.79 N^-0.713 D^0.307


def test_plan(leaven: Verb, tiny_file: Path) -> None:
    planned = document(
        leaven("plan", tiny_file, "--gpus", "1xA100-80GB", "--set", "precision.compute=bf16", "--json")
    )
    assert {
        "layout",
        "memory",
        "speed",
        "days",
        "gpu_hours",
        "flops_convention",
        "alternatives",
    } <= planned.keys()
    assert {"gib", "fits", "parts"} <= planned["memory"].keys()
    assert {"tflops_per_gpu", "mfu", "step_seconds", "tokens_per_second"} <= planned["speed"].keys()
    assert planned["memory"]["gib"] == pytest.approx(sum(planned["memory"]["parts"].values()))


def test_train_prints_one_document(tiny_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "leaven", "train", str(tiny_file), "--run", str(tmp_path / "run"), "--json"]
    base = "scaling.base={width = 16, depth = 2, batch_tokens = 256, tokens = 10_240, d_ff = 16}"
    command += ["--set", "hyperparameters.optimizer=adam", "--set", base]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "warning: complete-d-p multiplies the weight decay of" in done.stderr
    summary = json.loads(done.stdout)
    assert set(summary) >= {
        "loss",
        "tokens",
        "steps",
        "seconds",
        "mfu",
        "rollbacks",
        "bits_per_byte",
        "mfu_causal",
        "hfu",
    }
    assert (summary["tokens"], summary["steps"]) == (10_240, 40)
    assert summary["mfu"] > summary["mfu_causal"] > 0
    assert "matmul measured here" in summary["mfu_convention"]
    assert "measured here" in done.stderr


def test_bench_is_one_document_and_writes_nothing(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    sizes = ("--micro-batch", "1,4", "--global-batch", "2,8", "--share", "0.5")
    found = document(leaven("bench", tiny_file, *sizes, "--json"))
    assert [(row["global_batch"], row["micro_batch"]) for row in found["rows"]] == [(2, 1), (8, 1), (8, 4)]
    assert found["rows"][0].keys() >= {"micro_batch", "global_batch", "tokens_per_second", "mfu", "peak_gib"}
    peak = max(row["tokens_per_second"] for row in found["rows"])
    start = found["choose"]["ramp_start"]
    assert start["batch_tokens"] == 32 * start["global_batch"]
    assert start["share_of_peak"] >= 0.5
    assert all(
        row["tokens_per_second"] < 0.5 * peak for row in found["rows"] if row["global_batch"] < start["global_batch"]
    )
    assert sorted(tmp_path.rglob("*")) == before
    code, _, err = leaven("bench", tiny_file, "--micro-batch", "1,x")
    assert code == 2
    assert err == "error: --micro-batch 1,x: write sequences with commas, for example 1,2,4,8\n"
    code, _, err = leaven("bench", tiny_file, "--micro-batch", "16")
    assert code == 2
    assert "give --micro-batch 1" in err


def test_show_says_what_a_scaled_ramp_starts_with(leaven: Verb, tiny_file: Path) -> None:
    ramp = "batch.ramp={start_tokens = 64, increment_tokens = 64, over_tokens = 1_000, rule = 'scaled'}"
    shown = document(leaven("show", tiny_file, "--set", ramp, "--json"))["ramp"]
    assert shown["rule"] == "scaled"
    assert "the first, of 64 tokens, has lr x 0.5, weight decay x 0.5, eps x 2 and moments that" in shown["why"]
    assert "ramp" in leaven("show", tiny_file, "--set", ramp)[1]
    fixed = document(leaven("show", tiny_file, "--set", ramp, "--set", "batch.ramp.rule=fixed", "--json"))["ramp"]
    assert fixed == {"rule": "fixed", "why": None}


def test_a_ramp_is_proposed_from_the_noise_scale_of_a_run(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": n, "tokens": 128 * n, "noise_scale": None if n == 1 else 8.0 * n**0.5} for n in range(1, 61)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = document(leaven("bench", tiny_file, "--noise-from", run, "--noise-multiple", "4", "--json"))
    assert found["noise"]["exponent"] == pytest.approx(0.5)
    code, out, _ = leaven("bench", tiny_file, "--noise-from", run, "--noise-multiple", "4")
    assert code == 0
    assert shlex.split(out.splitlines()[-1].removeprefix("next")) == shlex.split(found["next"][0])
    assert shlex.split(found["next"][0])[-2:] == ["--set", *found["set"]]
    code, out, err = leaven("bench", tiny_file, "--noise-from", tmp_path / "none")
    assert (code, out) == (2, "")
    assert err == f"error: --noise-from {tmp_path}/none: no run with a metrics.jsonl\n"


def test_curves_go_where_they_are_told(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, _, err = leaven("train", tiny_file, "--run", run, "--log-to", "tensorbord")
    assert (code, err) == (2, "error: --log-to tensorbord: there are tensorboard, wandb, trackio and none\n")
    assert not run.exists()
    code, out, err = leaven("train", tiny_file, "--run", run, "--log-to", "none", "--log-every", "10")
    assert code == 0
    assert not (run / "tensorboard").exists()
    assert "bits per byte" in out
    shown = [line.split()[:2] for line in err.splitlines()]
    assert all([tokens, "k"] in shown for tokens in ("2.56", "5.12", "7.68", "10.2"))


def bad(case: str, *arguments: str, says: str) -> Any:
    return pytest.param(arguments, says, id=case)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        bad("unknown key", "--set", "model.d_modle=3", says="[model] d_modle: no such key; did you mean d_model?"),
        bad("string for a number", "--set", 'hyperparameters.lr="high"', says="should be a valid number, not 'high'"),
        bad("heads", "--set", "model.d_model=65", says="d_model 65 is not n_heads x d_head = 2 x 8 = 16"),
        bad("small batch", "--set", "batch.tokens=16", says="smaller than one sequence of 32"),
        bad(
            "ramp above its end",
            "--set",
            "batch.ramp={start_tokens = 512, increment_tokens = 32, over_tokens = 99}",
            says="the ramp starts at 512 tokens, above its end of 256",
        ),
        bad("no text", "--set", "data.source=EMPTY", says="no text"),
        bad("one line of text", "--set", "data.source=SHORT", says="tokens"),
        bad("no source", "--set", "data.source=/absent/*.txt", says="/absent/*.txt"),
        bad("small vocabulary", "--set", "model.vocab_size=128", says="vocab_size"),
        bad("several devices", "--set", "layout.tp=2", says="start it with torchrun"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_nothing_written(
    leaven: Verb, tiny_file: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("one line\n")
    texts = {"EMPTY": "empty.txt", "SHORT": "short.txt"}
    for name, file in texts.items():
        arguments = tuple(text.replace(name, str(tmp_path / file)) for text in arguments)
    before = sorted(tmp_path.rglob("*"))
    for verb, folder in (("train", "--run"), ("tune", "--study")):
        code, out, err = leaven(verb, tiny_file, folder, tmp_path / "out", *arguments)
        assert code == 2
        assert out == ""
        assert len(err.splitlines()) == 1
        assert err.startswith("error: ")
        assert says in err
        assert sorted(tmp_path.rglob("*")) == before


def test_a_tokenizer_larger_than_the_vocabulary(leaven: Verb, tiny_file: Path, tmp_path: Path) -> None:
    from leaven.data.tokens import prepare

    large = prepare(read_recipe(tiny_file).data, 400).tokenizer_path
    code, _, err = leaven("train", tiny_file, "--run", tmp_path / "out", "--set", f"data.tokenizer={large}")
    assert code == 2
    assert "400" in err
    assert "320" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_files_that_are_no_recipe(leaven: Verb, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("this is not TOML")
    assert leaven("show", tmp_path / "x.toml")[0] == 2
    assert "not TOML" in leaven("show", tmp_path / "x.toml")[2]
    assert "no such file" in leaven("train", tmp_path / "y.toml")[2]


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        ("transfer RECIPE --width 24", "not a multiple"),
        ("transfer RECIPE --width 0", "--width"),
        ("transfer RECIPE --tokens 0", "--tokens"),
        ("transfer RECIPE --tokens x", "is not a quantity"),
        ("transfer RECIPE --width 32 -o .", "give the name of a file"),
        ("transfer RECIPE --width 32 -o RECIPE/x.toml", "cannot be written"),
        ("laws --params 1e400 --tokens 1B", "larger than anything"),
        ("recipes show pythia-71m", "did you mean pythia-70m"),
        ("plan RECIPE --gpus 8xQ100 --set precision.compute=bf16", "Q100"),
        ("plan RECIPE --gpus 8xH100-80GB --set precision.compute=bf16 --layout tp=3", "tp"),
        ("tune RECIPE --study RECIPE", "a file"),
        ("tune RECIPE --study OUT --space speed", "not a value to search"),
        ("tune RECIPE --study OUT --method best", "trust-region, random, grid, tpe"),
        ("train RECIPE --run RECIPE", "a file"),
        ("train RECIPE --run OUT --set start.weights=/absent", "/absent: no such folder"),
        ("export weights /absent OUT", "/absent: no such folder"),
        ("export weights . OUT", "holds no recipe.toml"),
        ("sample /absent Once", "leaven train RECIPE --run DIR"),
        ("new RECIPE --from-weights .", "the file exists"),
        ("new OUT --from-weights /absent", "/absent: no such folder"),
        ("new OUT", "nothing to start from"),
        ("train RECIPE --skip-tokens 5k", "--skip-tokens goes with --rewind-to"),
        ("train RECIPE --run OUT --rewind-to 5k", "there is no run in"),
        ("train RECIPE --set stability.rollback_lr=0.5", "rollback_lr_tokens go together"),
        ("demo --run RECIPE", "a file"),
        ("demo --run OUT --size tiny --source /absent/*.txt", "/absent"),
        ("demo --run OUT --size huge", "full, tiny"),
        ("report /absent", "no such folder"),
        ("report RECIPE", "a file"),
        ("train RECIPE --set name=..", "name"),
        ("nonsense", "nonsense"),
        ("train", "RECIPE"),
    ],
)
def test_every_verb_refuses_in_one_line(leaven: Verb, tiny_file: Path, tmp_path: Path, verb: str, says: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    arguments = verb.replace("RECIPE", str(tiny_file)).replace("OUT", str(tmp_path / "out")).split()
    code, out, err = leaven(*arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert says in err if verb != "train" else "leaven train RECIPE" in err
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


EXTRAS = ("torch", "optuna", "plotly", "tokenizers", "safetensors", "pyarrow", "tensorboard")
WITHOUT_EXTRAS = f"""
import sys
for name in {EXTRAS!r}:
    sys.modules[name] = None  # importing it now fails as if it were not installed
from leaven.cli import main
for verb in sys.argv[1:]:
    sys.argv = ["leaven", *verb.split()]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    sys.stdout.flush()
    print(verb, code, file=sys.stderr)
"""


def without_extras(*verbs: str) -> list[str]:
    """What several commands say on standard error, each with its exit code after it, in one process."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *verbs]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()


def test_choosing_and_planning_need_no_extra(tiny_file: Path) -> None:
    verbs = [
        "recipes list",
        "recipes show bloom-176b",
        "recipes nearest --params 7B --tokens 2T",
        "laws --params 1B --tokens 20B",
        f"show {tiny_file}",
        f"plan {tiny_file} --gpus 8xH100-80GB --set precision.compute=bf16",
        f"transfer {tiny_file} --width 32",
    ]
    assert without_extras(*verbs) == [f"{verb} 0" for verb in verbs]


def test_training_says_which_extra_to_install(tiny_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    verbs = [f"train {tiny_file} --run {out}", f"tune {tiny_file} --study {out}", f"demo --run {out}"]
    lines = without_extras(*verbs)
    assert lines[1::2] == [f"{verb} 2" for verb in verbs]
    assert all("pip install 'leaven[train]'" in line for line in lines[::2])
    assert not out.exists()


def test_importing_leaven_is_light() -> None:
    """No room below the line brings an extra with it, nor does the command line until a verb needs one."""
    script = "import sys, leaven, leaven.cli, leaven.planning.plan, leaven.scaling.transfer, leaven.catalogue.laws;"
    loaded = f"print([name for name in {EXTRAS!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script + loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_leaven_exports_is_imported_when_asked_for() -> None:
    """Hyperparameters, ratios and recipes without torch; parametrize and train bring it."""
    script = """
import sys, leaven
assert not [name for name in sys.modules if name.startswith("leaven.")], sorted(sys.modules)
leaven.read_recipe, leaven.Ratios(batch=8, tokens=40), leaven.Hyperparameters(lr=0.01, init_std=0.1)
assert "torch" not in sys.modules
assert leaven.parametrize.__module__ == "leaven.interop.torch_models"
assert "torch" in sys.modules
assert leaven.train.__module__ == "leaven.training.trainer"
assert leaven.load.__module__ == "leaven.training.load"
assert not hasattr(leaven, "parametrise")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
