"""Which commands and names of leaven need an optional package, and what they print without it."""

import subprocess
import sys
from pathlib import Path

import pytest

import leaven
from leaven.interop.configs.export import TARGETS

EXTRAS = ("torch", "optuna", "plotly", "tokenizers", "safetensors", "pyarrow", "tensorboard", "transformers")
SCRIPT = f"""
import sys

import leaven, leaven.cli, leaven.planning.plan, leaven.scaling.transfer, leaven.catalogue.laws

leaven.read_recipe, leaven.Ratios(batch=8, tokens=40), leaven.Hyperparameters(lr=0.01, init_std=0.1)
assert not [name for name in {EXTRAS!r} if name in sys.modules], "an import of leaven imports a package of an extra"
for name in {EXTRAS!r}:
    sys.modules[name] = None  # now importing it fails as if it were not installed
for verb in sys.argv[1:]:
    sys.argv = ["leaven", *verb.split()]
    code = 0
    try:
        leaven.cli.main()
    except SystemExit as end:
        code = end.code or 0
    sys.stdout.flush()
    print(verb, code, file=sys.stderr)
"""


@pytest.mark.long
def test_only_training_needs_extras(tiny_file: Path, tmp_path: Path) -> None:
    """Run all verbs in one process without the extras: choosing and planning work, training says what to install."""
    out = tmp_path / "out"
    light = [
        "recipes list",
        "recipes show bloom-176b",
        "recipes nearest --params 7B --tokens 2T",
        "laws --params 1B --tokens 20B",
        f"show {tiny_file}",
        f"plan {tiny_file} --gpus 8xH100-80GB --set precision.compute=bf16",
        f"transfer {tiny_file} --width 32",
        *(
            f"export config {tiny_file} --to {to} --lossy -o {tmp_path}/{to} --set model.qk_norm=false"
            for to in TARGETS
        ),
        f"import config {tmp_path}/megatron --from megatron",
        f"import config {tmp_path}/transformers --from transformers",
    ]
    heavy = [f"train {tiny_file} --run {out}", f"tune {tiny_file} --study {out}", f"demo --run {out}"]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *light, *heavy], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stderr.splitlines()
    assert [f"{verb} 0" for verb in light] == [line for line in printed if line in {f"{verb} 0" for verb in light}]
    assert printed[-5::2] == [f"{verb} 2" for verb in heavy]
    assert all("pip install 'leaven[train]'" in line for line in printed[-6::2])
    assert not out.exists()


def test_every_exported_name_is_there() -> None:
    assert leaven.parametrize.__module__ == "leaven.interop.parametrize"
    assert leaven.train.__module__ == "leaven.training.trainer"
    assert all(hasattr(leaven, name) for name in leaven.__all__)
    assert not hasattr(leaven, "parametrise")
