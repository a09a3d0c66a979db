"""Erasure follows lineage: what derives from an erased fragment goes with it, or no longer says its words.

An insight that cites an erased fragment, or one that is told anew, is erased. A promoted fragment loses the erased ones
among its sources, and their words from a merged content (enhancement.merged_text). Its own words come first in that,
and stay. Where it merged words that can no longer be told apart it is erased whole.
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
    """What is to leave, and what is to be told anew."""

    leaving: tuple[Fragment, ...]
    retold: tuple[Fragment, ...]
    """With the sources and the content they keep."""


def follow(named: Collection[str], fragments: Iterable[Fragment], *, merges: bool) -> Erasure:
    """What erasing `named` means for `fragments`: the named ones that are there, and all that derives from them.

    `named` may have ids of fragments that are gone. `merges` is the policy's `short_term.merge_content`: where it is
    on, a promoted fragment that does not show the words of an erased source may hold them in another form.
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
            after = _without(retold.get(fragment.id, fragment), fragment, gone, lost, merges)
            if after is None:
                gone[fragment.id] = None
                lost.setdefault(fragment.id, set()).add(fragment.content)
                changed = True
            elif after != retold.get(fragment.id, fragment):
                if after.content != fragment.content:
                    lost.setdefault(fragment.id, set()).update(_cut(fragment, lost)[1])
                retold[fragment.id] = after
                changed = True
    leaving = tuple(known[id_] for id_ in gone if id_ in known)
    return Erasure(leaving, tuple(one for id_, one in retold.items() if id_ not in gone))


def _without(
    now: Fragment, before: Fragment, gone: Collection[str], lost: Mapping[str, set[str]], merges: bool
) -> Fragment | None:
    """The fragment without what it had of the lost; None when it is to leave."""
    if before.kind is FragmentKind.INSIGHT:
        return None
    content, words = _cut(before, lost)
    hidden = [id_ for id_ in before.sources if id_ in gone and not _shows(before, lost[id_], words)]
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


def _shows(fragment: Fragment, texts: Collection[str], cut: Collection[str]) -> bool:
    """Whether the words of an erased source are known, and were cut or are the fragment's own as well."""
    return bool(texts) and all(text in cut or _begins(fragment.content, text) for text in texts)


def _begins(content: str, text: str) -> bool:
    return content == text or content.startswith(text + _JOINT)


def _cut(fragment: Fragment, lost: Mapping[str, set[str]]) -> tuple[str, set[str]]:
    """The content without the words its lost sources gave, and those words. The longest first: they may hold others."""
    content, cut = fragment.content, set()
    words = {text for id_ in fragment.sources for text in lost.get(id_, ()) if text}
    for text in sorted(words, key=len, reverse=True):
        before = content
        while (at := _place(content, text)) >= 0:
            content = content[:at] + content[at + len(_JOINT + text) :]
        if content != before:
            cut.add(text)
    return content, cut


def _place(content: str, text: str) -> int:
    """Where ";text" stands, up to the next ";" or the end; -1 for nowhere."""
    at = content.find(_JOINT + text)
    while at >= 0:
        end = at + len(_JOINT + text)
        if end == len(content) or content.startswith(_JOINT, end):
            return at
        at = content.find(_JOINT + text, at + 1)
    return -1


def erase(state: State, erasure: Erasure, before: Mapping[str, Fragment], vectors: Mapping[str, Vector]) -> Transition:
    """What leaves, leaves; who derives from it is weakened by it, and UPDATED where its words change.

    before: the retold fragments as they were. vectors: of new contents, as short-term compares them.
    """
    steps = [lifecycle.erase(state, erasure.leaving)]
    for fragment in erasure.retold:
        old = before[fragment.id]
        steps.append(_weakened(steps[-1].state, old, fragment))
        if fragment.content != old.content:
            steps.append(lifecycle.update(steps[-1].state, fragment, vectors.get(fragment.id)))
    return join_all(steps)


def _weakened(state: State, old: Fragment, fragment: Fragment) -> Transition:
    """The fragment with fewer sources, also where a tier holds it."""
    draft = Draft(state)
    for id_ in old.sources:
        if id_ not in fragment.sources:
            draft.record(EventType.WEAKENED, fragment.id, other=id_)
    kept = old.but(sources=fragment.sources, enhancement_count=fragment.enhancement_count)
    draft.put(kept)
    for tier in (draft.sensory, draft.short_term):
        tier[:] = [Held(kept, one.vector, one.enhancements) if one.fragment.id == old.id else one for one in tier]
    return draft.finish()
