"""Read the numbers of accelerators (peak, memory, bandwidths, ...) from accelerators.toml and from the user's file.

The user's file (:func:`user_file`) has the same format. It adds accelerators. For built-in accelerators, it replaces
groups of numbers, such as ``memory``.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from leaven import storage
from leaven.documents.catalogue import AcceleratorRow, Confidence, NumberSource
from leaven.errors import InputError
from leaven.recipe.base import Part
from leaven.recipe.files import validated

Dtype = Literal["bf16", "fp16", "fp8", "tf32", "fp32"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
CONFIDENCE: dict[Confidence, str] = {
    "vendor": "read in the vendor's own documentation",
    "read": "read on a page that is not the vendor's",
    "memory": "unverified, from memory",
    "yours": "from your own file",
    "guess": "a guess",
}
_BUILT_IN = Path(__file__).with_name("accelerators.toml")
EXAMPLE = (
    "{ peak = { bf16 = 400 }, memory = { gib = 64, tb_s = 2.0 }, link = { gb_s = 300, node = 8 }, "
    "network = { gb_s = 25 } }"
)
_WRITE = f"write an accelerator as in this example: Z1-64GB = {EXAMPLE}"
# Assumed for accelerators without a measurement: fastest matmul / peak (the median of the measured NVIDIA boards),
# and speed of large products in training / speed of the fastest matmul, alone on a cool device.
USUAL_MATMUL_SHARE = 0.80
SUSTAINED = 0.90
_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*")
_Positive = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(gt=0)]


class _Group(Part):
    """A group such as ``memory`` in a TOML file: numbers, and their source."""

    source: str = ""
    confidence: Confidence = "yours"


class Sustained(_Group):
    """The TFLOP/s in 16 bits that large operators of a training step sustain.

    For attention, the FLOPs of two matrix products are counted in the forward pass, and of five in the backward pass.
    The scores that the mask discards are counted, too.
    """

    matmul: _Positive
    attention: _Positive  # forward pass
    attention_backward: _Positive
    grouped: _Positive | None = None  # torch's grouped product of experts

    @property
    def rates(self) -> dict[str, float]:
        return self.model_dump(exclude={"source", "confidence"}, exclude_none=True)


@dataclass(frozen=True)
class Accelerator:
    """The published, measured or guessed data of an accelerator. Link and network speeds count one direction."""

    name: str
    peaks: tuple[tuple[Dtype, float], ...]  # dense TFLOP/s by dtype
    memory_gib: float
    memory_tb_s: float  # memory bandwidth, TB/s
    link_gb_s: float  # bandwidth to the other accelerators of the node, GB/s
    network_gb_s: float  # bandwidth to other nodes, GB/s
    node_size: int = 8  # number of accelerators in a node, which the link connects
    power_w: float | None = None  # rated power of the board, watts
    multiprocessors: int | None = None
    matmuls: tuple[tuple[Dtype, float], ...] = ()  # TFLOP/s of the fastest measured matmul, by dtype
    sustained: Sustained | None = None  # None: not measured; the planner assumes usual values
    dtype: Dtype = "bf16"  # the dtype in which the training computes; fp16 if the device has no bf16
    sources: tuple[NumberSource, ...] = ()  # where the numbers come from
    note: str = ""

    def peak(self, dtype: Dtype) -> float | None:
        """Return dense TFLOP/s in a dtype, or None if the device lacks the dtype or the number is unknown."""
        return dict(self.peaks).get(dtype)

    def matmul(self, dtype: Dtype) -> float | None:
        """Return the TFLOP/s of the fastest measured matmul in a dtype, or else 80% of the peak, or else None."""
        peak = self.peak(dtype)
        return dict(self.matmuls).get(dtype, None if peak is None else peak * USUAL_MATMUL_SHARE)

    @cached_property
    def peak_tflops(self) -> float:
        return dict(self.peaks)[self.dtype]

    @cached_property
    def matmul_flops(self) -> float:
        return dict(self.matmuls).get(self.dtype, self.peak_tflops * USUAL_MATMUL_SHARE) * 1e12

    @cached_property
    def sustained_share(self) -> float:
        """Speed of large matrix products in a training step / speed of the fastest matmul; 0.9 if not measured."""
        fastest = self.matmul("bf16") or self.matmul("fp16")
        return self.sustained.matmul / fastest if self.sustained and fastest else SUSTAINED

    def document(self) -> AcceleratorRow:
        values = {
            "peak_tflops": {dtype: self.peak(dtype) for dtype in DTYPES},
            "matmul_tflops": {dtype: dict(self.matmuls).get(dtype) for dtype in DTYPES},
            "planned_tflops": self.sustained_share * self.matmul_flops / 1e12,
            "sustained_tflops": self.sustained.rates if self.sustained else {},
            "sources": list(self.sources),
        }
        return AcceleratorRow(**vars(self) | values)


class _Rates(_Group):
    """Rates in TFLOP/s by dtype."""

    bf16: _Positive | None = None
    fp16: _Positive | None = None
    fp8: _Positive | None = None
    tf32: _Positive | None = None
    fp32: _Positive | None = None

    @property
    def rates(self) -> dict[Dtype, float]:
        return {dtype: rate for dtype in DTYPES if (rate := getattr(self, dtype)) is not None}


class _Memory(_Group):
    gib: _Positive
    tb_s: _Positive


class _Board(_Group):
    power_w: _Positive | None = None
    multiprocessors: _Count | None = None


class _Link(_Group):
    gb_s: _Positive
    node: _Count


class _Network(_Group):
    gb_s: _Positive


class _Entry(Part):
    peak: _Rates
    matmul: _Rates = _Rates()
    sustained: Sustained | None = None
    memory: _Memory
    board: _Board = _Board()
    link: _Link
    network: _Network
    note: str = ""

    @model_validator(mode="after")
    def _plausible(self) -> "_Entry":
        peaks = self.peak.rates
        if not peaks.keys() & {"bf16", "fp16"}:
            raise ValueError("peak: has neither bf16 nor fp16; the planner needs one of them, in dense TFLOP/s")
        for dtype, rate in self.matmul.rates.items():
            if rate > (peak := peaks.get(dtype, 0)):
                raise ValueError(
                    f"matmul.{dtype}: {rate:g} TFLOP/s is above the peak of {peak:g}; give both without sparsity"
                )
        half = self.matmul.rates.get("bf16") or peaks.get("bf16") or peaks["fp16"]
        if self.sustained and self.sustained.matmul > half:
            raise ValueError(
                f"sustained.matmul: {self.sustained.matmul:g} TFLOP/s is above the highest rate in half precision, "
                f"{half:g} TFLOP/s; correct one of them"
            )
        return self


def user_file() -> Path:
    """Return the path of the user's file of accelerators, whether or not the file exists."""
    if named := os.environ.get("LEAVEN_ACCELERATORS"):
        return storage.expanded(named)
    return storage.expanded(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "leaven" / "accelerators.toml"


def accelerators() -> dict[str, Accelerator]:
    """Return all accelerators by name, built-in first. Raise InputError if the user's accelerators.toml is wrong."""
    path = user_file()
    if path.exists() or os.environ.get("LEAVEN_ACCELERATORS"):
        return _read(path)
    storage.require_target(path, "bring it back, or remove the link to use the built-in numbers")
    return _read(None)


@cache
def _read(own: Path | None) -> dict[str, Accelerator]:
    entries = _parsed(_BUILT_IN)
    sources, spelt = entries.pop("sources"), {name.upper(): name for name in entries}
    users = {} if own is None else _parsed(own)
    of_user = users.pop("sources", {})
    sources |= of_user if isinstance(of_user, dict) else {}
    origins: dict[str, Path | None] = dict.fromkeys(entries, _BUILT_IN)
    for written, groups in users.items():
        if not _NAME.fullmatch(written) or written.lower() == "cpu" or not isinstance(groups, dict):
            raise InputError(f"{own}: [{written}] is not an accelerator; {_WRITE}")
        name = spelt.get(written.upper(), written)
        parts = {group: {"source": str(own)} | part for group, part in groups.items() if isinstance(part, dict)}
        entries[name] = entries.get(name, {}) | groups | parts
        origins[name] = own
    return {name: _accelerator(name, entry, sources, origins[name]) for name, entry in entries.items()}


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(storage.read(path).decode())
    except FileNotFoundError:
        message = f"LEAVEN_ACCELERATORS is {path}: no such file; create it, or unset the variable"
    except OSError as error:
        message = f"{path}: this file of accelerators cannot be read: {error.strerror}; give a readable TOML file"
    except (ValueError, RecursionError) as error:
        message = f"{path}: not TOML: {error}; {_WRITE}"
    raise InputError(message)


def _accelerator(name: str, values: dict[str, Any], sources: Mapping[str, str], file: Path | None) -> Accelerator:
    """Return a TOML table's accelerator. ``sources`` maps short names of sources to full names."""
    try:
        entry = validated(_Entry, values, f"{file}: {name}")
    except InputError as error:
        raise InputError(f"{error}; {_WRITE}") from None

    def in_full(source: str) -> str:  # short names of sources are at the start and after semicolons
        return re.sub(r"(^|; )([^ :;]+)", lambda found: f"{found[1]}{sources.get(found[2], found[2])}", source)

    peaks, matmuls = entry.peak.rates, entry.matmul.rates
    return Accelerator(
        name=name,
        memory_gib=entry.memory.gib,
        memory_tb_s=entry.memory.tb_s,
        link_gb_s=entry.link.gb_s,
        network_gb_s=entry.network.gb_s,
        node_size=entry.link.node,
        power_w=entry.board.power_w,
        multiprocessors=entry.board.multiprocessors,
        peaks=tuple(peaks.items()),
        matmuls=tuple(matmuls.items()),
        sustained=entry.sustained,
        dtype="bf16" if "bf16" in peaks else "fp16",
        sources=tuple(
            NumberSource(group=group, text=in_full(part.source), confidence=part.confidence)
            for group, part in entry
            if isinstance(part, _Group) and group in entry.model_fields_set
        ),
        note=entry.note,
    )
