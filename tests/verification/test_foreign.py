"""Test checks of models from module:factory: labels, errors, batches, and runs compared with a hand-written loop."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.cli.conftest import Verb
from torch import Tensor, nn

from leaven.data.stream import Stream
from leaven.errors import InputError
from leaven.interop.multipliers import ScaleOutput
from leaven.training.outcome import Outcome
from leaven.verification import equivalence as equivalence_module
from leaven.verification import foreign as foreign_module
from leaven.verification.activation_recorder import ActivationRecorder
from leaven.verification.batches import HELD_OUT, corpus, sequences, synthetic
from leaven.verification.collapse import grown
from leaven.verification.coordinates import CoordinateCheck
from leaven.verification.equivalence import equivalence
from leaven.verification.foreign import MADE_UP, SOURCE, ForeignFamily, foreign
from leaven.verification.gradients import GradientCheck
from leaven.verification.model_instance import RunScale, RunSetting
from leaven.verification.runs import ChecksStopped, CheckTrial, RunStore

SCALE = RunScale(16, 1)
EXAMPLES = Path(__file__).parents[2] / "examples"

FACTORY = """
import leaven
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.norm, self.up, self.scale = nn.RMSNorm(width), nn.Linear(width, width, bias=False), scale
    def forward(self, x):
        return x + self.scale * torch.relu(self.up(self.norm(x)))

def factory(width, depth, right=True):
    blocks = nn.Sequential(*(Block(width, 2 / depth if right else 1.0) for _ in range(depth)))
    model = nn.Sequential(nn.Embedding(64, width), blocks, nn.RMSNorm(width), nn.Linear(width, 64, bias=False))
    nn.init.normal_(model[3].weight, std=1 / width)
    for block in blocks:
        nn.init.normal_(block.up.weight, std=width ** -0.5)
    lr = 0.004
    hidden = [block.up.weight for block in blocks] + [model[3].weight]
    rest = [p for p in model.parameters() if not any(p is h for h in hidden)]
    return model, [{"params": rest, "lr": lr}, {"params": hidden, "lr": lr * 32 / width if right else lr}]

def wrong(width, depth):
    return factory(width, depth, right=False)

def flat(width, depth):
    # The number of the norm and of the unembedding changes with the depth.
    blocks = (Block(width, 1.0) for _ in range(depth))
    model = nn.Sequential(nn.Embedding(64, width), *blocks, nn.RMSNorm(width), nn.Linear(width, 64, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.001)

def nested(width, depth):
    # Blocks whose children have different widths, and a list of modules that is no list of blocks.
    mlp = lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
    blocks = nn.Sequential(*(mlp() for _ in range(depth)))
    model = nn.Sequential(nn.Embedding(64, width), mlp(), blocks, nn.Linear(width, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=0.001)

class Unlike(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.parts = nn.ModuleList([nn.Embedding(64, width), nn.Linear(width, 64)])
    def forward(self, x):
        return self.parts[1](self.parts[0](x))

def unlike(width, depth):
    model = Unlike(width)
    return model, torch.optim.AdamW(model.parameters(), lr=0.001)

def nothing(width, depth):
    return None

def missing_group(width, depth):
    model, groups = factory(width, depth)
    return model, groups[1:]

def no_embedding(width, depth):
    model = nn.Linear(width, width)
    return model, model.parameters()

def plain(width, depth, seed=0, ratios=leaven.Ratios(), lr=0.01, rule=True):
    # Its lr falls with the width and rises as the root of batch over tokens.
    model = nn.Sequential(nn.Embedding(64, width), nn.Linear(width, 64))
    lr *= (ratios.batch / ratios.tokens) ** 0.5 * (16 / width if rule else 1)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)

def eager(width, depth):
    return plain(width, depth, lr=0.02)

class Late(nn.RMSNorm):
    # Its gain has no gradient in the first step.
    steps = 0
    def forward(self, x):
        self.steps += 1
        return super().forward(x) if self.steps > 1 else x

def late(width, depth):
    model = nn.Sequential(nn.Embedding(64, width), Late(width), nn.Linear(width, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=0.001)

def wild(width, depth):
    return plain(width, depth, lr=1e9)

def feeding(width, depth, ratios=leaven.Ratios()):
    def batch(seed, step):
        drawn = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(0, 64, (4, 9), generator=drawn)
        return tokens[:, :-1], tokens[:, 1:]
    return *plain(width, depth, ratios=ratios), batch

class Own(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad

class Quiet(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1.0 if self.training else 0.1)

def quiet(width, depth):
    model = nn.Sequential(nn.Embedding(64, width), Quiet(width, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def unseeded(width, depth, seed=0):
    torch.manual_seed(0)
    return plain(width, depth)

def owning(width, depth):
    model, _ = plain(width, depth)
    return model, Own(model.parameters(), lr=0.01)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "their_model.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(foreign_module, "VALIDATION_TOKENS", 1024)
    sys.modules.pop("their_model", None)
    return tmp_path


SIZES = ("--widths", "32,64,128", "--depths", "2,4", "--seeds", "1", "--source", "made-up")


def test_a_module_with_another_name_at_another_depth_is_refused(here: Path, leaven: Verb) -> None:
    check = ("check", "coordinates", "their_model:flat", *SIZES)
    code, _, err = leaven(*check)
    message = "the smallest model has a parameter 3, but the model of width 32 and depth 4 does not; put the blocks"
    assert (code, message in err) == (2, True)
    code, out, _ = leaven(*(word.replace("2,4", "2") for word in check))  # models of one depth have the same names
    assert (code in {0, 1}, "1.up" in out) == (True, True)


def test_coordinates_of_a_right_and_a_wrong_factory(here: Path, leaven: Verb) -> None:
    page = here / "check.html"
    code, out, _ = leaven("check", "coordinates", "their_model:factory", *SIZES, "-o", page)
    assert (code, "passed: " in out) == (0, True)
    assert "their_model:factory" in page.read_text()
    code, out, _ = leaven("check", "coordinates", "their_model:wrong", *SIZES, "-o", page)
    assert (code, "FAILED: " in out) == (1, True)
    assert "GROWS with" in page.read_text()


def test_a_parameter_without_a_first_gradient_is_judged(here: Path) -> None:
    family = foreign("their_model:late", RunScale(16, 1), source=MADE_UP)
    found = GradientCheck(family, (16, 32), (1,), seeds=1).record(family.build(RunScale(16, 1), 0))
    assert found["1"].start == 0 < found["1"].end


def test_blocks_share_labels_and_the_modules_of_a_block_do_not(here: Path) -> None:
    family = foreign("their_model:nested", RunScale(16, 2), source=MADE_UP)
    check = CoordinateCheck(family, (16, 32), (2, 3), seeds=1)
    for depth in check.depths:
        found = check.record(family.build(RunScale(16, depth), 0))
        sizes = {label: (record.features, len(record.squares["start"])) for label, record in found.items()}
        inside = {"2.0": (32, depth), "2.1": (32, depth), "2.2": (16, depth)}
        assert sizes == {"0": (16, 1), "1.0": (32, 1), "1.1": (32, 1), "1.2": (16, 1)} | inside | {"3": (64, 1)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        ("coordinates llama:complete_d_p --seeds 1 --depths 2,4,8", "passed:"),
        pytest.param(
            "gradients llama:complete_d_p --seeds 2 --depths 2,4,8 --steps 1", "passed:", marks=pytest.mark.slow
        ),
        ("coordinates llama:standard --seeds 1 --depths 2", "FAILED:"),
    ],
)
def test_checks_of_the_llama_example(check: str, verdict: str, monkeypatch: pytest.MonkeyPatch, leaven: Verb) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(EXAMPLES)
    code, out, _ = leaven("check", *check.split(), "--widths", "64,128,256", "--source", "made-up")
    assert (code, verdict in out) == (int(verdict == "FAILED:"), True), out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no_such_module:factory", *SIZES), "no_such_module:factory: module no_such_module not found"),
        (("their_model:factory", "--widths", "32", "--depths", "2"), "slopes, which need at least two sizes"),
        (("their_model:unlike", *SIZES), "parts: the members of an nn.ModuleList"),
    ],
)
def test_invalid_arguments_are_refused(here: Path, leaven: Verb, arguments: Sequence[str], message: str) -> None:
    code, _, err = leaven("check", "coordinates", *arguments)
    assert (code, message in err) == (2, True), err


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("factori", {}, "has no factori"),
        ("nothing", {}, r"must return \(model, optimizer\)"),
        ("missing_group", {}, "0.weight is in no group of the optimizer"),
        ("no_embedding", {}, "no torch.nn.Embedding"),
        ("factory", {}, "vocabulary of 64 is too small for text, which needs 257.*made-up"),
        ("factory", {"source": MADE_UP, "batch_tokens": 100}, "give a multiple of 64"),
        ("feeding", {"source": SOURCE}, "returns its own batches"),
    ],
)
def test_invalid_factories_are_refused(here: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        foreign(f"their_model:{name}", RunScale(32, 2), **options)


def test_a_branch_multiplier_is_recorded_once() -> None:
    """The output before the multiplier is recorded, and the container, which returns the scaled output, is not."""
    end = nn.Linear(4, 4)
    branch = nn.Sequential(nn.Linear(4, 4), end)
    end.register_forward_hook(ScaleOutput(0.5))
    with ActivationRecorder(branch, lambda name: name or "branch") as recorder:
        given = branch(torch.ones(2, 4))
        found = recorder.take()
    assert list(found) == ["0", "1"]
    torch.testing.assert_close(found["1"][0], 2 * given)
    assert recorder.containers == set()


def test_norms_on_queries_and_attention_logits_depend_on_the_blocks_own_matrices() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.norm, self.other = nn.Linear(8, 8), nn.RMSNorm(4), nn.RMSNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query = self.norm(self.query(self.other(x)).view(1, 3, 2, 4)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(query, query, query)

    with ActivationRecorder(Attention(), lambda name: name or "attention") as recorder:
        next(iter(recorder._labels))(torch.randn(1, 3, 8))
    assert recorder.matrices == {"query", "norm", "attention.logits"}


def theirs(name: str, tokens: int = 1024) -> ForeignFamily:
    """Return a family whose batch is two sequences."""
    return foreign(f"their_model:{name}", SCALE, source=MADE_UP, batch_tokens=128, tokens=tokens)


def trained(family: ForeignFamily, setting: RunSetting) -> Outcome:
    return family.trial(setting).run()


def expected_loss(seed: int, lr: float, batch: int, tokens: int) -> float:
    """Return the validation loss of ``plain`` at width 16, trained by a loop written out here."""
    text = synthetic(64, 64, 2)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(inputs).transpose(1, 2), targets)

    warm = tokens // 8
    for step in range(tokens // (64 * batch)):
        parts = [text(seed, batch // 2 * step + i) for i in range(batch // 2)]
        optimizer.zero_grad()
        loss(*map(torch.cat, zip(*parts, strict=True))).backward()  # type: ignore[arg-type, no-untyped-call]
        done = (step + 1) * 64 * batch
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (done - warm) / (tokens - warm))) / 2
        optimizer.param_groups[0]["lr"] = lr * (done / warm if done < warm else cosine)
        optimizer.step()
    with torch.no_grad():
        held_out = [loss(*text(HELD_OUT, step)).item() for step in range(1024 // 128)]
    return sum(held_out) / len(held_out)


def test_a_run_equals_a_hand_written_loop(here: Path) -> None:
    plain = theirs("plain")
    first = trained(plain, RunSetting(SCALE, 1.0, 3))
    assert (first.loss, first.diverged, first.tokens) == (pytest.approx(expected_loss(3, 0.01, 2, 1024)), False, 1024)
    # Values of lr are multiples of the factory's; the rule gets the ratios of batch and tokens only if `ruled`.
    assert trained(plain, RunSetting(SCALE, 2.0, 3)).loss == trained(theirs("eager"), RunSetting(SCALE, 1.0, 3)).loss
    larger, longer = (8, 1024), (2, 4096)  # sequences in a batch, tokens
    for size, ratios, by_rule in ((larger, {"batch": 4.0}, 0.02), (longer, {"tokens": 4.0}, 0.005)):
        for ruled, lr in ((True, by_rule), (False, 0.01)):
            found = trained(plain, RunSetting(replace(SCALE, **ratios), 1.0, 3, ruled=ruled))
            assert found.loss == pytest.approx(expected_loss(3, lr, *size))
    gone = trained(theirs("wild", 4096), RunSetting(SCALE, 1.0, 0))
    assert gone.loss == pytest.approx(math.log(64) + 1)
    assert gone.tokens < 4096


def test_batches_of_a_factory_form_one_stream_for_each_seed(here: Path) -> None:
    family = foreign("their_model:feeding", RunScale(16, 1), tokens=512)
    assert (family.vocab_size, family.source, family.sequences, family.seq_len) == (64, None, 4, 8)
    batches = family.build(SCALE, 0).batches
    whole = [torch.cat(side) for side in zip(*(batches(2, step) for step in range(3)), strict=True)]
    for first, count in ((0, 4), (4, 4), (0, 12), (1, 2), (3, 6)):
        for cut, side in zip(sequences(batches, 4, 2, first, count), whole, strict=True):
            assert torch.equal(cut, side[first : first + count])
    half, double = (trained(family, RunSetting(replace(SCALE, batch=batch), 1.0, 0)) for batch in (0.5, 2.0))
    assert half.loss != double.loss
    assert (half.tokens, double.tokens) == (512, 512)
    with pytest.raises(InputError, match=r"0.1 times the batch of 4 sequences is not a whole number"):
        family.trial(RunSetting(replace(SCALE, batch=0.1), 1.0, 0))
    setting = RunSetting(replace(SCALE, batch=29 / 7), 1.0, 0)
    assert setting.scale.batch * 7 != 29  # it is rounded
    assert replace(family, sequences=7).trial(setting).setting == setting


def test_sizes_of_a_factory_grow_with_its_parameters(here: Path) -> None:
    family = foreign("their_model:feeding", RunScale(16, 1), tokens=512)
    assert family.params(RunScale(16, 1)) == 64 * 16 + 16 * 64 + 64
    small, wide = grown(family, [RunScale(16, 1), RunScale(64, 1)])
    assert (small.batch, small.tokens) == (1, 1)
    assert (wide.batch, wide.tokens) == (16 / 4, 16 / 4)  # 3.91 times the parameters: 16 sequences in place of 4


def test_training_never_reads_held_out_text() -> None:
    split = SimpleNamespace(train=np.arange(100), validation=np.arange(1000, 1100))
    batches = corpus(split, seq_len=9, count=4)  # type: ignore[arg-type]
    inputs, targets = batches(0, 1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(torch.from_numpy(Stream(split.train, 9, 0).batch(4, 4))[:, :-1], inputs)
    assert all(batches(seed, step)[1].max() < 1000 for seed in range(3) for step in range(9))
    assert all(batches(HELD_OUT, step)[0].min() >= 1000 for step in range(9))


def test_the_key_of_a_run_changes_with_its_factory(here: Path) -> None:
    def keys(tokens: int = 1024) -> list[str]:
        family = theirs("plain", tokens)
        return [family.trial(RunSetting(RunScale(width, 1), lr, 0)).key for width in (16, 32) for lr in (1.0, 2.0)]

    before = keys()
    assert len(set(before)) == 4
    assert keys() == before
    assert not set(keys(8192)) & set(before)
    text = (here / "their_model.py").read_text()
    (here / "their_model.py").write_text(text.replace("rule=True):", "rule=False):  # lr as at any width"))
    sys.modules.pop("their_model")
    after = keys()
    assert after[:2] == before[:2]  # at the base, both versions of the factory give the same model
    assert not set(after[2:]) & set(before)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("owning", "* p.grad", "* p.grad.sign()"), ("feeding", "1000 * seed + step", "1000 * seed + 2 * step")],
)
def test_the_key_of_a_run_changes_with_an_own_optimizer_and_later_batches(
    here: Path, name: str, old: str, new: str
) -> None:
    def key() -> str:
        sys.modules.pop("their_model", None)
        source = None if name == "feeding" else MADE_UP
        return foreign(f"their_model:{name}", SCALE, source=source, tokens=1024).trial(RunSetting(SCALE, 1.0, 0)).key

    before = key()
    assert key() == before
    (here / "their_model.py").write_text((here / "their_model.py").read_text().replace(old, new))
    assert key() != before


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        ("unseeded", "torch.manual_seed(0)", "torch.manual_seed(seed)", [False, True, True]),
        ("quiet", "0.1)", "1)", [True, True, True]),
    ],
)
def test_the_key_of_a_run_changes_with_what_its_own_seed_and_eval_mode_give(
    here: Path, name: str, old: str, new: str, changed: list[bool]
) -> None:
    def keys() -> list[str]:
        sys.modules.pop("their_model", None)
        return [theirs(name).trial(RunSetting(SCALE, 1.0, seed)).key for seed in range(3)]

    before = keys()
    assert keys() == before
    (here / "their_model.py").write_text((here / "their_model.py").read_text().replace(old, new))
    assert [one != other for one, other in zip(before, keys(), strict=True)] == changed


def test_results_on_another_text_are_refused_and_those_of_another_factory_named(here: Path) -> None:
    notes: list[str] = []
    trial = theirs("plain").trial(RunSetting(SCALE, 1.0, 0))
    line = {"key": trial.key, "text": "a", "loss": 1.0, "tokens": 1, "seconds": 1.0}
    (here / "runs.jsonl").write_text(json.dumps(line) + "\n")
    with RunStore(here, 1, note=notes.append) as store, pytest.raises(InputError, match="has runs on another text"):
        store.run([replace(trial, text="b")])
    with RunStore(here, 1, note=notes.append, stop=lambda: True) as store, pytest.raises(ChecksStopped):
        store.run([replace(trial, key="c")])
    assert notes == [f"no result in {here}/runs.jsonl fits this model and its settings; every run is trained"]


def test_equivalence_needs_a_factory_with_ratios(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, Outcome] = {}

    class Here(RunStore):
        def run(self, trials: Iterable[CheckTrial]) -> Callable[[CheckTrial], Outcome]:
            ran.update({trial.key: trial.run() for trial in trials})
            return lambda trial: ran[trial.key]

    monkeypatch.setattr(equivalence_module, "LEAST_STEPS", 1)  # this test is about the runs, not the losses
    verdict = equivalence(theirs("plain"), SCALE, [4.0], Here(here), seeds=2)
    ruled, control = verdict.rows
    assert len(ran) == 6  # two seeds of three settings: batch x1 (for both rows), and x4 with and without the rule
    assert 0 == ruled.parts["x1"] == control.parts["x1"] != ruled.parts["x4"] != control.parts["x4"]
    with pytest.raises(InputError, match="their_model:eager has no parameter ratios"):
        equivalence(theirs("eager"), SCALE, [4.0], Here(here))


@pytest.mark.usefixtures("in_this_process")
def test_transfer_from_the_command_line_resumes_and_has_a_report(here: Path, leaven: Verb) -> None:
    tiny = ("--lrs", "20,50,100", "--seeds", "1", "--tokens", "1k", "--source", MADE_UP, "--workers", "1")
    check = ("check", "transfer", "their_model:plain", "--run", "runs", "--scales", "16x1,32x1", *tiny)
    code = leaven(*check, "-o", "there.html")[0]
    assert code in {0, 1}
    kept = Path("runs/runs.jsonl").read_text()
    assert kept.count('"key"') == 6
    assert leaven(*check)[0] == code
    assert Path("runs/runs.jsonl").read_text() == kept
    assert leaven("report", "runs", "-o", "here.html")[0] == 0
    assert Path("here.html").read_bytes() == Path("there.html").read_bytes()
    Path("runs/check.json").unlink()
    code, _, err = leaven("report", "runs")
    assert (code, "has not finished; run the same leaven check command" in err) == (2, True)
