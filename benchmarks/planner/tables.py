"""Read published tables: YAML with a list of tables, each with rows.

A table has rows of fields, and fields of its own. A field of the row has priority over one of the table, then one of
its ``model``, then what is only written as text ("8B", "fsdp32 x tp8", "tp 8, mbs 4"). Unknown fields are ignored,
and no code depends on the id of a table.
"""

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from leaven.errors import InputError

# Other spellings of a field, and what their number is multiplied with. Those in words of more than two letters are
# known in any case.
_ALIASES: dict[str, str] = {
    "L": "layers n_layers num_layers",
    "h": "hidden hidden_size d_model",
    "a": "heads n_heads num_heads num_attention_heads attention_heads",
    "kv_heads": "kv n_kv_heads num_kv_heads num_key_value_heads",
    "ffn": "d_ff ffn_hidden ffn_hidden_size intermediate_size",
    "vocab": "V vocab_size",
    "seq_len": "seq s sequence_length",
    "gpus": "n_gpus num_gpus n world_size",
    "nodes": "n_nodes num_nodes",
    "tp": "tensor_parallel tensor_parallel_size tp_size",
    "pp": "pipeline_parallel pipeline_parallel_size pp_size",
    "dp": "data_parallel data_parallel_size dp_size",
    "mbs": "lbs micro_batch micro_batch_size mbs_max b",
    "gas": "grad_accumulation gradient_accumulation_steps",
    "gbs": "batch batch_size global_batch global_batch_size B",
    "vpp": "virtual_stages v",
    "mp": "model_parallel model_parallel_size mp_size",
    "iter_s": "step_s seconds step_seconds iteration_s step_time_s sec_per_iter seconds_per_iteration "
    "iteration_time_s iter_time_s",
    "tps": "tps_per_gpu tokens_per_second_per_gpu tokens_per_sec_per_gpu tokens_per_s_per_gpu tok_s_per_gpu "
    "tps_vanilla",
    "tflops": "tflops_per_gpu achieved_tflops achieved_tflops_per_gpu",
    "aggregate_pflops": "pflops aggregate_pflop aggregate_pflop_s aggregate_petaflops agg_pflops total_pflops",
    "mfu_pct": "mfu pct_peak peak_pct pct_of_peak percent_of_peak percent_peak",
    "hfu_pct": "hfu",
    "mem_gb": "max_mem_gb memory_gb peak_mem_gb peak_memory_gb peak_gb",
    "mem_gib": "max_mem_gib memory_gib peak_mem_gib peak_memory_gib peak_gib",
    "tokens": "train_tokens training_tokens",
    "tokens_per_batch": "gbs_tokens batch_tokens global_batch_tokens",
    "model_name": "model size_name",
}
_SCALED: dict[str, dict[float, str]] = {
    "iter_s": {1e-3: "iter_ms step_ms step_time_ms iteration_ms iteration_time_ms ms_per_iter"},
    "tokens": {1e9: "tokens_b train_tokens_b tokens_billion", 1e12: "tokens_t train_tokens_t tokens_trillion"},
}
_SPELLINGS: dict[str, dict[str, float]] = {
    name: dict.fromkeys([name, *others.split()], 1.0)
    | {other: scale for scale, scaled in _SCALED.get(name, {}).items() for other in scaled.split()}
    for name, others in _ALIASES.items()
}
_NAMES = {other: (name, scale) for name, others in _SPELLINGS.items() for other, scale in others.items()}
# What is at least 1 where a row says it, and what is not negative.
_SIZES = (
    "gpus", "nodes", "dp", "tp", "pp", "cp", "ep", "mp", "mbs", "gas", "gbs", "vpp", "L", "h", "a", "kv_heads", "ffn",
    "vocab", "seq_len",
)  # fmt: skip
_MEASURES = (
    "iter_s", "tps", "tflops", "aggregate_pflops", "mfu_pct", "hfu_pct", "mem_gb", "mem_gib", "params", "params_b",
    "tokens",
)  # fmt: skip
_BLANK = {"", "-", "none", "n/a", "na", "null"}
_NO = {"", "0", "no", "false", "none", "-"}
_RAN_OUT = re.compile(
    r"(?<!no )(?<!not )(?:\boom\b|(?<!run )(?<!ran )\bout[ _-]of[ _-](?:gpu |cuda )?memory)|"
    r"(?<!not )(?<!n't )\bran out[ _-]of[ _-](?:gpu |cuda )?memory",
    re.IGNORECASE,
)
# What is parallel or how much, in words: "fsdp8 x cp1 x tp8", "tp 8, pp 35", "lbs 12".
_WORD = re.compile(r"\b(fsdp|dp|tp|pp|cp|ep|mbs|lbs|gbs|vpp|gas)[ =]?(\d+)\b", re.IGNORECASE)
_SEQUENCE = re.compile(r"\b(?:seq|sequence length|at) (\d{3,6})(?: tokens)?\b|\bseq(?:_len)? ?=? ?(\d{3,6})")


@dataclass(frozen=True)
class PublishedRow:
    """A row with the fields of its table. ``spelled``: the file's name of each field; ``printed``: values by it."""

    own: dict[str, Any]
    table: "Table"
    spelled: dict[str, str] = field(default_factory=dict)
    printed: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """A field; the row's before the table's before what the words say."""
        self.table.asked.add(name)
        return self.fields.get(name, default)

    def number(self, name: str) -> float | None:
        """A field as a number, "16M" too; None if it is not there or is none."""
        return number(self.get(name))

    def mine(self, name: str) -> Any:
        """A field of the row itself, not of its table."""
        self.table.asked.add(name)
        return self.own.get(name)

    def whole(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else round(value)

    @cached_property
    def fields(self) -> dict[str, Any]:
        found = self.table.said | words(str(self.own.get("layout", ""))) | self.table.fields | self.own
        if "layout" in self.own:  # the words of a row are its own
            found |= {key: value for key, value in words(str(self.own["layout"])).items() if key not in self.own}
        return found

    @property
    def where(self) -> str:
        return str(self.own.get("src", f"row {self.table.rows.index(self) + 1}"))

    @property
    def words(self) -> str:
        """The layout that a text describes."""
        spoken = ("layout", "options", "optimizer", "ac", "precision", "case", "setting", "note", "scheme")
        return " ".join(str(self.fields[key]) for key in spoken if key in self.fields)

    @property
    def wrong(self) -> str | None:
        """A size or measurement that is impossible: "mbs is 0"."""
        for name in (*_SIZES, *_MEASURES):
            given, value = self.get(name), self.number(name)
            if given is None or str(given).strip().lower() in _BLANK:
                continue
            size = name in _SIZES
            if (size and (value is None or value < 1)) or given in (math.inf, -math.inf) or (value or 0) < 0:
                return f"{self.spelled.get(name, name)} is {given}"
        return None

    @property
    def unclear(self) -> list[str]:
        """A measurement that is not a number: "tflops is 130-140"."""
        given = ((name, self.get(name)) for name in _MEASURES)
        return [
            f"{self.spelled.get(name, name)} is {value}"
            for name, value in given
            if isinstance(value, str) and number(value) is None and value.strip().lower() not in _BLANK
        ]

    @property
    def ran_out(self) -> bool:
        """Whether the run ran out of memory, by a field of its own or in place of a measurement."""
        for name in ("oom", "out_of_memory", "ran_out_of_memory"):
            if self.get(name) is not None:
                return str(self.get(name)).strip().lower() not in _NO
        for name in ("fits", "fit"):
            if self.get(name) is not None:
                return str(self.get(name)).strip().lower() in _NO
        texts = (value for key, value in self.own.items() if isinstance(value, str) and key not in {"src", "anomaly"})
        return any(_RAN_OUT.search(text) for text in texts)


@dataclass
class Table:
    id: str
    fields: dict[str, Any]
    sources: dict[str, Any]
    rows: list[PublishedRow] = field(default_factory=list)
    file: list["Table"] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    @property
    def siblings(self) -> list[PublishedRow]:
        """The rows of all tables of the same source."""
        source = self.fields.get("source")
        return [row for other in self.file if other.fields.get("source") == source for row in other.rows]

    @cached_property
    def said(self) -> dict[str, Any]:
        return words(str(self.fields.get("note", "")))

    @property
    def origin(self) -> str:
        """What ran these rows, as text: the source and its optimizer."""
        key = str(self.fields.get("source", ""))
        return " ".join((key, str(self.sources.get(key, "")), str(self.fields.get("optimizer", ""))))

    @property
    def unread(self) -> list[str]:
        """Numeric columns that nothing has read."""
        named = (key for row in self.rows for key, value in row.own.items() if number(value) is not None)
        return sorted({key for key in named if key not in self.asked and key not in _ALIASES})

    @cached_property
    def decimals(self) -> dict[str, int]:
        """The largest number of decimals in a column, by its name in the file."""
        found: dict[str, int] = {}
        for row in self.rows:
            for key, value in row.printed.items():
                text = f"{value:.10g}" if isinstance(value, float) else value if isinstance(value, str) else ""
                digits = re.fullmatch(r"\s*[\d_,]+\.(\d+)\s*%?\s*", text)
                found[key] = max(found.get(key, 0), len(digits[1]) if digits else 0)
        return found

    def rounding(self, value: float, *names: str) -> float:
        """Half a unit of the last digit of a column, by any of its names: 0.05 for 137.5.

        For sizes in whole numbers, half a unit of the last digit that is not 0, because 1T is printed as 1000.
        """
        columns = ((*_name(key), places) for key, places in self.decimals.items())
        digits = max((places - math.log10(scale) for name, scale, places in columns if name in names), default=0.0)
        if digits or "params_b" not in names:
            return float(0.5 * 10.0**-digits)
        whole = str(round(value))
        return float(0.5 * 10.0 ** (len(whole) - len(whole.rstrip("0"))))


def words(text: str) -> dict[str, Any]:
    """What a line of words says of a layout."""
    found: dict[str, Any] = {}
    for key, value in _WORD.findall(text):
        name = {"fsdp": "dp", "lbs": "mbs"}.get(key.lower(), key.lower())
        found.setdefault(name, int(value))
        if key.lower() == "fsdp":
            found.setdefault("zero", 3)
    sequence = _SEQUENCE.search(text)
    if sequence:
        found["seq_len"] = int(sequence[1] or sequence[2])
    return found


def number(value: Any) -> float | None:
    """A finite number, also one written ``16M``, ``300B``, ``1.4T`` or ``44%``."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    match = re.fullmatch(r"\s*(-?[\d._,]+)\s*([kKMBGT%]?)\s*", str(value)) if isinstance(value, str) else None
    if match is None:
        return None
    scale = {"": 1, "%": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}[match[2]]
    try:
        return float(re.sub("[_,]", "", match[1])) * scale
    except ValueError:
        return None


def _name(key: str) -> tuple[str, float]:
    """The name of a column here, and the factor of its unit."""
    return _NAMES.get(key) or (_NAMES.get(key.lower()) if len(key) > 2 else None) or (key, 1.0)


def _known(given: dict[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Known fields by their name here, and the file's name of each. NaN counts as missing."""
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    there = {str(key): value for key, value in given.items() if not (isinstance(value, float) and math.isnan(value))}
    for key in sorted(there, key=lambda key: _name(key)[0] != key):
        name, scale = _name(key)
        name = key if name in found else name
        value, size = there[key], number(there[key])
        plain = isinstance(value, int | float) or str(value)[-1:].isdigit()
        found[name] = size * scale if scale != 1 and size is not None and plain else value
        spelled[name] = key
    return found, spelled


def _row(given: dict[Any, Any], table: Table) -> PublishedRow:
    printed = {str(key): value for key, value in given.items()}
    for short in {"mfu", "hfu"} & {*printed}:
        if 0 < (number(printed[short]) or 0) < 1:  # a share, not a percentage
            printed[f"{short}_pct"] = round(100 * (number(printed.pop(short)) or 0), 6)
    own, spelled = _known(printed)
    return PublishedRow(own, table, spelled, printed)


def read(path: Path) -> list[Table]:
    """The tables of a file.

    Raises:
        InputError: if the file does not exist, is not YAML, or has no tables.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {(error.strerror or str(error)).lower()}; name a file of tables") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: no text; name a YAML file of tables") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise InputError(f"{path}: not YAML{line}; name a YAML file of tables") from None
    tables = document.get("tables") if isinstance(document, dict) else None
    if not isinstance(tables, list) or not tables:
        raise InputError(f"{path}: has no tables; a list 'tables', each with an 'id' and 'rows', is what is read")
    found: list[Table] = []
    for index, given in enumerate(tables, 1):
        rows = given.get("rows") if isinstance(given, dict) else None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(f"{path}: table {index} has no list of rows; each row is 'field: value' pairs")
        model = given.get("model") if isinstance(given.get("model"), dict) else {}
        own = {
            key: value for key, value in given.items() if key not in {"id", "rows"} and not isinstance(value, dict)
        }
        fields = _known(model or {})[0] | _known(own)[0]
        sources = document.get("sources")
        table = Table(
            str(given.get("id", f"table {index}")), fields, sources if isinstance(sources, dict) else {}, file=found
        )
        table.rows = [_row(row, table) for row in rows]
        found.append(table)
    return found
