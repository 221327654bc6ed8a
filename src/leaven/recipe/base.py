"""The base class of all parts of a recipe."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Part(BaseModel):
    """A part of a recipe. It is immutable, refuses unknown keys, and does not convert strings to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    added: ClassVar[tuple[str, ...]] = ()
    """Fields that were added after the first version. They are not written if they have their default, so that older
    recipes and their hashes do not change."""

    @classmethod
    def added_defaults(cls) -> dict[str, Any]:
        return {name: cls.model_fields[name].default for name in cls.added}

    @model_serializer(mode="wrap")
    def _leave_out(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        default = self.added_defaults()
        return {name: value for name, value in write(self).items() if value != default.get(name, ...)}
