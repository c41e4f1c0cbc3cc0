"""The policy file: YAML, with durations and sizes such as 12h and 500GB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import yaml

from ckptstore import human
from ckptstore.errors import InvalidRequest
from ckptstore.format.decoding import convert
from ckptstore.format.records import Policy, PolicySet
from ckptstore.retention.policy import check_policies

EXAMPLE = """\
default:                     # for runs that no override matches; leave it out: they are never pruned
  keep_last: 5
  keep_every: 1000           # steps
  keep_daily: 7
  keep_best: [val_loss:min:3]
  keep_healthy: 1            # the newest without NaN and Inf
  keep_abandoned: 7d         # what training left behind when it went on from an earlier checkpoint; 0s: nothing
overrides:                   # the first that matches a run counts
  - runs: exp-*
    rules: {keep_last: 2, keep_within: 12h, max_bytes: 500GB}
  - runs: paper-*
    rules: null              # never pruned
grace: 24h                   # between hiding and deleting
max_delete_fraction: 0.5     # the daemon removes no larger part of a run at once
"""

_PARSERS: dict[str, Callable[[str], float]] = {"s": human.parse_duration, "bytes": human.parse_size}
_WORDS = {"grace": ("grace_s", human.parse_duration)} | {
    field.name.removesuffix("_s"): (field.name, _PARSERS[field.type.__metadata__[0].extra["unit"]])
    for field in msgspec.structs.fields(Policy)
    if field.type.__metadata__[0].extra["unit"] in _PARSERS
}
"""Fields that people write with a unit: the field, and the function that reads it."""


def parse_policies(text: str) -> PolicySet:
    """The policies in a file. Raises InvalidRequest."""
    try:
        policies = convert(_in_numbers(yaml.safe_load(text)), PolicySet)
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise InvalidRequest(
            f"the file is not a policy file: {message}", "ckptctl policy apply --help has an example"
        ) from error
    check_policies(policies)
    return policies


def write_policies(policies: PolicySet) -> str:
    """The file for these policies."""
    plain = msgspec.to_builtins(policies)
    defaults = {field.name: field.default for field in msgspec.structs.fields(Policy)}
    for rules in (plain["default"], *(override["rules"] for override in plain["overrides"])):
        for name in list(rules or ()):
            if rules[name] == defaults[name]:
                del rules[name]
    return yaml.safe_dump(_without_tuples(plain), sort_keys=False)


def _in_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_in_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    converted = {}
    for name, item in value.items():
        word = _WORDS.get(name)
        if word is not None and isinstance(item, str):
            converted[word[0]] = word[1](item)
        else:
            converted[name] = _in_numbers(item)
    return converted


def _without_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_tuples(item) for name, item in value.items()}
    return [_without_tuples(item) for item in value] if isinstance(value, list | tuple) else value
