"""A pull request that adds a run adds a file: what is wrong in it is said with the file and the field."""

import re
from pathlib import Path

import pytest

from leaven.catalogue.consistency import contradictions
from leaven.catalogue.groups import Provenance, PublishedGroup
from leaven.catalogue.runs import FOLDER, find_run, load_runs
from leaven.recipe.errors import InputError

IDS = sorted(path.stem for path in FOLDER.glob("*.toml"))


@pytest.mark.parametrize("id", IDS)
def test_a_file_is_whole_and_says_what_it_says_twice_the_same(id: str) -> None:
    run = find_run(id)  # an InputError would name file and field
    assert list(contradictions(run)) == []
    stated: list[Provenance] = [*run.instabilities]
    for _, group in run:
        if isinstance(group, PublishedGroup):
            stated += [group, *group.exceptions.values()]
    assert len(stated) >= 4
    assert all(source.strip() for one in stated for source in one.sources)
    text = (FOLDER / f"{id}.toml").read_text(encoding="utf-8")
    assert not re.findall(r"= -?\d{5,}(?![\d.])", text), "large numbers have underscores"


# What is changed in a good file, and how the line begins that a person gets to read.
WRONG = {
    "no source": ("\n[optim]", 'confidence = "file"', "", "optim.confidence: Field required"),
    "empty source": ("\n[data]", 'source = "EleutherAI/pythia: README.md"', 'source = ""', "data.source"),
    "wrong type": ("\n[optim]", "beta2 = 0.95", 'beta2 = "0.95"', "optim.beta2: Input should be a valid number"),
    "unknown key": ("\n[optim]", "grad_clip", "gradclip", "optim.gradclip: Extra inputs"),
    "unknown word": ("\n[schedule]", '"cosine"', '"cosin"', "schedule.shape: Input should be"),
    "date": ("", '"2023-04"', '"April 2023"', "date: String should match"),
    "key heads": ("\n[arch]", "n_kv_heads = 8", "n_kv_heads = 3", "arch.n_kv_heads: 8 heads"),
    "gate": ("\n[arch]", "gated = false", "gated = true", "arch.gated: true, but the activation is gelu"),
    "experts": ("\n[arch]", "gated = false", "gated = false\nn_experts = 4", "arch.experts_per_token: None of 4"),
    "kind": ("", 'kind = "dense"', 'kind = "moe"', "arch.n_experts: a run of kind moe has no experts"),
    "active": ("", "params_active = 70_426_624", "params_active = 9", "params_active: 9 of 70,426,624"),
    "exact count": (
        "\n[arch]",
        "d_ff = 2048",
        "d_ff = 2049",
        "params_total: the shape gives 70,432,774, not 70,",
    ),
    "batch": ("\n[batch]", "2_097_152", "2_097_153", "batch.global_batch_tokens: 1,024 samples of 2,048 are not"),
    "tokens": ("\n[data]", "299_892_736_000", "199_892_736_000", "data.tokens_total: 143,000 steps of 2,097,152"),
    "min lr": ("\n[schedule]", "min_lr = 0.0001", "min_lr = 0.0002", "schedule.min_lr_ratio: 0.1 of 0.001 is"),
    "warm-up": ("\n[schedule]", "warmup_steps = 1430", "warmup_steps = 2000", "schedule.warmup_fraction: "),
    "ranks": ("\n[parallel]", "tp = 1", "tp = 2", "parallel.dp: tp x pp x dp x cp is 64, the accelerators are 32"),
    "exception": ("\n[arch]", "exceptions.d_ff", "exceptions.d_mlp", "arch.exceptions: there is no d_mlp in [arch]"),
    "no toml": ("\n[arch]", "n_layers = 6", "n_layers = six", "Invalid value"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_in_a_file_name_file_and_field(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, right, wrong, said = WRONG[case]
    text = (FOLDER / "pythia-70m.toml").read_text(encoding="utf-8")
    before, head, after = text.partition(group) if group else ("", "", text)
    assert right in head + after
    broken = before + (head + after).replace(right, wrong, 1)
    (tmp_path / "mine.toml").write_text(broken, encoding="utf-8")
    monkeypatch.setattr("leaven.catalogue.runs.FOLDER", tmp_path)
    with pytest.raises(InputError, match=re.escape(f"mine.toml: {said}")) as refused:
        load_runs()
    assert "\n" not in str(refused.value)


def test_a_ramp_ends_where_the_batch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "bloom-176b.toml").read_text(encoding="utf-8")
    monkeypatch.setattr("leaven.catalogue.runs.FOLDER", tmp_path)
    for right, wrong, said in (
        (
            "final_samples = 2048",
            "final_samples = 1024",
            "batch.rampup: it ends at 1,024 samples, the batch is 2,048",
        ),
        ("n_increments = 116", "n_increments = 115", "batch.rampup: 115 increments reach 2,032 samples, not 2048"),
    ):
        path = tmp_path / f"{wrong.split()[-1]}.toml"
        path.write_text(text.replace(right, wrong), encoding="utf-8")
        with pytest.raises(InputError, match=re.escape(said)):
            find_run(path.stem)
