"""Erasure follows lineage: fragments derived from an erased one are erased, or lose its words.

An insight that cites an erased or a redacted fragment is erased. A promoted fragment loses its erased sources, and
their words in a merged content (enhancement.merged_text); its own words come first there and stay. If the words of an
erased source cannot be located in a merged content, the whole fragment is erased.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from memstream_server.core import lifecycle
from memstream_server.core.events import EventType
from memstream_server.core.transition import Draft, Transition, join_all
from memstream_server.core.values import Fragment, FragmentKind, Held, State, Vector

_JOINT = ";"


@dataclass(frozen=True, slots=True)
class Erasure:
    """The fragments to erase, and the derived ones to redact."""

    leaving: tuple[Fragment, ...]
    retold: tuple[Fragment, ...]
    """With the remaining sources and content."""


def trace_erasure(named: Collection[str], fragments: Iterable[Fragment], *, merges: bool) -> Erasure:
    """The effect of erasing `named` on `fragments`: the named ones that exist, and all that derive from them.

    `named` may include ids of removed fragments. `merges` is the policy's `short_term.merge_content`: if it is on, a
    promoted fragment may contain the words of an erased source in another form.
    """
    known = {fragment.id: fragment for fragment in fragments}
    gone = dict.fromkeys(named)
    retold: dict[str, Fragment] = {}
    lost: dict[str, set[str]] = {id_: {known[id_].content} if id_ in known else set() for id_ in gone}
    changed = True
    while changed:
        changed = False
        for fragment in known.values():
            if fragment.id in gone or not lost.keys() & set(fragment.sources):
                continue
            after = _redact_fragment(retold.get(fragment.id, fragment), fragment, gone, lost, merges)
            if after is None:
                gone[fragment.id] = None
                lost.setdefault(fragment.id, set()).add(fragment.content)
                changed = True
            elif after != retold.get(fragment.id, fragment):
                if after.content != fragment.content:
                    lost.setdefault(fragment.id, set()).update(_cut_texts(fragment, lost)[1])
                retold[fragment.id] = after
                changed = True
    leaving = tuple(known[id_] for id_ in gone if id_ in known)
    return Erasure(leaving, tuple(one for id_, one in retold.items() if id_ not in gone))


def _redact_fragment(
    now: Fragment, before: Fragment, gone: Collection[str], lost: Mapping[str, set[str]], merges: bool
) -> Fragment | None:
    """The fragment without the erased sources and their words; None if it must be erased."""
    if before.kind is FragmentKind.INSIGHT:
        return None
    content, words = _cut_texts(before, lost)
    hidden = [id_ for id_ in before.sources if id_ in gone and not _shows_texts(before, lost[id_], words)]
    if merges and hidden:
        return None
    sources = tuple(id_ for id_ in before.sources if id_ not in gone)
    count = max(0, before.enhancement_count - (len(before.sources) - len(sources)))
    same = content == before.content
    return now.but(
        sources=sources,
        enhancement_count=count,
        content=content,
        structured=before.structured if same else None,
        token_count=before.token_count if same else 0,
    )


def _shows_texts(fragment: Fragment, texts: Collection[str], cut: Collection[str]) -> bool:
    """Whether the texts of an erased source are known, and were cut or are the fragment's own words as well."""
    return bool(texts) and all(text in cut or _begins_with(fragment.content, text) for text in texts)


def _begins_with(content: str, text: str) -> bool:
    return content == text or content.startswith(text + _JOINT)


def _cut_texts(fragment: Fragment, lost: Mapping[str, set[str]]) -> tuple[str, set[str]]:
    """The content without the texts of lost sources, and the texts that were cut.

    Cuts the longest text first, because it may contain a shorter one.
    """
    content, cut = fragment.content, set()
    words = {text for id_ in fragment.sources for text in lost.get(id_, ()) if text}
    for text in sorted(words, key=len, reverse=True):
        before = content
        while (at := _find_joined(content, text)) >= 0:
            content = content[:at] + content[at + len(_JOINT + text) :]
        if content != before:
            cut.add(text)
    return content, cut


def _find_joined(content: str, text: str) -> int:
    """Index of ";text" followed by ";" or the end; -1 if absent."""
    at = content.find(_JOINT + text)
    while at >= 0:
        end = at + len(_JOINT + text)
        if end == len(content) or content.startswith(_JOINT, end):
            return at
        at = content.find(_JOINT + text, at + 1)
    return -1


def apply_erasure(
    state: State, erasure: Erasure, before: Mapping[str, Fragment], vectors: Mapping[str, Vector]
) -> Transition:
    """Erase the leaving fragments; record WEAKENED for derived ones, and UPDATED if their content changes.

    before: the redacted fragments before the erasure. vectors: of their new contents alone.
    """
    steps = [lifecycle.erase_fragments(state, erasure.leaving)]
    for fragment in erasure.retold:
        old = before[fragment.id]
        steps.append(_weaken_fragment(steps[-1].state, old, fragment))
        if fragment.content != old.content:
            steps.append(lifecycle.update_fragment(steps[-1].state, fragment, vectors.get(fragment.id)))
    return join_all(steps)


def _weaken_fragment(state: State, old: Fragment, fragment: Fragment) -> Transition:
    """Store the fragment with fewer sources, also in the tier that holds it."""
    draft = Draft(state)
    for id_ in old.sources:
        if id_ not in fragment.sources:
            draft.record_event(EventType.WEAKENED, fragment.id, other=id_)
    kept = old.but(sources=fragment.sources, enhancement_count=fragment.enhancement_count)
    draft.put_fragment(kept)
    for tier in (draft.sensory, draft.short_term):
        tier[:] = [Held(kept, one.vector, one.enhancements) if one.fragment.id == old.id else one for one in tier]
    return draft.finish_transition()
