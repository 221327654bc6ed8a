"""The published runs: complete, sourced, and of the size they claim."""

from pathlib import Path

import pytest

from leaven.catalogue.groups import Group
from leaven.catalogue.runs import FOLDER, Run, diff, find_run, load_runs, nearest
from leaven.recipe.errors import InputError

IDS = sorted(path.stem for path in FOLDER.glob("*.toml"))


@pytest.mark.parametrize("id", IDS)
def test_the_shape_gives_the_published_parameter_count(id: str) -> None:
    run = find_run(id)
    assert run.params_from_shape == pytest.approx(run.params_total, rel=0.03)


@pytest.mark.parametrize("id", [id for id in IDS if find_run(id).params.precision == "exact"])
def test_an_exact_published_count_is_met_to_the_parameter(id: str) -> None:
    run = find_run(id)
    left_out = {"dclm-411m-1x": 2 * 24 * 1024}.get(id, 0)  # its own count forgets the QK-norm gains
    assert run.params_from_shape - left_out == run.params_total


@pytest.mark.parametrize("id", IDS)
def test_leavens_own_shape_has_the_published_parameter_count_where_leaven_can_build_the_model(id: str) -> None:
    run = find_run(id)
    shape = run.model_shape()
    foreign = {"pythia-70m", "dclm-411m-1x", "stablelm-3b-4e1t", "olmo2-7b", "gpt-neox-20b"}
    assert (shape is None) == (id in foreign)
    if shape is not None:
        assert shape.params == pytest.approx(run.params_total, rel=0 if run.params.precision == "exact" else 0.03)
        assert shape.params == run.params_from_shape  # counted by other code


def test_every_group_of_every_run_has_a_source() -> None:
    for run in load_runs():
        groups = [group for _, group in run if isinstance(group, Group)]
        assert len(groups) >= 7
        assert all(text for group in groups for text in group.sources)


def test_an_exception_has_its_own_source() -> None:
    arch = find_run("llama1-65b").arch
    assert arch.provenance("d_ff").confidence == "paper-memory"
    assert arch.provenance("d_model").confidence == "file"


def test_published_values_in_the_terms_of_leaven() -> None:
    bloom = find_run("bloom-176b")
    assert bloom.decay == "cosine"
    assert bloom.warmup_fraction == pytest.approx(375e6 / 366e9, rel=1e-4)
    assert bloom.residual_init_std == pytest.approx(0.0048 / 140**0.5)
    pythia = find_run("pythia-70m")
    assert pythia.warmup_fraction == pytest.approx(0.01)
    assert pythia.init_std == pytest.approx((2 / (5 * 512)) ** 0.5, rel=1e-4)
    assert pythia.residual_init_std == pytest.approx(2 / (6 * 512**0.5), rel=1e-4)
    assert find_run("smollm2-135m").decay == "wsd"
    assert find_run("olmo2-7b").residual_init_std == 0.02  # the same std everywhere
    assert find_run("dclm-411m-1x").residual_init_std is None  # differs from layer to layer
    assert find_run("llama1-65b").init_std is None


def test_steps_are_no_measure_of_warm_up_while_the_batch_ramps() -> None:
    run = find_run("pythia-70m")
    document = run.model_dump(exclude_none=True)
    document["batch"]["rampup"] = {"kind": "linear", "start_tokens": 1}
    document["schedule"]["warmup_fraction"] = 0.25
    assert Run.model_validate(document).warmup_fraction == 0.25


def test_nearest_gives_each_lineage_one_vote_before_any_second() -> None:
    found = nearest(124_000_000, 10_000_000_000, limit=10)
    lineages = [run.lineage.name for run, _ in found]
    votes = len(set(lineages))
    assert votes < 10
    assert len(set(lineages[:votes])) == votes
    distances = [distance for _, distance in found]
    assert distances[:votes] == sorted(distances[:votes])
    assert distances[votes:] == sorted(distances[votes:])
    assert found[0][0].id == "gpt2-124m-llmc"


@pytest.mark.parametrize(
    ("params", "tokens", "id"),
    [
        (60_000_000, 1_200_000_000, "pythia-70m"),
        (1_000_000_000, 20_000_000_000, "tinyllama-1.1b"),
        (7_000_000_000, 2_000_000_000_000, "olmo2-7b"),
        (400_000_000_000, 300_000_000_000, "bloom-176b"),
    ],
)
def test_nearest_is_useful_from_tiny_to_huge(params: int, tokens: int, id: str) -> None:
    assert nearest(params, tokens, limit=1)[0][0].id == id


def test_a_doubling_of_parameters_is_one_octave_and_tokens_weigh_an_eighth() -> None:
    run = find_run("bloom-176b")
    assert nearest(run.params_total * 2, run.tokens, limit=1)[0][1] == pytest.approx(1.0)
    assert nearest(run.params_total, run.tokens * 4, limit=1)[0][1] == pytest.approx(0.25)


def test_nearest_never_offers_a_learning_rate_that_means_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = find_run("pythia-70m").model_dump(exclude_none=True)
    mup = document | {"schedule": document["schedule"] | {"parametrisation": "muP base lr"}}
    ademamix = document | {"optim": document["optim"] | {"optimizer": "ademamix"}}
    runs = tuple(map(Run.model_validate, (mup, ademamix, find_run("bloom-176b").model_dump(exclude_none=True))))
    monkeypatch.setattr("leaven.catalogue.runs.load_runs", lambda: runs)
    assert [run.id for run, _ in nearest(70_000_000, 10**9, limit=5)] == ["bloom-176b"]


def test_diff_lists_what_differs_and_no_sources() -> None:
    small, big = find_run("pythia-70m"), find_run("gpt-neox-20b")
    rows = {path: (a, b) for path, a, b in diff(small, big)}
    assert rows["optim.weight_decay"] == (0.1, 0.01)
    assert rows["arch.d_model"] == (512, 6144)
    assert rows["throughput.tflops_per_gpu"] == (None, 117.0)
    assert "optim.beta1" not in rows  # the same in both
    assert not [path for path in rows if "source" in path or "confidence" in path or "notes" in path]
    assert diff(small, small) == []


def test_an_unknown_id_names_the_ones_like_it() -> None:
    with pytest.raises(InputError, match=r"no published run 'pythia-71m'; did you mean pythia-70m"):
        find_run("pythia-71m")
    with pytest.raises(InputError, match=r"known are bloom-176b, "):
        find_run("..")


def test_a_wrong_key_in_a_new_file_names_file_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "pythia-70m.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace("grad_clip", "gradclip"), encoding="utf-8")
    monkeypatch.setattr("leaven.catalogue.runs.FOLDER", tmp_path)
    with pytest.raises(InputError, match=r"mine\.toml: .*optim\.gradclip"):
        load_runs()
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert find_run("mine").params_total == find_run("mine").params_from_shape == 70_426_624
