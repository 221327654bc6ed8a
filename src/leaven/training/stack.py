"""A stack of trials: trains many recipes of one shape at once, as one batched model on one device.

Parameters, moments and samples have a leading dimension K with one entry for each recipe. The recipes may differ in
hyperparameters, schedule and seed. On a GPU, a stack of 48 small models was 36 times as fast as eight processes
(docs/log.md). On a CPU it is not faster. Sizes in comments: K recipes, B sequences, T tokens, P parameters.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leaven.data.tokens import TokenSet
from leaven.model.initialisation import fill
from leaven.planning.flops import flops_per_token
from leaven.recipe.base import Part
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.scaling.table import parameter_table
from leaven.training.checkpoint import Checkpoint, Progress
from leaven.training.device import DTYPES, default_device
from leaven.training.early_stopping import POINTS, DivergenceMonitor
from leaven.training.loop import Diverged, StepResult
from leaven.training.micro_batch import needed_memory
from leaven.training.outcome import Outcome, this_process
from leaven.training.trial import TrialCheckpoint, checkpoint_folder, same_tokens

VALUES = ("lr", "weight_decay", "beta1", "beta2", "eps")  # columns of the parameter table that a step reads
WARM = 3  # warm-up steps before a CUDA graph is captured
MOST = 64  # the largest number of trials in a stack: the largest that was measured
MEMORY = 0.5  # a stack may need at most this share of the free memory, by the planner's formula
# The only values of these settings that a stack can train.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "model.norm": ("rmsnorm",),
    "model.activation": ("swiglu",),
    "model.positions": ("rope",),
    "model.qk_norm_per_head": (False,),
    "model.embedding_norm": (False,),
    "model.bias": (False,),
    "model.dropout": (0.0,),
    **{f"model.{key}": (value,) for key, value in ModelShape.added_defaults().items()},
    "hyperparameters.optimizer": ("adamw",),
    "hyperparameters.grad_clip.mode": ("global",),
    "hyperparameters.z_loss": (0.0,),
    "batch.ramp": (None,),
    "batch.stages": ((),),
    "data.documents": ("packed",),
    "start.folder": (None,),
    "precision.compute": ("fp32", "bf16"),
    "stability.on_spike": ("rollback", "skip", "stop"),  # not "off": it skips steps whose loss is not finite
}


def refusal(recipe: Recipe) -> str | None:
    """Return the first setting with which a stack of trials cannot train, such as "model.bias = True", or None."""
    found = {path: attrgetter(path)(recipe) for path in SETTINGS}
    refused = {path: value for path, value in found.items() if value not in SETTINGS[path]}
    said = (path if isinstance(value, Part) else f"{path} = {value}" for path, value in refused.items())
    return next(said, None)


def most_trials(recipe: Recipe, free: float) -> int:
    """Estimate how many trials fit into a stack on a GPU with ``free`` free bytes. Return at most :data:`MOST`."""
    shape, tokens = recipe.model, recipe.batch.tokens
    windows = _integer(shape).itemsize * recipe.steps * tokens * (1 + 1 / shape.seq_len)
    states = 4 * 3 * shape.params  # copies of weights and gradients that the planner does not count
    logits = 12 * tokens * shape.vocab_size  # of all tokens at once, in two dtypes, with gradients
    keeping = recipe.replace({"layout.recompute": "none"})  # a stack recomputes no activations
    each = needed_memory(keeping, tokens // shape.seq_len, "cuda") + states + logits + windows
    return min(MOST, int(MEMORY * free / each))


def train_stack(
    recipes: Sequence[Recipe],
    size: int,
    *,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60,
    inputs: str | None = None,
) -> list[Outcome]:
    """Train ``recipes``, at most ``size``, together in one stack. Return their outcomes in the same order.

    The process keeps the compiled stack for the next call, because compiling takes longer than many trials. A
    trial that diverges stays in the stack until the others are done.

    Args:
        checkpoint: a folder for a checkpoint every ``checkpoint_seconds``. To resume, pass the same recipes in the
            same order, and the same size. Raise InputError if it was not written by these trials.
        inputs: the required fingerprint of the training text (``fingerprint_of``); None: any. Another raises
            InputError.
    """
    first = recipes[0]
    tokens = same_tokens(first, inputs)
    stack = _stack(first, size, tokens)
    stack.begin(recipes)
    saving = None
    if checkpoint is not None:
        folder = checkpoint_folder(checkpoint / f"stack-{size}", recipes, tokens)
        saving = TrialCheckpoint(stack, folder, checkpoint_seconds, [])
        saving.resume()
    at_once = first.stability.on_spike != "off"
    monitors = [DivergenceMonitor(first.model.vocab_size, first.data.tokens, at_once) for _ in recipes]
    diverged, seen = dict[int, int](), 0  # by index of a trial: the tokens after which it diverged
    while True:
        for losses in stack.losses_from(seen):
            seen += 1
            for k, (loss, monitor) in enumerate(zip(losses, monitors, strict=False)):
                result = StepResult(seen, seen * first.batch.tokens, loss, first.batch.tokens)
                try:
                    if k not in diverged:
                        monitor.after_step(result)
                except Diverged:
                    diverged[k] = result.tokens
        if seen and saving is not None:
            saving.after_step(result)
        if stack.finished or len(diverged) == len(recipes):
            break
        stack.advance(-(-first.steps // POINTS))
    found = stack.evaluate(first) if len(diverged) < len(recipes) else [math.inf] * len(recipes)
    return [
        Outcome(
            loss=loss if math.isfinite(loss) and k not in diverged else math.inf,
            tokens=(trained := diverged.get(k, monitor.done)),
            flops=trained * flops_per_token(first.model),
            seconds=stack.progress.seconds,
            curve=monitor.curve,
            worker=this_process(),
        )
        for k, (loss, monitor) in enumerate(zip(found, monitors, strict=False))
    ]


def _integer(shape: ModelShape) -> torch.dtype:
    return torch.int16 if shape.vocab_size < 2**15 else torch.int32


_kept: "dict[str, TrialStack]" = {}  # the latest stack of this process, by what it was built for


def _stack(like: Recipe, size: int, tokens: TokenSet) -> "TrialStack":
    parts = [like.model, like.batch, like.precision]
    scale = parameter_table(like).attention_scale
    key = json.dumps([*(part.model_dump(mode="json") for part in parts), size, scale])
    if key not in _kept:
        _kept.clear()  # frees the memory of the latest stack before the next one is allocated
        _kept[key] = TrialStack(like, size, tokens, str(default_device()))
    _kept[key].tokens = tokens
    return _kept[key]


class TrialStack:
    """Trains up to ``size`` recipes at once. All have the shape, batch size and dtype of the recipe ``like``."""

    def __init__(self, like: Recipe, size: int, tokens: TokenSet, device: str) -> None:
        assert refusal(like) is None, refusal(like)
        shape = like.model
        self.shape, self.size, self.tokens, self.device = shape, size, tokens, torch.device(device)
        self.dtype = DTYPES[like.precision.compute]
        self.sequences = like.batch.tokens // shape.seq_len
        self.names = [parameter.name for parameter in shape.parameters()]
        sizes = {parameter.name: parameter.shape for parameter in shape.parameters()}

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        # All parameters lie in one buffer (K, P), so that an update is one kernel.
        counts = [math.prod(sizes[name]) for name in self.names]
        self.flat, self.first, self.second = (zeros(size, sum(counts)) for _ in range(3))
        parts = torch.split(self.flat, counts, 1)
        self.parameters = {name: part.view(size, *sizes[name]) for name, part in zip(self.names, parts, strict=True)}
        self.owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(self.device)
        # In float64, because fp32 rounds a beta near 1 to 1.
        self.values = {value: zeros(size, len(counts), dtype=torch.float64) for value in VALUES}
        branches = [f"layers.{i}.{end}.out.weight" for i in range(shape.n_layers) for end in ("attention", "mlp")]
        self.readout = "embedding" if shape.tied_embeddings else "unembedding"
        self.multipliers = {name: zeros(size, 1, 1, 1) for name in (*branches, f"{self.readout}.weight")}
        self.clip, self.step, self.schedule = zeros(size), zeros(1, dtype=torch.int64), zeros(0, size)
        self.record = zeros(0, size)  # losses of all steps
        self.windows = zeros(size, 0, dtype=_integer(shape))
        self.attention_scale = parameter_table(like).attention_scale
        places = torch.arange(shape.seq_len, dtype=torch.float64)
        angles = torch.outer(places, shape.rope_theta ** -(torch.arange(0, shape.d_head, 2).double() / shape.d_head))
        self.cos, self.sin = (part.float().to(self.device)[:, None] for part in (angles.cos(), angles.sin()))
        self.losses: Callable[..., Tensor] = self._losses
        self.update: Callable[..., None] = self._update
        if self.device.type == "cuda":
            self.losses, self.update = torch.compile(self._losses), torch.compile(self._update)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.progress = Progress()  # tokens of one recipe; seconds do not include the time to fill the buffers

    def train(self, recipes: Sequence[Recipe]) -> list[float]:
        """Train the recipes to their end, even if they diverge. Return their validation losses in nats per token."""
        self.begin(recipes)
        self.advance(len(self.schedule))
        return self.evaluate(recipes[0])[: len(recipes)]

    def begin(self, recipes: Sequence[Recipe]) -> None:
        """Fill the buffers for up to ``size`` recipes. The last recipe is repeated in the remaining places."""
        assert 0 < len(recipes) <= self.size
        self._fill([*recipes, *[recipes[-1]] * (self.size - len(recipes))], recipes[0].steps)
        self.step.zero_()
        self.progress = Progress()

    def advance(self, steps: int) -> None:
        """Take the next ``steps`` steps, or as many as are left, and wait until the device has finished them."""
        began, before = time.perf_counter(), self.progress
        last = min(before.step + steps, len(self.schedule))
        for _ in range(before.step, last):
            if self.graph is None:
                self._one_step()
            else:
                self.graph.replay()
        int(self.step)  # waits for the device
        tokens = last * self.sequences * self.shape.seq_len
        self.progress = Progress(last, tokens, before.seconds + time.perf_counter() - began)

    @property
    def finished(self) -> bool:
        return self.progress.step == len(self.schedule)

    def losses_from(self, step: int) -> list[list[float]]:
        """Return the training losses (steps, K) of K recipes, from ``step`` (counted from 0) to the last step."""
        found: list[list[float]] = self.record[step : self.progress.step].tolist()
        return found

    def checkpoint(self, state: Mapping[str, Any] | None = None) -> Checkpoint:
        """Return a checkpoint of the weights, moments, losses and progress. ``state`` is stored with it."""
        moments = {"first": self.first, "second": self.second, "losses": self.record}
        return Checkpoint(self.progress, {"parameters": self.flat}, moments, state or {})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the state from a checkpoint. Raise ValueError if a tensor has another shape or dtype."""
        buffers = {"first": self.first, "second": self.second, "losses": self.record}
        saved = [(self.flat, checkpoint.model["parameters"])]
        saved += [(buffer, checkpoint.optimizer[name]) for name, buffer in buffers.items()]
        if any((buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype) for buffer, tensor in saved):
            raise ValueError("a checkpoint of other recipes")  # copy_ would broadcast or convert it
        for buffer, tensor in saved:
            buffer.copy_(tensor)
        self.progress = checkpoint.progress
        self.step.fill_(self.progress.step)

    def _fill(self, recipes: Sequence[Recipe], steps: int) -> None:
        shape, first = self.shape, recipes[0]
        assert all((r.model, r.batch, r.data.tokens) == (shape, first.batch, first.data.tokens) for r in recipes)
        tables = [parameter_table(recipe) for recipe in recipes]
        assert {table.attention_scale for table in tables} == {self.attention_scale}
        capture = self.device.type == "cuda" and (self.graph is None or len(self.schedule) != steps)
        if len(self.schedule) != steps:  # a captured graph has the addresses of the old buffers
            self.graph = None
            self.schedule, self.record = (torch.zeros(steps, self.size, device=self.device) for _ in range(2))
            windows = (self.size, steps, self.sequences, shape.seq_len + 1)
            self.windows = torch.zeros(windows, dtype=self.windows.dtype, device=self.device)
        samples: dict[int, Tensor] = {}
        for k, (recipe, table) in enumerate(zip(recipes, tables, strict=True)):
            seed, clip = recipe.data.seed, recipe.hyperparameters.grad_clip
            assert clip.mode == "global"
            self.clip[k] = clip.limit or math.inf
            if seed not in samples:
                drawn = self.tokens.stream(shape.seq_len, seed).batch(0, steps * self.sequences)
                samples[seed] = torch.from_numpy(drawn).to(self.windows).view(self.windows.shape[1:])
            self.windows[k] = samples[seed]
            ends = (np.arange(steps) + 1) * recipe.batch.tokens
            multiplier = [recipe.schedule.multiplier(float(end), recipe.data.tokens) for end in ends]
            self.schedule[:, k] = torch.tensor(multiplier, device=self.device)
            for row in table.rows:
                start = torch.empty(row.shape)
                fill(start, row.name, row.init_mean, row.init_std, seed)
                self.parameters[row.name][k] = start.to(self.device)
                if row.name in self.multipliers:
                    self.multipliers[row.name][k] = row.multiplier
            rows = {row.name: row for row in table.rows}
            for value, buffer in self.values.items():
                buffer[k] = torch.tensor([getattr(rows[name], value) for name in self.names], dtype=buffer.dtype)
        if capture:
            self._capture()
            return self._fill(recipes, steps)  # the warm-up steps have changed weights and moments
        self.first.zero_()
        self.second.zero_()
        return None

    def _capture(self) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self.step.zero_()  # a run may have fewer steps than WARM
                self._one_step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._one_step()
        self.graph = graph  # only after the capture, which may run out of memory

    def _one_step(self) -> None:
        windows = self.windows.index_select(1, self.step)[:, 0].long()
        leaves = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
        losses = self.losses(leaves, windows)
        self.record.index_copy_(0, self.step, losses.detach()[None])
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        self.update(torch.cat([gradient.flatten(1) for gradient in gradients], 1), self.schedule[self.step][0])
        self.step += 1

    @torch.no_grad()
    def _update(self, gradient: Tensor, factor: Tensor) -> None:
        """Clip each recipe's gradient (K, P), and take a step of AdamW with ``factor`` (K,) times the lr."""
        norm = gradient.square().sum(1).sqrt()
        g = gradient * (self.clip / (norm + 1e-6)).clamp(max=1.0)[:, None]
        count = (self.step + 1).double()
        beta1, beta2 = self.values["beta1"], self.values["beta2"]
        correction1, correction2 = (1 - beta**count for beta in (beta1, beta2))
        rate = self.values["lr"] * factor[:, None]

        def each(value: Tensor) -> Tensor:
            return value.float()[:, self.owner]

        self.first.mul_(each(beta1)).add_(g * each(1 - beta1))
        self.second.mul_(each(beta2)).add_(g * g * each(1 - beta2))
        root = self.second.sqrt() * each(correction2.rsqrt()) + each(self.values["eps"])
        kept = self.flat * each(1 - rate * self.values["weight_decay"])
        self.flat.copy_(kept - each(rate / correction1) * self.first / root)

    def _losses(self, p: Mapping[str, Tensor], windows: Tensor) -> Tensor:
        """Return each recipe's mean loss. ``p`` has parameters by name; ``windows`` is (K, B, T + 1)."""
        shape, inputs, targets = self.shape, windows[..., :-1], windows[..., 1:]
        k, b, t = inputs.shape

        def norm(x: Tensor, name: str) -> Tensor:
            gain = p[f"{name}.weight"]
            return (F.rms_norm(x, x.shape[-1:], eps=shape.norm_eps) * gain[:, None]).to(self.dtype)

        def product(x: Tensor, name: str) -> Tensor:
            return torch.bmm(x, p[f"{name}.weight"].to(self.dtype).mT)

        def per_head(x: Tensor, name: str) -> Tensor:
            if shape.qk_norm:
                x = norm(x.view(k, -1, shape.d_head).float(), name)
            x = x.view(k * b, t, -1, shape.d_head)
            low, high = x.chunk(2, -1)
            cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).transpose(1, 2)

        number = torch.arange(k, device=windows.device)[:, None, None]
        x = p["embedding.weight"][number, inputs].view(k, b * t, shape.d_model)
        for layer in range(shape.n_layers):
            at = f"layers.{layer}"
            h = norm(x, f"{at}.norm.attention")
            query, key = (
                per_head(product(h, f"{at}.attention.{side}"), f"{at}.norm.{side}") for side in ("query", "key")
            )
            value = product(h, f"{at}.attention.value").view(k * b, t, -1, shape.d_head).transpose(1, 2)
            scale, grouped = self.attention_scale, shape.n_heads != shape.n_kv_heads
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
            y = product(y.transpose(1, 2).reshape(k, b * t, -1), f"{at}.attention.out")
            x = x + y * self.multipliers[f"{at}.attention.out.weight"][:, 0]
            h = norm(x, f"{at}.norm.mlp")
            h = F.silu(product(h, f"{at}.mlp.gate")) * product(h, f"{at}.mlp.in")
            x = x + product(h, f"{at}.mlp.out") * self.multipliers[f"{at}.mlp.out.weight"][:, 0]
        hidden = norm(x, "norm.final").float() * self.multipliers[f"{self.readout}.weight"][:, 0]
        logits = product(hidden.to(self.dtype), self.readout).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(k, b * t).mean(1)

    def evaluate(self, recipe: Recipe) -> list[float]:
        """Return the validation loss of each trial, in nats per token. To reuse the compiled code, batches have the
        size of training batches, and the parameters require gradients."""
        found = self.tokens.validation_windows(self.shape.seq_len, recipe.evaluation.tokens)
        windows = torch.from_numpy(found).to(self.device)
        leaves = {name: value.detach().requires_grad_() for name, value in self.parameters.items()}
        total = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        for part in torch.split(windows, self.sequences):
            missing = part[:1].expand(self.sequences - len(part), -1)
            losses = self.losses(leaves, torch.cat((part, missing)).expand(self.size, -1, -1).contiguous()).detach()
            if len(missing):  # the last batch is filled up with its first window; subtract the loss of the copies
                alone = self.losses(leaves, part[:1].expand(self.size, self.sequences, -1).contiguous()).detach()
                total += losses.double() * self.sequences - alone.double() * len(missing)
            else:
                total += losses.double() * self.sequences
        return [float(loss) for loss in total / len(windows)]
