"""Compare leaven's training speed with other trainers on this machine: `python benchmarks/throughput.py`.

Trainers ("arms") train the same shape with the same dtype, batch and optimizer (fused AdamW, clipping by the global
norm, fp32 master weights), eager and compiled: leaven's engine, a Llama of `transformers` in a plain loop under
autocast, and litgpt's GPT with its own loss in the same loop. Packages that are not installed are named as missing.

nanoGPT trains another model, a GPT-2 of the same width and depth (LayerNorm, GELU, learned positions, tied
embeddings), so it is compared with `leaven, GPT-2`, which trains that model too. Pass its model.py as `--nanogpt`.

- Each arm is a process, so that its peak memory can be measured. On a CPU, memory is the growth of the process since
  it imported its modules; for a compiled arm it includes the compiler.
- Arms take turns in short rounds, so that other load on the machine affects all arms equally. Numbers are medians of
  the rounds with minimum and maximum. `--clock processor` measures processor time / threads instead of wall time.
- Speed is also given relative to the best square matmul of the same dtype, which is another arm. FLOPs are 6 per
  matmul weight and token, including the unembedding, plus attention over the full matrix (planning/flops.py).
- On a CPU, leaven's engine asks the C library to keep freed memory (training/device.py). To separate this effect,
  `transformers+malloc`, `litgpt+malloc` and `nanogpt+malloc` do the same.

`--tiny` tests the benchmark in seconds.
"""

import argparse
import json
import os
import re
import resource
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leaven.planning.flops import flops_per_token
from leaven.planning.this_machine import processor
from leaven.recipe.recipe import Recipe
from leaven.recipe.shape import ModelShape
from leaven.training.device import keep_freed_memory

if TYPE_CHECKING:
    from leaven.training.engine import Training

# In the order of the table. "whole logits" computes all logits of a micro-batch as one tensor, to compare memory.
ARMS = (
    *("leaven", "leaven, whole logits", "leaven, GPT-2"),
    *("transformers", "litgpt", "nanogpt", "transformers+malloc", "litgpt+malloc", "nanogpt+malloc"),
)
# Modules of each library that are imported before memory is measured, because some are imported only when first used.
MODULES = {
    "leaven": ("leaven.data.shards", "leaven.data.tokens", "leaven.training.engine"),
    "transformers": ("transformers.models.llama.modeling_llama",),
    "litgpt": ("litgpt.config", "litgpt.model", "litgpt.utils"),
}
MODES = ("eager", "compiled")


def llama(
    n_layers: int, d_model: int, seq_len: int, vocab_size: int, *, d_head: int = 64, d_ff: int | None = None
) -> ModelShape:
    """Return the shape of a Llama; by default d_ff is 8/3 d_model, rounded up to a multiple of 32."""
    return ModelShape(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=d_model // d_head,
        n_kv_heads=d_model // d_head,
        d_head=d_head,
        d_ff=d_ff or -(-d_model * 8 // 3 // 32) * 32,
        vocab_size=vocab_size,
        seq_len=seq_len,
    )


# (shape, sequences per micro-batch)
CASES = {
    "d128": (llama(4, 128, 256, 4_096), 16),
    "d256": (llama(6, 256, 256, 4_096), 16),
    "d512": (llama(8, 512, 512, 8_192), 4),
    "vocabulary": (llama(4, 256, 1_024, 50_304), 4),
    "350m": (llama(24, 1_024, 1_024, 50_304, d_ff=2_816), 32),  # examples/350m.toml with GPT-2's vocabulary
    "tiny": (llama(1, 64, 32, 128, d_head=32), 2),
}
DEFAULT_CASES = {"cpu": "d128,d256,d512", "cuda": "350m"}


def gpt2(llama: ModelShape) -> ModelShape:
    """Return the shape of a GPT-2 without biases, of the same width and depth as a Llama."""
    changed = {"d_ff": 4 * llama.d_model, "norm": "layernorm", "activation": "gelu", "positions": "learned"}
    return llama.model_validate(llama.model_dump() | changed | {"tied_embeddings": True})


@dataclass(frozen=True)
class Task:
    """The arguments of an arm's process, passed as JSON."""

    arm: str
    case: str
    compiled: bool
    dtype: str
    device: str
    threads: int
    accumulate: int
    clock: str
    seconds: float
    nanogpt: str | None = None  # path of nanoGPT's model.py

    @property
    def is_gpt2(self) -> bool:
        """Whether the arm trains a GPT-2 instead of a Llama."""
        return self.arm.startswith(("nanogpt", "leaven, GPT-2"))

    @property
    def shape(self) -> ModelShape:
        shape = CASES[self.case][0]
        return gpt2(shape) if self.is_gpt2 else shape

    @property
    def name(self) -> str:
        return f"{self.arm}, compiled" if self.compiled else self.arm

    @property
    def library(self) -> str:
        return library_of(self.arm)


def library_of(arm: str) -> str:
    return re.split(r"[,+]", arm)[0]


# ---- arms: each function returns a function that runs a number of steps, and the number of parameters


def leaven_steps(task: Task) -> tuple[Callable[[int], None], int]:
    from leaven.model import loss
    from leaven.training import engine
    from leaven.training.profiling import random_tokens

    if task.arm == "leaven, whole logits":
        loss.CHUNK_ELEMENTS[task.device] = 2**62
    shape, micro_batch = task.shape, CASES[task.case][1]
    recipe = Recipe.model_validate(
        {
            "name": task.case,
            "model": shape,
            "data": {"source": "random", "tokens": 10**12},
            "batch": {"tokens": micro_batch * task.accumulate * shape.seq_len, "micro_batch": micro_batch},
            "schedule": {"warmup_tokens": 0, "decay": "constant"},
            "hyperparameters": {"lr": 1e-4, "init_std": 0.02},
            "precision": {"compute": task.dtype},
            "layout": {"compile": task.compiled},
        }
    )
    training = engine.Training(recipe, random_tokens(recipe), task.device)

    params = sum(parameter.numel() for parameter in training.model.parameters())
    return partial(issue_ahead, training), params


def issue_ahead(training: "Training", count: int) -> None:
    """Take ``count`` steps of leaven's engine. Each is issued before the metrics of the last are read, so that the
    device never idles."""
    before = training.issue()
    for _ in range(count - 1):
        ahead = training.issue()
        before()
        before = ahead
    before()


def peer_steps(task: Task) -> tuple[Callable[[int], None], int]:
    import torch
    import torch.nn.functional as F

    shape, micro_batch = CASES[task.case]
    loss_of: Callable[..., Any] | None
    if task.library == "transformers":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.d_model,
            intermediate_size=shape.d_ff,
            num_hidden_layers=shape.n_layers,
            num_attention_heads=shape.n_heads,
            max_position_embeddings=shape.seq_len,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
        model, loss_of = LlamaForCausalLM(config), F.cross_entropy
    elif task.library == "nanogpt":
        assert task.nanogpt
        nanogpt = runpy.run_path(task.nanogpt)
        config = nanogpt["GPTConfig"](
            block_size=shape.seq_len,
            vocab_size=shape.vocab_size,
            n_layer=shape.n_layers,
            n_head=shape.n_heads,
            n_embd=shape.d_model,
            dropout=0.0,
            bias=False,
        )
        model, loss_of = nanogpt["GPT"](config), None
    else:
        from litgpt.config import Config
        from litgpt.model import GPT
        from litgpt.utils import chunked_cross_entropy

        config = Config(
            n_layer=shape.n_layers,
            n_embd=shape.d_model,
            n_head=shape.n_heads,
            intermediate_size=shape.d_ff,
            block_size=shape.seq_len,
            vocab_size=shape.vocab_size,
            padded_vocab_size=shape.vocab_size,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
        )
        model, loss_of = GPT(config), chunked_cross_entropy
    if task.arm.endswith("+malloc"):
        keep_freed_memory()
    model.to(task.device).train()
    params = sum(parameter.numel() for parameter in model.parameters())
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[task.dtype]
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = torch.compile(model) if task.compiled else model
    generator = torch.Generator().manual_seed(0)

    def steps(count: int) -> None:
        for _ in range(count):
            for _ in range(task.accumulate):
                tokens = torch.randint(shape.vocab_size, (micro_batch, shape.seq_len + 1), generator=generator)
                tokens = tokens.to(task.device)
                with torch.autocast(task.device, dtype, enabled=dtype != torch.float32):
                    if loss_of is None:  # nanoGPT's model computes its loss
                        loss = forward(tokens[:, :-1], tokens[:, 1:].contiguous())[1]
                    else:
                        logits = forward(tokens[:, :-1])
                        logits = logits.logits if task.library == "transformers" else logits
                        loss = loss_of(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                (loss / task.accumulate).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad(set_to_none=True)

    return steps, params


def matmul_steps(task: Task) -> tuple[Callable[[int], None], int]:
    """Return a function that runs square matmuls of the fastest size, and the FLOPs of one matmul."""
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[task.dtype]
    sizes = [64] if task.case == "tiny" else [512, 1_024, 2_048] if task.device == "cpu" else [4_096, 8_192, 16_384]

    def product(size: int) -> Callable[[int], None]:
        a, b = (torch.randn(size, size, device=task.device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)

        def steps(count: int) -> None:
            for _ in range(count):
                torch.mm(a, b, out=out)

        return steps

    def speed(size: int) -> float:
        steps = product(size)
        timed(task, steps, 1)
        return size**3 / min(timed(task, steps, 1) for _ in range(10))

    best = max(sizes, key=speed)
    return product(best), 2 * best**3


def timed(task: Task, steps: Callable[[int], None], count: int) -> float:
    """Return the seconds of ``count`` steps by the task's clock, including work on the device."""
    import torch

    wait = torch.cuda.synchronize if task.device == "cuda" else lambda: None
    clock = time.perf_counter if task.clock == "wall" else lambda: time.process_time() / task.threads
    wait()
    began = clock()
    steps(count)
    wait()
    return clock() - began


def arm(task: Task) -> None:
    """Run the child process: build, warm up, then run one round for every line on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries go to standard error

    def answer(**values: float) -> None:
        print(json.dumps(values), file=answers, flush=True)

    import torch

    torch.manual_seed(0)
    torch.set_num_threads(task.threads)
    build = {"matmul": matmul_steps, "leaven": leaven_steps}.get(task.library, peer_steps)
    import_modules(task)
    imported = _peak_bytes("cpu")
    steps, params = build(task)
    timed(task, steps, 3)  # compiles, and creates the optimizer states
    count = max(1, round(task.seconds / max(timed(task, steps, 1), 1e-9)))
    answer(params=params)
    for _ in sys.stdin:
        seconds = timed(task, steps, count)
        peak = _peak_bytes(task.device) - (imported if task.device == "cpu" else 0)
        answer(step_seconds=seconds / count, peak_mib=peak / 2**20)


def import_modules(task: Task) -> None:
    for module in (*MODULES.get(task.library, ()), *(["torch._dynamo"] if task.compiled else [])):
        import_module(module)


def _peak_bytes(device: str) -> int:
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- the race


class Racer:
    """The parent's connection to an arm's process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        command = [sys.executable, __file__, "--arm", json.dumps(vars(task))]
        environment = os.environ | {"OMP_NUM_THREADS": str(task.threads)}
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)
        self.params = self._read()["params"]
        self.rounds: list[dict[str, float]] = []

    def go(self) -> None:
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)
        self.rounds.append(self._read())

    def close(self) -> None:
        self.process.communicate()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.task.name} ended with exit code {self.process.wait()}")
        values: dict[str, float] = json.loads(line)
        return values

    def medians(self, key: str) -> tuple[float, float, float]:
        """Return median, minimum and maximum over the rounds."""
        values = sorted(values[key] for values in self.rounds)
        return statistics.median(values), values[0], values[-1]


def race(tasks: list[Task], repeats: int) -> dict[str, Any]:
    """Run all arms of one case in turns and return the results; each round begins with the next arm."""
    racers = [Racer(task) for task in tasks]
    for number in range(repeats):
        for place in range(len(racers)):
            racers[(number + place) % len(racers)].go()
    for racer in racers:
        racer.close()
    matmul, *racers = racers
    params = {(racer.task.is_gpt2, racer.params) for racer in racers}
    assert len(params) == len(dict(params)), {racer.task.name: racer.params for racer in racers}
    task = tasks[0]
    tokens = CASES[task.case][1] * task.accumulate * task.shape.seq_len
    best = matmul.params / matmul.medians("step_seconds")[0]
    rows = []
    for racer in racers:
        median, least, most = racer.medians("step_seconds")
        # Compare within rounds, because load on the machine slows down the matmul too.
        pairs = zip(racer.rounds, matmul.rounds, strict=True)
        flops = flops_per_token(racer.task.shape)
        shares = [
            flops * tokens / own["step_seconds"] / (matmul.params / product["step_seconds"]) for own, product in pairs
        ]
        rows.append(
            {
                "arm": racer.task.name,
                "model": "GPT-2" if racer.task.is_gpt2 else "Llama",
                "tokens_per_second": [tokens / median, tokens / most, tokens / least],
                "gflops": flops * tokens / median / 1e9,
                "share_of_matmul": statistics.median(shares),
                "peak_mib": racer.rounds[-1]["peak_mib"],
            }
        )
    how = {"case": task.case, "dtype": task.dtype, "threads": task.threads, "clock": task.clock, "rounds": repeats}
    return how | {"params": racers[0].params, "matmul_gflops": best / 1e9, "rows": against_peers(rows)}


def against_peers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each row its speed relative to the fastest peer, in any mode, that trains the same model."""
    peers = [row for row in rows if not row["arm"].startswith("leaven")]
    for row in rows:
        speeds = [peer["tokens_per_second"][0] for peer in peers if peer["model"] == row["model"]]
        row["of_best_peer"] = row["tokens_per_second"][0] / max(speeds) if speeds else None
    return rows


def print_case(result: dict[str, Any], args: argparse.Namespace) -> None:
    shape, micro_batch = CASES[result["case"]]
    print(
        f"\n{result['case']}: L {shape.n_layers}  d {shape.d_model}  d_ff {shape.d_ff}  T {shape.seq_len}  "
        f"V {shape.vocab_size:,}  micro-batch {micro_batch} x {args.accumulate}  {args.dtype}  "
        f"{result['params'] / 1e6:.1f} M parameters  best matmul {result['matmul_gflops']:,.0f} GFLOP/s"
    )
    print(f"{'':<32}{'tokens/s':>10}{'least .. most':>20}{'best peer':>11}{'GFLOP/s':>10}{'matmul':>8}{'MiB':>9}")
    for row in result["rows"]:
        median, least, most = row["tokens_per_second"]
        against = f"{row['of_best_peer']:.2f}x" if row["of_best_peer"] else "-"
        print(
            f"{row['arm']:<32}{median:>10,.0f}{f'{least:,.0f} .. {most:,.0f}':>20}{against:>11}"
            f"{row['gflops']:>10,.0f}{row['share_of_matmul']:>8.0%}{row['peak_mib']:>9,.0f}",
            flush=True,
        )


def main() -> None:
    import torch

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help=f"comma-separated, of {', '.join(CASES)}")
    parser.add_argument(
        "--arms", default="leaven;transformers;litgpt", help=f"separated by semicolons, of {'; '.join(ARMS)}"
    )
    parser.add_argument("--modes", default="eager,compiled", help=f"comma-separated, of {', '.join(MODES)}")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of an arm per round, approximately")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--tiny", action="store_true", help="test the benchmark in seconds")
    parser.add_argument("--nanogpt", metavar="PATH", help="model.py of nanoGPT, for the arms nanogpt")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        return arm(Task(**json.loads(args.arm)))
    if args.tiny:
        args.cases, args.modes, args.threads, args.repeats, args.seconds = "tiny", "eager", 1, 2, 0.0
    arms = _chosen(parser, "--arms", args.arms, ";", ARMS)
    modes = [mode == "compiled" for mode in _chosen(parser, "--modes", args.modes, ",", MODES)]
    cases = _chosen(parser, "--cases", args.cases or DEFAULT_CASES[args.device], ",", CASES)
    missing = [
        name for name in arms if not (args.nanogpt if name.startswith("nanogpt") else find_spec(library_of(name)))
    ]
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if args.device == 'cuda' else 'cpu'}, "
        f"{args.threads} threads, {args.clock} time, medians of {args.repeats} rounds of about {args.seconds:g} s"
        + "".join(f"; {name} is missing" for name in missing)
    )
    results = []
    for case in cases:
        common = dict(case=case, dtype=args.dtype, device=args.device, threads=args.threads)
        common |= dict(accumulate=args.accumulate, clock=args.clock, seconds=args.seconds)
        common |= dict(nanogpt=args.nanogpt)
        tasks = [Task(arm="matmul", compiled=False, **common)]
        tasks += [Task(arm=name, compiled=mode, **common) for name in arms if name not in missing for mode in modes]
        results.append(race(tasks, args.repeats))
        print_case(results[-1], args)
    if args.json:
        where = {"date": time.strftime("%Y-%m-%d"), "processor": processor(), "torch": torch.__version__}
        args.json.write_text(json.dumps([where | result for result in results], indent=1))


def _chosen(
    parser: argparse.ArgumentParser, option: str, given: str, separator: str, known: Iterable[str]
) -> list[str]:
    names = [name.strip() for name in given.split(separator)]
    for name in names:
        if name not in known:
            parser.error(f"{option}: no {name!r}; there are {f'{separator} '.join(known)}")
    return names


if __name__ == "__main__":
    main()
