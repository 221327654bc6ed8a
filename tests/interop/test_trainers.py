"""The examples for other trainers: after a step, every parameter has the values of the parameter table.

The reference is the table of a recipe of the same model. Then the examples run as scripts.
"""

import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import TINY
from tests.interop.configs.recipes import rows_of

from leaven.interop.multipliers import ScaleOutput
from leaven.recipe.files import parse_recipe
from leaven.scaling.table import parameter_table

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENS = 1_048_576
RECIPE = parse_recipe(TINY, "tiny.toml").replace(
    {
        "model": {"n_layers": 4, "d_model": 128, "n_heads": 8, "n_kv_heads": 8, "d_head": 16, "d_ff": 256,
                  "vocab_size": 512, "seq_len": 128},
        "batch.tokens": 1_024,
        "data.tokens": TOKENS,
        "hyperparameters": {"lr": 4e-3, "init_std": 0.125, "modules": {"embedding": {"lr": 2.0}}},
        "scaling": {"rule": "complete-d-p",
                    "base": {"width": 64, "depth": 2, "batch_tokens": 512, "tokens": TOKENS // 8}},
    }
)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(EXAMPLES)


def assert_is_table(model: Any, groups: Iterable[dict[str, Any]], share: float) -> None:
    """Assert that a Llama and its groups have the values of the recipe's table, and ``share`` of its lr.

    The first step has lr 0, so the parameters are the initial ones.
    """
    stored = rows_of(RECIPE, "llama")
    named, groups = dict(model.named_parameters()), list(groups)
    group_of = {id(parameter): group for group in groups for parameter in group["params"]}
    assert named.keys() == stored.keys()
    assert sum(len(group["params"]) for group in groups) == len(named)
    for name, (row,) in stored.items():
        group = group_of[id(named[name])]
        found = (group["lr"], group["weight_decay"], *group["betas"], group["eps"])
        assert found == pytest.approx((share * row.lr, row.weight_decay, row.beta1, row.beta2, row.eps)), name
        assert float(named[name].detach().std()) == pytest.approx(row.init_std, rel=0.04), name
        assert float(named[name].detach().mean()) == pytest.approx(row.init_mean, abs=0.02), name
    factors = [hook.factor for module in model.modules() for hook in module._forward_hooks.values()
               if isinstance(hook, ScaleOutput)]  # fmt: skip
    assert sorted(factors) == pytest.approx(
        sorted(each for each in parameter_table(RECIPE).multipliers.values() if each != 1)
    )


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from hf_trainer import trainer

    run = trainer(str(tmp_path), steps=1)
    run.train()
    assert_is_table(run.model, run.optimizer.param_groups, 1 / 4)


def test_the_loop_of_accelerate() -> None:
    pytest.importorskip("accelerate")
    from accelerate_loop import train

    model, optimizer = train(steps=1)
    assert_is_table(model, optimizer.param_groups, 1 / 4)


@pytest.mark.long
def test_the_module_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning_module import Llama

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    run = Llama()
    loop = lightning.Trainer(max_steps=1, default_root_dir=tmp_path, enable_model_summary=False, **quiet)
    loop.fit(run, torch.utils.data.DataLoader(torch.randint(512, (8, 128)), batch_size=8))
    assert_is_table(run.model, run.trainer.optimizers[0].param_groups, 1 / 4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "package", "folder"),
    [
        ("hf_trainer", "accelerate", "hf_trainer/model"),
        ("accelerate_loop", "accelerate", "accelerate_loop"),
        ("lightning_module", "lightning", "lightning_module"),
    ],
)
def test_the_script_saves_a_model_without_multipliers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, package: str, folder: str
) -> None:
    pytest.importorskip(package)
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    program = (EXAMPLES / f"{script}.py").read_text()
    assert program.count("= 20") + program.count("=20") == 1
    Path("program.py").write_text(program.replace("= 20", "= 2").replace("=20", "=2"))  # steps
    values = runpy.run_path("program.py", run_name="__main__")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / folder)
    tokens = torch.randint(512, (2, 16))
    if "run" in values:  # the trained model, with its multipliers
        ours = values["run"].model.eval()
        torch.testing.assert_close(model(tokens).logits, ours(tokens).logits, rtol=1e-4, atol=1e-4)
    assert model(tokens).logits.isfinite().all()
