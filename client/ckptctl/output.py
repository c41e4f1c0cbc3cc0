"""The output formats of commands. Imported for every call of the program, so it imports little."""

from __future__ import annotations

from enum import StrEnum


class Output(StrEnum):
    """Output formats."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"
    YAML = "yaml"
    ID = "id"
