"""The prompts: what the LLM is told to judge, in text files that an operator may replace.

A file holds the guidance alone. The form of the answer and the warning that texts are data are added by the code
(openai_chat.py), so that a replaced file can break neither.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from string import Template

SUFFIX = ".txt"
ALLOWED = {"questions": {"count"}, "reflection": {"count"}}
"""Placeholders ($count) a prompt may use, by name."""


class PromptError(ValueError):
    """A prompt file cannot be used; the text names it and says why. The operator must correct it."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """One template for each question asked of the LLM; the field's name is the file's."""

    importance: Template
    """Rate texts from 1 to 10."""
    insight: Template
    """What similar texts say together, when enhancement promotes one."""
    questions: Template
    """The $count most salient questions the latest texts can answer."""
    reflection: Template
    """At most $count insights that answer a question, with their evidence."""


def load_prompts(directory: Path | None = None) -> Prompts:
    """The prompts, each from `directory` where it has the file. Raises PromptError."""
    names = [each.name for each in fields(Prompts)]
    if directory is not None:
        _check_directory(directory, names)
    return Prompts(**{name: _template(name, directory) for name in names})


def _check_directory(directory: Path, names: list[str]) -> None:
    if not directory.is_dir():
        raise PromptError(f"there is no directory of prompts {directory}")
    unknown = sorted(path.name for path in directory.glob(f"*{SUFFIX}") if path.stem not in names)
    if unknown:
        known = ", ".join(f"{name}{SUFFIX}" for name in names)
        raise PromptError(f"{directory} has {', '.join(unknown)}; prompts are {known}")


def _template(name: str, directory: Path | None) -> Template:
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
