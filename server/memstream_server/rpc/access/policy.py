"""The policy file: which identities have which rights in which namespaces. Without a grant nothing is allowed.

    [[grant]]
    who = ["key:joy", "uri:spiffe://mesh/ns/agents/*"]
    namespaces = ["comedy", "joy-*"]
    verbs = ["observe", "recall", "read"]

`*` at the end of a name matches any rest. `"*"` alone matches all: in `namespaces` also the server as a whole, in
`verbs` every verb. A grant may have `labels = { team = "core" }`: it then allows only what names a memory with all of
these labels, and not the namespace as a whole.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memstream_server.ports.journal.records import Labels
from memstream_server.rpc.access.caller import Verb

_FIELDS = ("who", "namespaces", "verbs")
_LABELS = "labels"
_KINDS = ("key:", "jwt:", "uri:")


@dataclass(frozen=True, slots=True)
class Names:
    """A set of names and name prefixes."""

    whole: frozenset[str]
    beginnings: tuple[str, ...]

    @classmethod
    def parse_names(cls, names: Iterable[str]) -> Names:
        given = list(names)
        return cls(
            frozenset(name for name in given if not name.endswith("*")),
            tuple(name[:-1] for name in given if name.endswith("*")),
        )

    def __contains__(self, name: str) -> bool:
        if name in self.whole:
            return True
        # The empty name, of the server as a whole, matches only the prefix of "*", which is empty as well.
        return any(name.startswith(beginning) for beginning in self.beginnings)


@dataclass(frozen=True, slots=True)
class Grant:
    """One table of the file."""

    who: Names
    namespaces: Names
    verbs: frozenset[Verb]
    labels: frozenset[tuple[str, str]] = frozenset()
    """What a memory must have; empty: the grant is for the namespaces as a whole."""


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """All grants; they add up."""

    grants: tuple[Grant, ...]

    def may(self, principal: str, verb: Verb, namespace: str, labels: Labels | None = ()) -> bool:
        """Whether it may do this with a memory that has these labels; without labels, with all of the namespace; None:
        with a memory of some labels. `namespace` is empty for the server as a whole."""
        return any(
            verb in grant.verbs
            and namespace in grant.namespaces
            and principal in grant.who
            and (labels is None or grant.labels.issubset(labels))
            for grant in self.grants
        )


def parse_policy(text: str) -> AccessPolicy:
    """Raises ValueError, which names the grant and its mistake."""
    said = tomllib.loads(text)
    if unknown := [name for name in said if name != "grant"]:
        raise ValueError(f"{unknown[0]!r} is unknown: the file is a list of [[grant]]")
    grants = said.get("grant", [])
    if not isinstance(grants, list):
        raise ValueError("grants are written [[grant]], with two brackets")
    return AccessPolicy(tuple(_parse_grant(number, each) for number, each in enumerate(grants, 1)))


def _parse_grant(number: int, said: Any) -> Grant:
    where = f"grant {number}"
    if not isinstance(said, dict) or sorted(said.keys() - {_LABELS}) != sorted(_FIELDS):
        raise ValueError(f"{where} must have exactly {', '.join(_FIELDS)}, and may have {_LABELS}")
    who, namespaces, verbs = (_parse_names(f"{where}: {field}", said[field]) for field in _FIELDS)
    for name in who:
        if name != "*" and not name.startswith(_KINDS):
            raise ValueError(f'{where}: who has {name!r}: names begin with key:, jwt: or uri:, or are "*"')
    known = {verb.value for verb in Verb}
    for verb in verbs:
        if verb not in known | {"*"}:
            raise ValueError(f"{where}: verbs has {verb!r}: there are {', '.join(sorted(known))} and *")
    allowed = frozenset(Verb) if "*" in verbs else frozenset(Verb(verb) for verb in verbs)
    labels = _parse_labels(where, said[_LABELS]) if _LABELS in said else frozenset()
    return Grant(Names.parse_names(who), Names.parse_names(namespaces), allowed, labels)


def _parse_labels(where: str, said: Any) -> frozenset[tuple[str, str]]:
    if not isinstance(said, dict) or not said or not all(isinstance(each, str) for each in said.values()):
        raise ValueError(f'{where}: labels must be a table of texts, as {{ team = "core" }}')
    return frozenset(said.items())


def _parse_names(where: str, said: Any) -> list[str]:
    if not isinstance(said, list) or not said or not all(isinstance(each, str) and each for each in said):
        raise ValueError(f"{where} must be a list of names")
    for name in said:
        if "*" in name[:-1]:
            raise ValueError(f"{where} has {name!r}: * may stand at the end only")
    return said
