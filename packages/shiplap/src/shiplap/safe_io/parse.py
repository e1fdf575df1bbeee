"""Parse JSON and YAML with limits on size, depth, numbers, and the nodes that YAML aliases expand to.

The result is plain data (dict, list, str, int, float, bool, None). ValueError describes an error in one line. The
caller checks the structure of the data, by itself or with msgspec.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeAlias

if TYPE_CHECKING:
    import yaml

Data: TypeAlias = bool | int | float | str | list["Data"] | dict[str, "Data"] | None


@dataclass(frozen=True)
class ParseLimits:
    """Limits of a document. ``size`` is in bytes, and ``depth`` is that of nesting. ``nodes`` is the number of values
    and names, counted after each YAML alias is replaced by what it stands for.
    """

    size: int = 1 << 24
    depth: int = 64
    nodes: int = 250_000


JSON = ParseLimits()
YAML = ParseLimits(size=1 << 19, nodes=100_000)  # its parser is slow, and people write it by hand
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.S)
_UNFIT = re.compile("[\0\ud800-\udfff]")  # in a text
_BRACKETS = re.compile(rb"[\[\]{}]")
_DIGITS = 20  # of an integer of 64 bits, with its sign


def parse_json(content: bytes, limits: ParseLimits = JSON) -> Data:
    """Return the value of the JSON text ``content``, made of dicts, lists, strings, numbers, bools and None.

    Raise ``ValueError`` if ``content`` is not JSON or exceeds ``limits``. Integers beyond 64 bits, numbers that are not
    finite and repeated names are refused, too.
    """
    if len(content) > limits.size:
        raise ValueError(f"longer than {limits.size} bytes")
    _check_brackets(content, limits.depth)
    # A cheap upper bound of the number of values, before any of them is allocated.
    if content.count(b",") + content.count(b":") >= limits.nodes:
        raise ValueError(f"more than {limits.nodes} values and names")
    try:
        data: Data = json.loads(
            content.decode(),  # json.loads would take UTF-16, too
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique_names,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {limits.depth}") from None
    _check_texts(data)
    return data


def _check_brackets(content: bytes, depth: int) -> None:
    """Raise ``ValueError`` if the JSON text ``content`` is nested deeper than ``depth``. The check precedes the parser
    because the parser is recursive.
    """
    level = 0
    # Brackets inside of texts do not nest.
    for bracket in _BRACKETS.finditer(_STRING.sub(b"", content)):
        level += 1 if bracket[0] in (b"[", b"{") else -1
        if level > depth:
            raise ValueError(f"nested deeper than {depth}")


def _parse_int(digits: str) -> int:
    """Return the integer that ``digits`` denote. Raise ``ValueError`` if it does not fit into 64 bits."""
    # The length first: converting a long text takes quadratic time.
    if len(digits) > _DIGITS or not -(1 << 63) <= int(digits) < 1 << 63:
        raise ValueError(f"a number of more than 64 bits: {digits[:30]}")
    return int(digits)


def _parse_float(digits: str) -> float:
    """Return the number that ``digits`` denote. Raise ``ValueError`` if it is not finite."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"no finite number: {digits[:30]}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    """Raise ``ValueError`` for ``NaN`` or an infinity, because JSON has neither."""
    raise ValueError(f"no finite number: {name}")


def _unique_names(pairs: list[tuple[str, Data]]) -> Data:
    """Return the pairs (name, value) of a JSON object as a dict. Raise ``ValueError`` if a name occurs twice."""
    # Parsers differ in which of two equal names they take, so a file with both could mean different things to two
    # readers.
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("the same name twice in one object")
    return content


def _check_texts(data: Data) -> None:
    """Raise ``ValueError`` if a string in ``data``, also as a name, holds a null character or half of a surrogate pair.
    File names, C strings and UTF-8 exclude these.
    """
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and _UNFIT.search(value):
            raise ValueError("a text with a NUL or half a surrogate pair")


def compose_yaml(content: bytes, limits: ParseLimits = YAML) -> yaml.Node | None:
    """Return the root node of the YAML document ``content``, or None for an empty document. Each node holds its line.

    Raises:
        ValueError: the content is not UTF-8, or it exceeds ``limits``.
        yaml.MarkedYAMLError: the content is not YAML. The error holds the line.
    """
    import yaml

    if len(content) > limits.size:
        raise ValueError(f"longer than {limits.size} bytes")
    text = content.decode()
    # libyaml is faster, and not every build has it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, Loader=loader), limits)
        root: yaml.Node | None = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError:
        raise
    except yaml.YAMLError as e:  # a character that is none
        raise ValueError(" ".join(str(e).split())) from None
    if root is not None:
        _count_with_aliases(root, limits, {}, set())
    return root


def build_yaml(root: yaml.Node | None) -> Data:
    """Return the value of the composed YAML node ``root``, made of dicts, lists and scalars. Return None for an empty
    document.

    Merge keys (``<<``) are resolved in the nodes themselves. Raise ``ValueError`` or ``yaml.MarkedYAMLError`` if a
    value cannot be read.
    """
    import yaml

    if root is None:
        return None
    try:
        data: Data = yaml.SafeLoader("").construct_document(root)
    except (RecursionError, OverflowError, TypeError, KeyError, IndexError, AttributeError) as e:
        raise ValueError(f"a value that cannot be read ({type(e).__name__})") from None
    _check_numbers(data)
    return data


def _check_events(events: Iterator[yaml.Event], limits: ParseLimits) -> None:
    """Raise ``ValueError`` if a YAML document is nested too deep or has too many values. The ``events`` of its parser
    show this before the recursive composer runs.
    """
    import yaml

    level = 0
    for count, event in enumerate(events):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > limits.depth:
            line = event.start_mark.line + 1 if event.start_mark is not None else "?"
            raise ValueError(f"line {line}: nested deeper than {limits.depth}")
        # A list or a mapping has two events, its start and its end.
        if count >= 2 * limits.nodes:
            raise ValueError(f"more than {limits.nodes} values")


def _count_with_aliases(node: yaml.Node, limits: ParseLimits, known: dict[int, int], inside: set[int]) -> int:
    """Return the number of values in ``node`` after each alias is replaced by the value for which it stands.

    ``known`` caches the counts by the ``id`` of the node. ``inside`` holds the ids of the nodes that contain ``node``.
    Raise ``ValueError`` if there are too many values or if a node contains itself.
    """
    import yaml

    if id(node) in known:
        return known[id(node)]
    line = node.start_mark.line + 1
    if id(node) in inside or len(inside) > limits.depth:
        raise ValueError(f"line {line}: an alias of what it is part of, or nested deeper than {limits.depth}")
    inside.add(id(node))
    weight = 1
    if isinstance(node, yaml.MappingNode):
        weight += sum(
            _count_with_aliases(k, limits, known, inside) + _count_with_aliases(v, limits, known, inside)
            for k, v in node.value
        )
    elif isinstance(node, yaml.SequenceNode):
        weight += sum(_count_with_aliases(v, limits, known, inside) for v in node.value)
    # Python refuses, or takes long, to convert so many digits.
    elif len(node.value) > 4000 and node.tag.endswith((":int", ":float", ":timestamp")):
        raise ValueError(f"line {line}: a number of {len(node.value)} digits")
    inside.discard(id(node))
    if weight > limits.nodes:
        raise ValueError(f"line {line}: its aliases stand for more than {limits.nodes} values")
    known[id(node)] = weight
    return weight


def _check_numbers(data: Data) -> None:
    """Raise ``ValueError`` if ``data`` holds an integer of more than 64 bits or a string with a null character. A dict
    or list that several aliases share is checked once.
    """
    waiting, seen = [data], set[int]()
    while waiting:
        value = waiting.pop()
        # By aliases of YAML, a value may occur many times or contain itself.
        if isinstance(value, (dict, list)) and id(value) not in seen:
            seen.add(id(value))
            waiting += [*value, *value.values()] if isinstance(value, dict) else value
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ValueError("a number of more than 64 bits")
        elif isinstance(value, str) and "\0" in value:
            raise ValueError("a text with a NUL")
