"""Jinja2 templates in a sandbox that limits their access and their output.

Rule 1. A template sees only the values passed to it: no attributes with underscores, no calls but `range`, no mutation
        (stricter than jinja2's ImmutableSandboxedEnvironment).
Rule 2. It terminates: ranges have at most RANGE_MAX numbers, a template at most LOOPS_MAX loops, and the output, like
        every intermediate value, at most OUTPUT_CHARS_MAX characters, counted during rendering.
Rule 3. An undefined name is an error, not an empty text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from memstream.errors import InvalidRequest
from memstream.wiretypes import invalid_field

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

TEMPLATE_CHARS_MAX = 65_536
OUTPUT_CHARS_MAX = 65_536
RANGE_MAX = 1_000
LOOPS_MAX = 2
"""Loops in one template, nested or not: with RANGE_MAX, at most a million iterations over ranges."""


def render_template(field: str, template: str, values: Mapping[str, object]) -> str:
    """Renders a template. Raises InvalidRequest, which names `field`, when it is not allowed or fails."""
    return _render_bounded(field, template, values) if template else ""


def _render_bounded(field: str, template: str, values: Mapping[str, object]) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("templates need jinja2: pip install '.[agent]'") from error
    if len(template) > TEMPLATE_CHARS_MAX:
        raise invalid_field(field, f"has {len(template)} characters, at most {TEMPLATE_CHARS_MAX} are allowed")
    parts: list[str] = []
    left = OUTPUT_CHARS_MAX
    try:
        for part in _compile_template(template).generate(values):
            left -= len(part)
            if left < 0:
                raise _template_error(field, f"makes more than {OUTPUT_CHARS_MAX} characters")
            parts.append(part)
    except jinja2.TemplateError as error:
        raise _template_error(field, f"is no template that can be used: {error.message}") from error
    except InvalidRequest:
        raise
    except Exception as error:  # a template can raise any exception: 1 / 0, a filter on the wrong type
        raise _template_error(field, f"failed with {type(error).__name__}: {error}") from error
    return "".join(parts)


def _template_error(field: str, why: str) -> InvalidRequest:
    return invalid_field(field, why)


@lru_cache(maxsize=64)
def _compile_template(template: str) -> Any:
    from jinja2 import TemplateSyntaxError, nodes

    environment = _create_sandbox()
    tree = environment.parse(template)
    loops = list(tree.find_all(nodes.For))
    if len(loops) > LOOPS_MAX:
        raise TemplateSyntaxError(f"it has {len(loops)} loops, at most {LOOPS_MAX} are allowed", loops[-1].lineno)
    for kind in (nodes.Macro, nodes.CallBlock):
        if found := next(tree.find_all(kind), None):
            raise TemplateSyntaxError("macros are not allowed", found.lineno)
    if kept := next(tree.find_all((nodes.AssignBlock, nodes.FilterBlock)), None):
        raise TemplateSyntaxError("blocks of text that is not written at once are not allowed", kept.lineno)
    if any(loop.recursive for loop in loops):
        raise TemplateSyntaxError("recursive loops are not allowed", loops[0].lineno)
    return environment.from_string(_add_size_checks(tree).set_environment(environment))


def _add_size_checks(tree: Any) -> Any:
    """Adds size checks to the tree, on every node whose output can be much larger than its input."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    def weighed(node: nodes.Expr, name: str = "weighed") -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    class Weighing(NodeTransformer):
        def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802  # jinja2's
            self.generic_visit(node)
            return weighed(nodes.List(node.nodes, lineno=node.lineno), "join")

        def made(self, node: Any) -> Any:
            self.generic_visit(node)
            return node if getattr(node, "ctx", "load") != "load" else weighed(node)

        visit_List = visit_Tuple = visit_Dict = visit_Filter = made  # noqa: N815  # jinja2's

    return Weighing().visit(tree)


@lru_cache(maxsize=1)
def _create_sandbox() -> SandboxedEnvironment:
    from jinja2 import StrictUndefined
    from jinja2.exceptions import SecurityError
    from jinja2.filters import make_attrgetter
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """A sandbox that limits the operators and filters whose output can be much larger than their input."""

        intercepted_binops = frozenset({"*", "**", "%", "+"})

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if operator != "+" and (operator == "**" or not numbers):
                raise SecurityError(f"{operator} is not allowed here")
            return _check_size(super().call_binop(context, operator, left, right))

        def is_safe_callable(self, obj: Any) -> bool:
            return (
                obj is _bounded_range
            )  # not even methods of strings: "".ljust(n) and "".replace have unbounded output

    def joined(values: Iterable[Any], d: object = "", attribute: str | int | None = None) -> str:
        """jinja2's join, with a size limit."""
        between, parts, left = str(d), list[str](), OUTPUT_CHARS_MAX
        for value in values if attribute is None else map(make_attrgetter(sandbox, attribute), values):
            parts.append(str(value))
            left -= len(parts[-1]) + (len(between) if len(parts) > 1 else 0)
            if left < 0:
                raise SecurityError("what it makes grows too large")
        return between.join(parts)

    def added(values: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
        """jinja2's sum, for numbers only."""
        if not isinstance(start, int | float):
            raise SecurityError("sum adds numbers")
        return sum(values if attribute is None else map(make_attrgetter(sandbox, attribute), values), start)

    sandbox = Sandbox(undefined=StrictUndefined, autoescape=False)
    sandbox.globals = {"range": _bounded_range}
    sandbox.filters = {name: sandbox.filters[name] for name in _FILTERS}
    sandbox.filters |= {"join": joined, "sum": added, "weighed": _check_size}
    return sandbox


def _check_size(value: Any) -> Any:
    """Returns the value. Raises SecurityError if it is larger than the whole output may be."""
    from jinja2.exceptions import SecurityError

    left, inside = OUTPUT_CHARS_MAX, [value]
    while inside:
        one = inside.pop()
        left -= 1
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, Mapping):
            inside += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            inside += one
        elif isinstance(one, int):
            left -= one.bit_length() // 3
        if left < len(inside):
            raise SecurityError("what it makes grows too large")
    return value


def _bounded_range(*bounds: int) -> range:
    from jinja2.exceptions import SecurityError

    numbers = range(*bounds)
    if len(numbers) > RANGE_MAX:
        raise SecurityError(f"a range of more than {RANGE_MAX} numbers is not allowed")
    return numbers


_FILTERS = (
    *("capitalize", "default", "escape", "first", "float", "int", "join", "last", "length", "list", "lower", "map"),
    *("reject", "rejectattr", "reverse", "round", "select", "selectattr", "sort", "string", "striptags"),
    *("sum", "title", "trim", "truncate", "unique", "upper", "urlencode", "wordcount"),
)
"""Filters with bounded output; center, indent, replace and tojson can pad without limit."""
