"""The commands that are printed under "next" work as printed, and lead from a proxy to an exported run."""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.cli.conftest import Verb

from leaven.cli import next_commands
from leaven.errors import shown
from leaven.planning import hardware
from leaven.planning.plan import cluster_for, plan_recipe
from leaven.recipe.files import read_recipe, write_recipe
from leaven.recipe.recipe import Recipe


def printed(out: str) -> list[str]:
    """Return the commands under the label "next" at the end of an output."""
    lines = out.rstrip("\n").split("\n")
    first = max(number for number, line in enumerate(lines) if line.startswith("next "))
    return [line[11:] for line in lines[first:]]


def typed(leaven: Verb, command: str, *more: str) -> tuple[int, str, str]:
    program, *words = shlex.split(command)
    assert program == "leaven"
    return leaven(*words, *more)


@pytest.fixture
def road(tiny_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose name needs quotes, with two tiny recipes as ``leaven new`` would write them."""
    folder = tmp_path / "my recipes"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    short = tiny_text.replace("10_240", "2_560").replace("warmup_tokens = 1_024", "warmup_tokens = 256")
    (folder / "wheat-proxy.toml").write_text(short.replace('"tiny"', '"wheat-proxy"'))
    proxy = read_recipe(folder / "wheat-proxy.toml")
    changes = {"name": "wheat", "model": proxy.model.scaled(32, 2).model_dump(), "data.tokens": 5_120}
    write_recipe(proxy.replace(changes | {"scaling.base": proxy.base.model_dump()}), folder / "wheat.toml")
    return folder


@pytest.fixture
def no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder on a machine without GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "gpus_here", lambda: 0)


@pytest.mark.long
@pytest.mark.usefixtures("in_this_process")
def test_tune_to_export_by_printed_commands(leaven: Verb, road: Path) -> None:
    command = next_commands.after_check(
        road.relative_to(Path.cwd()) / "wheat-proxy.toml", read_recipe("my recipes/wheat-proxy.toml"), []
    )[0]
    assert command == "leaven tune 'my recipes/wheat-proxy.toml' --study studies/wheat --trials 16"
    command = command.replace(
        "--trials 16", "--trials 3 --space hyperparameters.lr,schedule.warmup_tokens --workers 1"
    )
    code, out, err = typed(leaven, command)
    assert code == 0, err
    transfer, report = printed(out)
    assert transfer == (
        "leaven transfer studies/wheat/best.toml --like 'my recipes/wheat.toml' -o 'my recipes/wheat-tuned.toml'"
    )
    assert typed(leaven, report)[0] == 0
    code, out, err = typed(leaven, transfer)
    assert code == 0, err
    tuned, best = read_recipe("my recipes/wheat-tuned.toml"), read_recipe("studies/wheat/best.toml")
    assert tuned.hyperparameters == best.hyperparameters
    assert tuned.schedule.warmup_tokens == 2 * best.schedule.warmup_tokens
    check, train = printed(out)
    assert typed(leaven, check)[0] in (0, 1)  # nobody has published anything so small
    code, out, err = typed(leaven, train)
    assert code == 0, err
    report, sample, export = printed(out)
    assert typed(leaven, report)[0] == 0
    assert typed(leaven, sample, "--max-tokens", "2")[0] == 0
    code, out, err = typed(leaven, export)
    assert code == 0, err
    assert Path("runs/wheat-tuned-huggingface/config.json").exists()
    (new,) = printed(out)
    assert typed(leaven, new)[0] == 0
    # A second transfer gets a new file name.
    assert (
        "wheat-tuned-2.toml"
        in next_commands.after_tune(Path("my recipes/wheat-proxy.toml"), Path("studies/wheat"))[0]
    )


def test_printed_commands_of_plan_export_import_and_transfer_work(leaven: Verb, road: Path) -> None:
    recipe = road / "wheat.toml"
    code, out, _ = leaven("plan", recipe, "--gpus", "cpu")
    assert code == 0
    tune, transfer, train = printed(out)
    tuned = road / "wheat-tuned.toml"
    assert tune.startswith(
        f"leaven tune {shlex.quote(str(road / 'wheat-proxy.toml'))} --study studies/wheat --trials"
    )
    assert shlex.split(transfer)[:5] == ["leaven", "transfer", "studies/wheat/best.toml", "--like", str(recipe)]
    assert shlex.split(train)[:5] == ["leaven", "train", str(tuned), "--run", "runs/wheat-tuned"]
    write_recipe(read_recipe(recipe), tuned)
    (train,) = printed(leaven("plan", recipe, "--gpus", "cpu")[1])
    (tune,) = printed(leaven("plan", road / "wheat-proxy.toml", "--gpus", "cpu")[1])
    assert tune.startswith("leaven tune ")
    assert shlex.split(train)[:5] == ["leaven", "train", str(recipe), "--run", "runs/wheat"]
    assert read_recipe(recipe, [w for w in shlex.split(train)[5:] if w != "--set"])
    assert leaven("export", "config", recipe, "--to", "transformers", "-o", "hf", "--lossy")[0] == 0
    code, out, _ = leaven("import", "config", "hf", "--from", "transformers", "-o", "hf-imported.toml")
    assert code == 0
    assert printed(out)[0].startswith("leaven recipes check hf-imported.toml")
    code, out, _ = leaven("transfer", recipe, "--width", "64")
    (again,) = printed(out)
    assert again == f"leaven transfer {shlex.quote(str(recipe))} --width 64 -o wheat-big.toml"
    assert typed(leaven, again)[0] == 0
    proxy = road / "wheat-proxy.toml"
    (like,) = printed(leaven("transfer", proxy, "--like", recipe)[1])
    assert shlex.split(like)[2:] == [str(proxy), "--like", str(recipe), "-o", str(road / "wheat-tuned-2.toml")]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", ["run", "a run", "it's", "\x1b[31mred", "it's\x1b\\u001b\n", "ä\xa0b"])
def test_a_printed_command_names_its_folder_in_a_shell(name: str) -> None:
    command = shown(next_commands._line("report", name))
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert words.stdout.decode().split("\0")[:-1] == ["leaven", "report", name]


def test_a_printed_path_that_begins_with_a_hyphen_is_no_option(
    leaven: Verb, tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_file.parent)
    short = ("--set", "data.tokens=512", "--set", "schedule.warmup_tokens=256")
    code, out, err = leaven("train", "tiny.toml", "--run", "./-rf", *short)
    assert code == 0, err
    assert [shlex.split(command)[1:] for command in printed(out)] == [
        ["report", "./-rf", "-o", "./-rf/report.html"],
        ["sample", "./-rf", "The "],
        ["export", "weights", "./-rf", "./-rf-huggingface", "--to", "huggingface"],
    ]
    for command in printed(out):
        code, _, err = typed(leaven, command)
        assert code == 0, err


def test_a_plan_of_many_gpus_prints_a_torchrun_command(leaven: Verb, road: Path) -> None:
    recipe = road / "wheat.toml"
    sets = ("--set", "model.vocab_size=32768", "--set", "batch.tokens=4096")
    code, out, err = leaven("plan", recipe, "--gpus", "16xH100-80GB", *sets, "--json")
    assert code == 0, err
    words = shlex.split(json.loads(out)["next"][0])
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "8"]
    assert "first-node:29500" in words
    changes = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert changes[:2] == ["model.vocab_size=32768", "batch.tokens=4096"]
    assert read_recipe(recipe, changes).layout.ranks == 16
    found = json.loads(leaven("plan", "olmo-1b", "--gpus", "64xH100-80GB", "--json")[1])
    assert "planned for the training code megatron-flash" in found["cautions"][-1]
    assert found["next"] == ["leaven new olmo-1b.toml --from olmo-1b --gpus 64xH100-SXM-80GB"]


def test_a_recipe_too_large_for_this_machine_is_planned(tiny: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus_here", lambda: 0)
    large = tiny.replace({"model": tiny.model.scaled(4096, 32).model_dump(), "data.tokens": 140_000_000_000})
    assert next_commands.trainable_here(tiny)
    assert not next_commands.trainable_here(large)
    assert next_commands.train(Path("large.toml"), large) == ["leaven plan large.toml --gpus 4xH100-SXM-80GB"]
    h100 = hardware.find_accelerator("H100-80GB")
    assert cluster_for(large, h100) == "4xH100-SXM-80GB"
    one_sequence = large.replace({"batch.tokens": large.model.seq_len, "data.tokens": 10**9})
    assert cluster_for(one_sequence, h100) == "2xH100-SXM-80GB"  # the memory is needed, whatever the batch
    monkeypatch.setattr(hardware, "gpus_here", lambda: 8)
    assert next_commands.train(Path("large.toml"), large) == ["leaven train large.toml --run runs/large"]
    laid_out = tiny.replace({"layout.dp": 4})
    assert next_commands.train(Path("r.toml"), laid_out)[0].startswith(
        "torchrun --nproc-per-node 4 -m leaven train r.toml"
    )


def test_a_model_with_experts_fits_on_the_suggested_gpus(tiny: Recipe) -> None:
    """The shape of OLMoE-1B-7B, whose states and fp32 gradients fill two GPUs."""
    shape = {"n_layers": 16, "d_model": 2048, "n_heads": 16, "n_kv_heads": 16, "d_head": 128, "d_ff": 1024}
    experts = {"number": 64, "active": 8, "d_expert": 1024}
    large = tiny.replace(
        {"model": shape | {"vocab_size": 50_304, "seq_len": 4096, "experts": experts}, "batch.tokens": 507_904}
    )
    assert plan_recipe(large, cluster_for(large, hardware.find_accelerator("H100-80GB"))).chosen.fits


@pytest.mark.usefixtures("no_gpus")
def test_a_recipe_is_planned_on_the_hardware_that_it_is_known_for(leaven: Verb) -> None:
    code, out, err = leaven("new", "bloom.toml", "--from", "bloom-176b")
    assert code == 0, err
    assert "bloom-176b was trained on 384xA100-SXM-80GB" in out
    assert printed(out)[-1] == "leaven plan bloom.toml --gpus 384xA100-SXM-80GB"
    _, out, _ = leaven("recipes", "check", "bloom.toml")
    assert "bloom-176b was trained on 384xA100-SXM-80GB" in out
    assert printed(out) == ["leaven plan bloom.toml --gpus 384xA100-SXM-80GB"]
    recipe = read_recipe("bloom.toml")
    assert next_commands.train(Path("b.toml"), recipe.replace({"data.tokens": 10**12}))[0].endswith("xH100-SXM-80GB")
    why = recipe.why | {"layout.dp": "the planner's fastest layout that fits 64x4xB200: dp 256"}
    laid_out = recipe.replace({"layout.dp": 256, "why": why})
    assert next_commands.train(Path("b.toml"), laid_out) == ["leaven plan b.toml --gpus 64x4xB200-SXM-180GB"]
    assert next_commands.train(Path("b.toml"), laid_out.replace({"layout.dp": 8}))[0].endswith(" 8xH100-SXM-80GB")
    assert leaven("new", "olmo.toml", "--from", "olmo-1b", "--gpus", "16xH200-SXM-141GB")[0] == 0
    _, out, _ = leaven("recipes", "check", "olmo.toml")  # as `new` words the reason of the layout
    assert printed(out) == ["leaven plan olmo.toml --gpus 16xH200-SXM-141GB"]


@pytest.mark.usefixtures("no_gpus")
def test_a_large_proxy_is_planned_on_the_gpus_of_its_target(leaven: Verb) -> None:
    new = ("new", "big.toml", "--params", "1B", "--tokens", "20B")
    plan = "leaven plan big-proxy.toml --gpus 1xA100-SXM-80GB"
    assert plan in leaven(*new, "--gpus", "64xA100-SXM-80GB")[1]
    assert plan in leaven("recipes", "check", "big.toml")[1]
    assert plan in leaven("recipes", "check", "big-proxy.toml")[1]
    _, out, _ = leaven(*new, "--force")  # nothing says on which GPUs
    assert "plan big-proxy.toml --gpus 1xH100-SXM-80GB" in out
    assert "for other GPUs, change --gpus" in out


def test_the_best_recipe_of_a_study_has_one_run_folder(road: Path) -> None:
    study = Path("studies/oats")
    study.mkdir(parents=True)
    (road / "wheat-proxy.toml").rename(study / "best.toml")
    (study / "study.json").touch()
    best = read_recipe(study / "best.toml")
    check, train, _ = next_commands.after_tune(road / "other.toml", study)
    assert check == "leaven recipes check studies/oats/best.toml"
    assert train == "leaven train studies/oats/best.toml --run runs/oats"
    assert next_commands.after_check(study / "best.toml", best, []) == [train]
    second = Path("studies/rye")  # a study around the answer of the first
    second.mkdir()
    (road / "wheat.toml").rename("wheat.toml")
    for file in ("best.toml", "study.json"):
        (second / file).write_bytes((study / file).read_bytes())
    transfer, _ = next_commands.after_tune(study / "best.toml", second)
    Path("wheat.toml").write_text("not = 'a recipe'")
    assert next_commands.after_tune(study / "best.toml", second)[1].startswith("leaven train studies/rye/best.toml")
    (second / "best.toml").write_text("a command file")
    assert next_commands.after_tune(study / "best.toml", second, "sh train.sh")[0] == "sh train.sh"
    assert transfer == "leaven transfer studies/rye/best.toml --like wheat.toml -o wheat-tuned.toml"


def test_printed_commands_leave_out_what_they_do_not_need(leaven: Verb, road: Path) -> None:
    """A run on one rank has no torchrun, and a layout without ZeRO or several ranks has no options for them."""
    recipe = road / "wheat.toml"
    write_recipe(read_recipe(recipe), road / "wheat-tuned.toml")  # tuned, so the plan leads to training
    code, out, err = leaven("plan", recipe, "--gpus", "1xH100-80GB")
    assert code == 0, err
    (train,) = printed(out)
    assert train.startswith("leaven train ")
    assert "zero" not in train
    assert "layout.dp" not in train
    code, out, err = leaven("plan", recipe, "--gpus", "2xH100-80GB", "--layout", "dp=2,zero=0", "--json")
    assert code == 0, err
    (train,) = json.loads(out)["next"]
    assert train.startswith("torchrun --nproc-per-node 2 -m leaven train ")
    assert "--set layout.dp=2" in train
    assert "zero" not in train


def test_a_check_of_the_target_leads_to_its_study_until_there_is_a_tuned_recipe(tiny: Recipe, tmp_path: Path) -> None:
    target, proxy, tuned = (tmp_path / f"wheat{end}.toml" for end in ("", "-proxy", "-tuned"))
    write_recipe(tiny, proxy)
    (tune,) = next_commands.after_check(target, tiny, [])
    assert tune.startswith(f"leaven tune {proxy} ")
    assert next_commands.after_coordinates(proxy, tiny, []) == next_commands.after_check(proxy, tiny, [])
    (train,) = next_commands.after_coordinates(target, tiny, ["data.seed=1"])  # which the proxy does not have
    assert train == f"leaven train {target} --run runs/wheat --set data.seed=1"
    write_recipe(tiny, tuned)
    assert next_commands.after_check(target, tiny, []) == [f"leaven train {target} --run runs/wheat"]
    check, train = next_commands.after_check(tuned, tiny, ["data.seed=1"])
    assert check == f"leaven check coordinates {tuned} --set data.seed=1"
    assert next_commands.after_coordinates(tuned, tiny, ["data.seed=1"]) == [train]


def test_an_option_that_is_suggested_replaces_the_typed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "leaven check coordinates a.toml --seeds=1 --set x=1 --set=y=1 --widths 16,32 --set y.z=0 --json"
    monkeypatch.setattr("sys.argv", typed.split())
    again = next_commands.again("--seeds", "3", "--widths", "16,64", "--set", "y=2")
    assert again == "leaven check coordinates a.toml --set x=1 --set y.z=0 --seeds 3 --widths 16,64 --set y=2"
    assert (
        next_commands.launch(Path("a.toml"), ["x=1", "y=1", "x=2"])
        == "leaven train a.toml --run runs/a --set x=2 --set y=1"
    )
