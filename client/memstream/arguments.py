"""Checks the arguments of every public call against its annotations, before the call does anything.

`@check_methods` on a class checks its public methods, `@check_constructor` its constructor, `@check_fields` the fields
of a dataclass, and `@check_arguments` one function. An invalid, unknown, missing or surplus argument raises
InvalidArgument, which names the argument, the value received and the values allowed.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast, get_args, get_type_hints

from memstream.errors import InvalidArgument
from memstream.kinds import kind_of
from memstream.value_kinds import Kind

CHECKS_FIELDS = "__checks_its_fields__"
"""Attribute of dataclasses that check their fields on construction."""

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])
T = TypeVar("T")


class _Signature:
    """The parameters of a function, without self or cls."""

    def __init__(self, function: Callable[..., Any], name: str, hints: Mapping[str, Any], bound: bool) -> None:
        self._name = name
        self._kinds: dict[str, Kind] = {}
        self._positional: list[tuple[str, Kind]] = []
        self._required: list[tuple[str, int]] = []
        """(name, position) of required arguments."""
        for each in list(inspect.signature(function).parameters.values())[bound:]:
            if each.kind is each.VAR_KEYWORD:
                options = get_type_hints(get_args(hints[each.name])[0], include_extras=True)
                self._kinds.update((option, kind_of(hint)) for option, hint in options.items())
                continue
            self._kinds[each.name] = kind_of(hints[each.name])
            if each.kind is each.POSITIONAL_OR_KEYWORD:
                self._positional.append((each.name, self._kinds[each.name]))
            if each.default is each.empty:
                self._required.append((each.name, len(self._positional) - 1))

    def check(self, positional: tuple[object, ...], named: Mapping[str, object]) -> None:
        """Raises InvalidArgument."""
        if len(positional) > len(self._positional):
            raise InvalidArgument(self._name, f"takes {len(self._positional)} arguments by position at most")
        for (name, kind), value in zip(self._positional, positional, strict=False):
            if name in named:
                raise InvalidArgument(name, f"is given to {self._name}() twice")
            if not kind.accepts_at_once(value):
                kind.check(name, value)
        for name, value in named.items():
            kind_or_none = self._kinds.get(name)
            if kind_or_none is None:
                raise unknown_argument(name, name, f"{self._name}()", self._kinds)
            if not kind_or_none.accepts_at_once(value):
                kind_or_none.check(name, value)
        for name, place in self._required:
            if place >= len(positional) and name not in named:
                raise InvalidArgument(name, f"is required by {self._name}()")


def unknown_argument(path: str, name: object, of: str, known: Collection[str]) -> InvalidArgument:
    """The error for an unknown argument, or an unknown key of one."""
    near = difflib.get_close_matches(str(name), known, 1)
    meant = f"did you mean {near[0]}? " if near else ""
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    return InvalidArgument(path, f"is no argument of {of}: {meant}{takes}")


def check_arguments(function: F) -> F:
    """Wraps a function so that its arguments are checked."""
    return cast("F", _wrap_checked(function, function.__name__, bound=False, hints=lambda: _read_hints(function)))


def check_methods(kind: C) -> C:
    """Wraps the public methods of a class so that their arguments are checked."""
    for name, member in list(vars(kind).items()):
        if name.startswith("_") or isinstance(member, property):
            continue
        if isinstance(member, classmethod):
            setattr(kind, name, classmethod(_wrap_method(member.__func__)))
        elif inspect.isfunction(member):
            setattr(kind, name, _wrap_method(member))
    return kind


def check_constructor(kind: C) -> C:
    """Wraps the constructor of a class so that its arguments are checked."""
    kind.__init__ = _wrap_checked(kind.__init__, kind.__name__, bound=True, hints=lambda: _read_hints(kind.__init__))
    return kind


def check_fields(kind: C) -> C:
    """Makes a dataclass check its fields on construction."""

    def hints() -> dict[str, Any]:
        return get_type_hints(kind, include_extras=True)

    kind.__init__ = _wrap_checked(kind.__init__, kind.__name__, bound=True, hints=hints)
    setattr(kind, CHECKS_FIELDS, True)
    return kind


def checked_items(path: str, items: Iterable[T], hint: object) -> Iterator[T]:
    """Yields the items, checking each as it is consumed: an iterator can be read only once."""
    kind = kind_of(hint)
    for number, item in enumerate(items):
        kind.check(f"{path}[{number}]", item)
        yield item


def _wrap_method(function: Callable[..., Any]) -> Callable[..., Any]:
    return _wrap_checked(function, function.__name__, bound=True, hints=lambda: _read_hints(function))


def _read_hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(inspect.unwrap(function), include_extras=True)


def _wrap_checked(
    function: Callable[..., Any], name: str, *, bound: bool, hints: Callable[[], dict[str, Any]]
) -> Callable[..., Any]:
    made: list[_Signature] = []  # built on the first call: resolving annotations is slow

    def check(arguments: tuple[object, ...], named: Mapping[str, object]) -> None:
        if not made:
            made.append(_Signature(function, name, hints(), bound))
        made[0].check(arguments[1:] if bound else arguments, named)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*arguments: Any, **named: Any) -> Any:
            check(arguments, named)
            return await function(*arguments, **named)

        return _show_options(awaited, function)

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        check(arguments, named)
        return function(*arguments, **named)

    return _show_options(called, function)


class _NotGiven:
    """Shown as the default of an option without one."""

    def __repr__(self) -> str:
        return "<not given>"


_NOT_GIVEN = _NotGiven()


def _show_options(wrapper: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Lists the options of a TypedDict by name in the wrapper's signature, for `help` and editors."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        given = str(parameters[-1].annotation).removeprefix("Unpack[").removesuffix("]")
        options = inspect.unwrap(function).__globals__[given].__annotations__
        named = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_NOT_GIVEN, annotation=_format_hint(hint))
            for name, hint in options.items()
        ]
        wrapper.__signature__ = signature.replace(parameters=[*parameters[:-1], *named])  # type: ignore[attr-defined]
    return wrapper


def _format_hint(hint: object) -> object:
    return getattr(hint, "__forward_arg__", hint)
