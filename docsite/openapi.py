"""The endpoints and bodies of the HTTP API, from its OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an endpoint."""

    name: str
    place: str
    """path or query."""
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    summary: str
    parameters: tuple[Parameter, ...]
    body: str
    """Name of the request body's schema; empty if there is none."""
    answer: str
    """Name of the response body's schema; empty if it has none."""


def endpoints(document: Mapping[str, Any]) -> list[Endpoint]:
    """The endpoints of an OpenAPI document, by path. Pure."""
    return [
        _endpoint(method, path, operation)
        for path, operations in sorted(document["paths"].items())
        for method, operation in operations.items()
    ]


def schemas(document: Mapping[str, Any]) -> list[tuple[str, str, list[Parameter]]]:
    """The bodies in an OpenAPI document: name, description, fields. Pure."""
    found = document["components"]["schemas"]
    return [
        (name, _text(schema.get("description", "")), list(_fields(schema)))
        for name, schema in sorted(found.items())
        if schema.get("properties")
    ]


def _endpoint(method: str, path: str, operation: Mapping[str, Any]) -> Endpoint:
    answers = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
    return Endpoint(
        method=method.upper(),
        path=path,
        summary=_text(operation.get("description", "")),
        parameters=tuple(
            Parameter(one["name"], one["in"], _kind(one.get("schema", {})), _text(one.get("description", "")))
            for one in operation.get("parameters", ())
        ),
        body=_content(operation.get("requestBody", {})),
        answer=next((_content(answer) for answer in answers), ""),
    )


def _content(part: Mapping[str, Any]) -> str:
    for kind, content in part.get("content", {}).items():
        return _kind(content.get("schema", {})) if kind == "application/json" else kind
    return ""


def _fields(schema: Mapping[str, Any]) -> Iterator[Parameter]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        yield Parameter(name, "required" if name in required else "", _kind(field), _text(field.get("description", "")))


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of a value in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_kind(option) for option in options))
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    return f"list of {_kind(schema.get('items', {}))}" if kind == "array" else kind


def _text(text: str) -> str:
    return " ".join(text.replace("`", "").split())
