"""The pages are written in plain English: phrases of our old dialect do not come back."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKED = (
    "*.md",
    "docs/**/*.md",
    "bench/**/*.md",
    *(f"{folder}/**/*.py" for folder in ("client", "ckptd", "bench", "examples", "docsite")),
)
"""Globs of the files that are checked. Python files are checked whole: docstrings, comments and messages."""

_NOUN_FIRST = "a sentence that begins with its noun"
_PRONOUN = "(?-i:That of|Those of|Another one|What) "
_SENDS = "what happens: sends, reports, publishes, returns, records, shows"
BANNED = {
    r"\bwho(so)?ever\b": "the actor: the process, the caller, another committer",
    r"\banew\b": "again, rebuilt",
    r"\bin vain\b": "without success, or the failure",
    r"\bby falling\b": "newest first, in descending order",
    r"\b(so|how) many (seconds|bytes|steps|days)\b": "N seconds, the number of bytes",
    r"\b(tell|tells|told)\b": _SENDS,
    r"\b(hear|hears|heard)\b": "receives, sees, waits for",
    r"\bsays so\b": _SENDS,
    r"\bwhat is (decided|wanted|given|left|needed|kept|asked)\b": "a noun: the decision, the rest",
    r"\bhas it that\b": "the source",
    r"\blast words\b": "the end of stderr",
    r"\bobituar(y|ies)\b": "the error that reports the death of the process",
    r"\bdoomed\b": "to be deleted",
    r"\bas ever\b": "as before, or nothing",
    r"^[ #>*\"'|-]*(?-i:Of) [a-z]": "a sentence that begins with its subject",
    r"\b(nobody|somebody|everybody|anybody)\b": "the actor: another process, every rank, no caller",
    r"\bbesides\b": "also, in addition",
    r"\bgives? up\b": "aborts, stops, times out",
    r"\bat the moment in which\b": "when",
    r"\b(is|are) no (news|share|failure|number|checkpoint)\b": "is not a ..., must be ...",
    r"\bbelieves? (nothing|no)\b": "does not trust",
    r"\bsearch(es)? for reference cycles\b": "garbage collection",
    r"\bwants? (it|them|some|somebody) to\b": "requests",
    r"\bmade? of it\b": "the result",
    rf'(?:"""|[.!?:] |\n\n|[-|] |\d\. ){_PRONOUN}': _NOUN_FIRST,
}
"""Patterns, and what to write instead. A space stands for any white space, line ends included."""
_ERROR_TEXT = r'(?<!")"(?!")[^"\n]*(?<!there\x20)\b(?:is|are) no (?!longer)\w'
BANNED_IN_CODE = {_ERROR_TEXT: "the values that are allowed, or: is not a ...", f"# {_PRONOUN}": _NOUN_FIRST}


def _compiled(patterns: Mapping[str, str]) -> dict[re.Pattern[str], str]:
    flags = re.IGNORECASE | re.MULTILINE
    return {re.compile(p.replace(" ", r"\s+"), flags): instead for p, instead in patterns.items()}


_PATTERNS, _PATTERNS_IN_CODE = _compiled(BANNED), _compiled(BANNED | BANNED_IN_CODE)


def prose_of(path: Path) -> str:
    """The file with everything blank that is not prose: code of any kind, quoted code; line numbers stay."""
    text = path.read_text()
    if path.suffix == ".py":
        text = _strings_and_comments(text)
    else:
        text = re.sub(r"^( *)```.*?^ *```$", _blank, text, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"(?<=\n\n)( {4,}\S.*\n)+", _blank, text)
    return re.sub(r"`[^`]*`", _blank, text)


def _strings_and_comments(source: str) -> str:
    lines = [[" "] * len(line) for line in source.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            (row, column), text = token.start, token.string.splitlines()
            for offset, part in enumerate(text):
                begin = 0 if offset else column
                lines[row - 1 + offset][begin : begin + len(part)] = part
    return "\n".join("".join(line) for line in lines)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def findings(path: Path) -> list[str]:
    """One text per banned phrase: file, line, the phrase, and what to write instead."""
    prose = prose_of(path)
    return [
        f"{path}:{prose.count(chr(10), 0, match.end()) + 1}: {' '.join(match[0].split())!r}: write {instead}"
        for pattern, instead in (_PATTERNS_IN_CODE if path.suffix == ".py" else _PATTERNS).items()
        for match in pattern.finditer(prose)
    ]


PAGES = sorted({path for glob in CHECKED for path in ROOT.glob(glob)})


def test_plain_english() -> None:
    found = [finding for path in PAGES for finding in findings(path)]
    assert not found, "\n".join(found)


def test_prose_has_short_lines() -> None:
    found = []
    for path in (path for path in PAGES if path.suffix == ".md"):
        lines = zip(path.read_text().splitlines(), prose_of(path).splitlines(), strict=True)
        long = [(number, line) for number, (line, prose) in enumerate(lines, 1) if len(line) > 160 and prose.strip()]
        found += [f"{path}:{number}" for number, line in long if not line.lstrip().startswith(("|", "!"))]
    assert found == []


def test_code_is_exempt_and_lines_are_right(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Plain.\n\n    doomed\n\n```\nanew\n```\n`whoever` here\ndoomed\nso many\nbytes\n")
    assert [finding.split(": write")[0] for finding in findings(page)] == [
        f"{page}:11: 'so many bytes'",
        f"{page}:9: 'doomed'",
    ]
    module = tmp_path / "module.py"
    module.write_text(
        '"""Of a rank. What it saves."""\n\n\ndef tell() -> str:\n    return "anew is no time"  # doomed\n'
    )
    assert sorted(finding.split(": write")[0] for finding in findings(module)) == [
        f'{module}:1: \'"""Of a\'', f"{module}:1: '. What'", f"{module}:5: '\"anew is no t'", f"{module}:5: 'anew'",
        f"{module}:5: 'doomed'",
    ]  # fmt: skip
