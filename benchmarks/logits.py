"""Measure cost and benefit of fp32 logits in a bf16 run: `python benchmarks/logits.py [--repeats 7]`.

In a bf16 run, the product of hidden states and unembedding is accumulated in fp32 and rounded to bf16
(docs/concepts/choices.md). Here it is also computed with an fp32 result, by casting both inputs to fp32, on the
shapes of throughput.py. Prints the time of the product in both ways, the time of a forward and backward pass of the
whole model, and the error of the loss from logits rounded to bf16 against float64 with the same bf16 inputs, for
logits with standard deviation 1 and 3. Times are medians on one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from throughput import CASES

from leaven.model.loss import cross_entropy
from leaven.model.transformer import Transformer


def median_ms(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1_000 * statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("shape       product bf16   fp32   a step    cost   error of the mean loss, and the worst token's (nats)")
    for name in ("d128", "d256", "d512"):
        shape, sequences = CASES[name]
        model = Transformer(shape)
        inputs = torch.randint(shape.vocab_size, (sequences, shape.seq_len))
        targets = torch.randint(shape.vocab_size, (inputs.numel(),))

        def step(model: Transformer = model, inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.hidden(inputs)
            cross_entropy(hidden.flatten(0, 1), model.readout, targets, compute=torch.bfloat16).backward()  # type: ignore[no-untyped-call]

        h = torch.randn(inputs.numel(), shape.d_model).bfloat16()
        w = (torch.randn(shape.vocab_size, shape.d_model) / shape.d_model**0.5).bfloat16()
        with torch.no_grad():
            narrow = median_ms(lambda h=h, w=w: F.linear(h, w), repeats)
            wide = median_ms(lambda h=h, w=w: F.linear(h.float(), w.float()), repeats)
        whole = median_ms(step, max(repeats // 2, 1))
        errors = []
        for scale in (1.0, 3.0):
            rows, places = (h * scale)[:1_024], targets[:1_024]
            exact = F.cross_entropy(rows.double() @ w.double().T, places, reduction="none")
            rounded = F.cross_entropy(F.linear(rows, w).float(), places, reduction="none")
            off = (rounded - exact).abs().max()
            errors.append(f"{(rounded.mean() - exact.mean()).abs():.1e}, {off:.1e}")
        cost = (wide - narrow) / whole
        print(f"{name:<10} {narrow:9.0f} ms {wide:5.0f} {whole:7.0f} {cost:+8.0%}   {';  '.join(errors)}", flush=True)


if __name__ == "__main__":
    main()
