"""The prompts: instructions to the LLM, in text files that an operator may replace.

A file contains the instructions only. The code (openai_chat.py) adds the form of the answer and the warning that texts
are data, so that a replaced file cannot break them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from string import Template

SUFFIX = ".txt"
ALLOWED = {"questions": {"count"}, "reflection": {"count"}, "answer": {"tokens"}}
"""Allowed placeholders ($count), by prompt."""


class PromptError(ValueError):
    """A prompt file is invalid; the text names it and says why. The operator must correct it."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """One template per kind of question; the field name is the file name."""

    importance: Template
    """Rate texts from 1 to 10."""
    insight: Template
    """Insights from similar texts, when enhancement promotes a fragment."""
    questions: Template
    """The $count most salient questions that the latest texts can answer."""
    reflection: Template
    """At most $count insights that answer a question, with evidence."""
    answer: Template
    """A standing answer to a question, in about $tokens tokens, with evidence."""
    conflict: Template
    """Which of two statements that may contradict each other holds."""


def load_prompts(directory: Path | None = None) -> Prompts:
    """The prompts; each file in `directory` replaces the default. Raises PromptError."""
    names = [each.name for each in fields(Prompts)]
    if directory is not None:
        _check_directory(directory, names)
    return Prompts(**{name: _load_template(name, directory) for name in names})


def _check_directory(directory: Path, names: list[str]) -> None:
    if not directory.is_dir():
        raise PromptError(f"there is no directory of prompts {directory}")
    unknown = sorted(path.name for path in directory.glob(f"*{SUFFIX}") if path.stem not in names)
    if unknown:
        known = ", ".join(f"{name}{SUFFIX}" for name in names)
        raise PromptError(f"{directory} has {', '.join(unknown)}; prompts are {known}")


def _load_template(name: str, directory: Path | None) -> Template:
    own = None if directory is None else directory / f"{name}{SUFFIX}"
    source = files(__name__) / f"{name}{SUFFIX}" if own is None or not own.is_file() else own
    try:
        template = Template(source.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the prompt {source} cannot be read: {error}") from error
    allowed = ALLOWED.get(name, set())
    if not template.template or not template.is_valid() or not set(template.get_identifiers()) <= allowed:
        wanted = f"only ${', $'.join(sorted(allowed))}" if allowed else "no placeholder"
        raise PromptError(f"the prompt {source} must have text and may use {wanted}; a dollar sign is written $$")
    return template
