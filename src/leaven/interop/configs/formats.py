"""The text of an exported file: JSON, YAML, and comments that say what is lost."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from leaven.interop.configs.vocabulary import Loss


def commented(losses: Iterable[Loss], notes: Iterable[str], mark: str = "#") -> str:
    """Losses and notes as comments of a file."""
    lines = [f"{mark} lost: {loss.text}" for loss in losses] + [f"{mark} note: {note}" for note in notes]
    return "".join(f"{line}\n" for line in lines)


def yaml(document: Mapping[str, Any], indent: str = "") -> str:
    """Nested mappings and lists of mappings as YAML; the rest is JSON, which is YAML, but for numbers like 1e-08: for
    YAML 1.1 they are words without a dot."""
    lines = []
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{key}:\n{yaml(value, indent + '  ')}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            inner = "".join(f"{indent}- {yaml(each, indent + '  ').lstrip()}" for each in value)
            lines.append(f"{indent}{key}:\n{inner}")
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return "".join(lines)


def digits(value: Any) -> Any:
    """Floats to twelve digits, at any depth: 2.9999999999999997e-05 is written as it is meant."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, Mapping):
        return {key: digits(inner) for key, inner in value.items()}
    return [digits(inner) for inner in value] if isinstance(value, list) else value


def json_text(document: Mapping[str, Any]) -> str:
    return json.dumps(digits(document), indent=2) + "\n"


def _scalar(value: Any) -> str:
    text = json.dumps(digits(value))
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text
