"""The micro-batch: which sizes fit, which is fastest, and losses that do not depend on it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.training.conftest import losses, room_for

from leaven.data.stream import Stream
from leaven.data.tokens import TokenSet
from leaven.errors import InputError
from leaven.recipe.files import read_recipe
from leaven.recipe.recipe import Recipe
from leaven.training import micro_batch
from leaven.training.bench import bench
from leaven.training.engine import Training
from leaven.training.micro_batch import GIB, choose_micro_batch, even, needed_memory, with_micro_batch
from leaven.training.run_folder import RunFolder
from leaven.training.trainer import train

LONG = {"data.tokens": 256 * micro_batch.TIMED_STEPS}
RAMP = {"batch.ramp": dict(start_tokens=96, increment_tokens=32, over_tokens=1_000)}


@given(st.integers(1, 5_000), st.integers(1, 600))
def test_a_batch_is_cut_evenly_into_as_few_forwards_as_fit(sequences: int, micro_batch: int) -> None:
    size = even(sequences, micro_batch)
    forwards = -(-sequences // size)
    assert 1 <= size <= micro_batch
    assert forwards == -(-sequences // micro_batch)
    assert forwards * size - sequences < forwards  # less than one sequence of padding a forward


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "batches"), [({}, [256] * 3), (RAMP, [96, 96, 96, 128, 160, 160, 192, 224])], ids=["static", "ramp"]
)
def test_losses_and_gradients_are_those_of_the_whole_batch_for_any_micro_batch(
    tiny: Recipe, tokens: TokenSet, how: dict[str, Any], batches: list[int]
) -> None:
    """All in float64. Each loss and gradient norm is compared with one plain forward pass over the batch. The weights
    at the end are compared between micro-batches. Micro-batches of 3 and 5 divide neither 8 sequences nor most
    batches of the ramp."""
    stream, ends = Stream(tokens.train, 32, 0), {}
    for size in (1, 3, 5, 8):
        training = Training(tiny.replace(how | {"batch.micro_batch": size}), tokens)
        training.model.double()
        done = 0
        for batch in batches:
            windows = torch.from_numpy(stream.batch(done // 32, batch // 32))
            expected = F.cross_entropy(training.model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
            gradients = torch.autograd.grad(expected, list(training.model.parameters()))
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            step = training.step()
            done += batch
            assert (step.batch_tokens, step.tokens) == (batch, done)
            assert step.loss == pytest.approx(expected.item(), rel=1e-6)  # the running sum is kept in fp32
            assert step.grad_norm == pytest.approx(norm.item(), rel=1e-10)
        ends[size] = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    for size, end in ends.items():
        assert torch.allclose(end, ends[8], rtol=1e-9, atol=1e-11), size


def test_a_choice_changes_nothing_but_the_micro_batch(tiny: Recipe, tokens: TokenSet) -> None:
    """The choice leaves model, moments, random state and position unchanged. The steps that follow are those of a run
    whose recipe states the same micro-batch, bit for bit, also with dropout."""
    recipe = tiny.replace(LONG | {"model.dropout": 0.1})
    training = Training(recipe, tokens)
    before = training.checkpoint()
    state = {name: value.clone() for name, value in before.model.items()}
    rng = torch.random.get_rng_state()
    choice = choose_micro_batch(training)
    training.recipe = with_micro_batch(training.recipe, choice.micro_batch, choice.why)
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert training.checkpoint().progress == before.progress
    assert training.checkpoint().optimizer.keys() == before.optimizer.keys()
    assert all(torch.equal(value, state[name]) for name, value in training.model.state_dict().items())
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert [timing.micro_batch for timing in choice.timings] == [1, 2, 4, 8]
    assert choice.micro_batch == training.recipe.batch.micro_batch == training.micro_batch
    assert training.recipe.why["batch.micro_batch"].startswith("auto: fastest of 1: ")
    by_hand = Training(recipe.replace({"batch.micro_batch": choice.micro_batch}), tokens)
    assert [training.step().loss for _ in range(4)] == [by_hand.step().loss for _ in range(4)]


@pytest.fixture
def at_speed(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Return the seconds of a forward and backward pass by micro-batch, for the test to fill. A size that is missing
    runs out of memory."""
    seconds: dict[int, float] = {}
    monkeypatch.setattr(micro_batch, "time_passes", lambda training, size: seconds.get(size))
    return seconds


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 1.9, 4: 3.4, 8: 8.0}, 4),  # the largest that fits is not the fastest
        ({1: 1.0, 2: 1.5, 4: 2.5, 8: 4.9}, 4),  # 8 is less than 2% faster, and 4 needs less memory
        ({1: 1.0, 2: 1.5, 4: 2.5, 8: 4.0}, 8),
        ({1: 1.0, 2: 1.5}, 2),
    ],
)
def test_the_fastest_micro_batch_is_chosen(
    tiny: Recipe, tokens: TokenSet, at_speed: dict[int, float], seconds: dict[int, float], chosen: int
) -> None:
    at_speed.update(seconds)
    choice = choose_micro_batch(Training(tiny.replace(LONG), tokens))
    assert choice.micro_batch == chosen
    assert {t.micro_batch: t.tokens_per_second for t in choice.timings} == {
        size: pytest.approx(256 / (8 / size * second)) for size, second in seconds.items()
    }
    assert choice.too_large == (() if len(seconds) == 4 else (4,))


def test_timing_takes_at_most_a_minute(
    tiny: Recipe, tokens: TokenSet, at_speed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence takes ten seconds. So a micro-batch of 1 takes 40 s, and a micro-batch of 2 would take another 80
    s."""
    clock = [0.0]
    at_speed.update({1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0})

    def trial(training: Training, size: int) -> float:
        clock[0] += at_speed[size]
        return at_speed[size]

    monkeypatch.setattr(micro_batch, "time_passes", trial)
    monkeypatch.setattr(micro_batch.time, "perf_counter", lambda: clock[0])
    assert choose_micro_batch(Training(tiny.replace(LONG), tokens)).micro_batch == 1
    assert clock[0] == 40.0


@pytest.mark.parametrize("how", [{}, LONG], ids=["by rule of thumb", "timed"])
def test_out_of_memory_reduces_the_micro_batch(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    room_for(monkeypatch, 2)
    said: list[tuple[str, dict[str, Any]]] = []
    done: list[int] = []
    train(
        tiny.replace(how),
        tokens,
        tmp_path / "run",
        on_event=lambda event, values: said.append((event, values)),
        on_step=lambda step: done.append(step.step),
        stop=lambda: len(done) >= 4,  # the step that was under way is read too
    )
    assert len(done) in {4, 5}
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    assert recipe.batch.micro_batch in {1, 2}
    largest = 8 if not how else 4
    assert f"out of memory with {largest}" in recipe.why["batch.micro_batch"]
    (event,) = [values for name, values in said if name == "micro_batch"]
    assert event["micro_batch"] == recipe.batch.micro_batch
    assert set(event["too_large"]) == ({8, 4} if not how else {4})


def test_a_run_is_refused_if_not_one_sequence_fits(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for how in ({}, LONG):
        room_for(monkeypatch, 0)
        with pytest.raises(InputError, match="out of memory with a micro-batch of 1 on cpu"):
            train(tiny.replace(how), tokens, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_on_a_cpu_only_sizes_that_fit_are_tried(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would kill a process that takes too much memory. So a formula decides: only sizes that need at most
    80% of the free memory are tried."""
    monkeypatch.setattr(micro_batch, "free_memory", lambda device: int(needed_memory(tiny, 2, "cpu") / 0.79))
    choice = choose_micro_batch(Training(tiny.replace(LONG), tokens))
    assert [timing.micro_batch for timing in choice.timings] == [1, 2]
    assert choice.too_large == (4, 8)
    monkeypatch.setattr(micro_batch, "free_memory", lambda device: int(needed_memory(tiny, 1, "cpu")))
    with pytest.raises(InputError, match="with a micro-batch of 1, but only .* GiB may be used on cpu .80% of .*"):
        train(tiny, tokens, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has about 200 billion parameters, more than this machine can hold. None of them is allocated."""
    monkeypatch.setattr("leaven.training.trainer.Training", None)
    huge = tiny.replace({"model.d_ff": 2**22, "model.n_layers": 1_000})
    with pytest.raises(InputError, match=r"training needs about \d.* GiB"):
        train(huge, tokens, tmp_path / "run")
    with pytest.raises(InputError, match=r"training needs about \d.* GiB"):
        bench(huge, tokens, [1], [1], limit_seconds=1)
    assert not (tmp_path / "run").exists()


def test_the_closed_form_counts_states_and_activations(tiny: Recipe) -> None:
    """The expected bytes in fp32: 12 for each parameter, for its gradient and two moments. For a sequence of 32
    tokens, 8 measured bytes for each value that the backward pass of two blocks needs: 4 d in and out of norms, 2 (q
    + kv) twice for their norms, and 4 d_ff. 12 bytes for each logit, and 24 bytes for each hidden value of the loss.
    For each weight of the unembedding, its gradient (4 bytes); the logits fit into one chunk, so no product is added
    to it. All with 5% for fragmentation. On a processor, also the attention probabilities of short sequences."""
    model = tiny.model
    activations = 2 * 32 * 8 * (4 * 16 + 2 * (16 + 8) + (16 + 8) + 4 * 32)
    logits = 12 * 32 * 320 + 3 * 8 * 32 * 16
    one, two = (needed_memory(tiny, size, "cpu") for size in (1, 2))
    probabilities = 4 * 2 * 2 * 32 * 32
    assert two - one == pytest.approx(1.05 * (activations + logits) + probabilities)
    weights = 4 * model.params
    once = 12 * model.params + 4 * 320 * 16
    assert one == pytest.approx(1.05 * (activations + logits + once) + 0.05 * weights + probabilities)
    long = {"model.seq_len": 4_096, "batch.tokens": 8_192, "data.tokens": 8_192, "schedule.warmup_tokens": 0}
    long |= {"model.qk_norm": False, "layout.recompute": "full"}
    packed, isolated = (tiny.replace(long | {"data.documents": how}) for how in ("packed", "isolated"))
    mask = needed_memory(isolated, 2, "cpu") - needed_memory(packed, 2, "cpu")
    assert mask == pytest.approx(2 * 4_096**2 * 4)  # fp32, of two sequences
    windows = packed.replace({"model.window": 64})  # no mask with the kernel for CPUs
    assert needed_memory(windows, 2, "cpu") == needed_memory(packed, 2, "cpu")
    assert needed_memory(tiny.replace({"model.dropout": 0.1}), 1, "cpu") > one + 2 * 2 * 32 * 32 * 8
    assert one < GIB


def test_a_ramp_has_a_micro_batch_for_each_batch_and_a_resume_keeps_them(
    tiny: Recipe, tokens: TokenSet, tmp_path: Path, at_speed: dict[int, float]
) -> None:
    """The run is stopped during the ramp, and resumed when another size would be fastest. Its losses are those of a
    recipe that states the micro-batch."""
    recipe = tiny.replace(LONG | RAMP)
    at_speed.update({1: 1.0, 2: 1.9, 4: 3.0, 8: 8.0})
    train(recipe, tokens, tmp_path / "run", stop=lambda: len(losses(tmp_path / "run")) >= 3)
    at_speed.update({1: 0.1})
    train(recipe, tokens, tmp_path / "run", stop=lambda: len(losses(tmp_path / "run")) >= 12)
    by_hand = recipe.replace({"batch.micro_batch": 4})
    train(by_hand, tokens, tmp_path / "hand", stop=lambda: len(losses(tmp_path / "hand")) >= 12)
    assert losses(tmp_path / "run") == losses(tmp_path / "hand")
    events = RunFolder(tmp_path / "run").events()
    ramp = {event["batch_tokens"] // 32: event["micro_batch"] for event in events if event["event"] == "ramp"}
    assert ramp == {4: 4, 6: 3, 7: 4, 8: 4}
    (resumed,) = [event for event in events if event["event"] == "resume"]
    assert (resumed["batch_tokens"], resumed["micro_batch"]) == (5 * 32, 3)
    assert sum(event["event"] == "micro_batch" for event in events) == 1
    why = json.dumps(read_recipe(tmp_path / "run" / "recipe.toml").why)
    assert "auto: fastest of 1: 32, 2: 33.7, 4: 42.7, 8: 32 tokens/s" in why
