"""Documents: the typed and versioned results of leaven's commands, which ``--json`` prints.

Keys may be added, but are never renamed or removed. The number in ``schema`` changes if a key gets
another meaning. docs/reference/documents.md is generated from this folder. The comments describe the
fields.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

Number = int | float
"""A number that JSON writes as a whole number (a count) or with decimals (a measurement)."""

DIGEST = "blake2b"  # a JSON object in a file may have this key: the digest of all its other keys and their values


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the digest of all keys and values of a JSON object, except the key ``DIGEST``."""
    content = {key: value for key, value in document.items() if key != DIGEST}
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON object with its digest at the key ``DIGEST``."""
    return {**document, DIGEST: digest_of(document)}


def is_sealed(document: Mapping[str, Any]) -> bool:
    """Return whether the digest of a JSON object is right, or missing as in older files."""
    return DIGEST not in document or document[DIGEST] == digest_of(document)


class Sealed(BaseModel):
    """A base class of documents whose files have a digest. Reading a changed file raises ValidationError."""

    @model_validator(mode="before")
    @classmethod
    def _require_digest(cls, values: Any) -> Any:
        if isinstance(values, dict) and not is_sealed(values):
            raise PydanticCustomError("digest", "its content was changed after it was written")
        return values


class Entry(BaseModel):
    """A part of a document. Unknown keys are ignored, so that files of newer versions can be read."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class Document(Entry):
    """The result of a command. A subclass names its schema: ``class TrainDocument(Document, schema="train/1")``."""

    SCHEMA: ClassVar[str] = ""

    def __init_subclass__(cls, schema: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.SCHEMA = f"leaven.{schema}"

    @model_validator(mode="before")
    @classmethod
    def _require_schema(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("schema", cls.SCHEMA) != cls.SCHEMA:
            raise ValueError(f"the schema is {values['schema']}, expected {cls.SCHEMA}")
        return values

    def dump(self) -> dict[str, Any]:
        """Return the document and its schema as plain data for ``--json``."""
        return {**self.model_dump(mode="json", by_alias=True), "schema": self.SCHEMA}
