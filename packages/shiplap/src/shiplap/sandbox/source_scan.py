"""Search of a candidate's source, without running it, for names that no kernel needs, and for constants."""

from __future__ import annotations

import ast
import builtins
import codecs
import importlib.util
import io
import math
import operator
import os
import re
import stat
import tokenize
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from shiplap.sampling.literals import SOURCE_SUFFIXES, integers_in_text
from shiplap.sandbox.interpreter_state import HEAP_NAMES, MEMORY_NAMES, PYTHON_C_NAMES, STACK_NAMES

MAX_SOURCE_BYTES, READ_BYTES = 2_000_000, 1 << 16  # bytes of a source that is read, and of one step
FILES, ENTRIES, PACKAGE = 64, 20_000, "__init__"  # the most sources that are read, and that are looked for
# Names under which Python runs a file that no code names, by a word of the code that makes it do so.
UNNAMED = {"__main__": "runpy", "sitecustomize": "site", "usercustomize": "site"}
# Functions that list the files of a folder, and functions that run a file of any name.
LISTING = {"iter_modules", "walk_packages", "listdir", "scandir", "iterdir", "glob", "rglob", "walk"}
RUNNING = {"import_module", "__import__", "exec", "spec_from_file_location", "runpy", "load_module"}
EVALUATING = re.compile(r"\beval\b(?!\s*\(\s*\))")  # not ``model.eval()``, which runs no text
ESCAPED = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|N\{([^{}\n]{1,99})\}|\r?\n)"
)
MOST_NAMES = 20_000  # names of a folder among which sources are looked for
SANDBOX_TEXT = re.compile(
    r"^(shiplap([._]|-judge|$)|SHIPLAP_|NoNewPrivs|[Ss]eccomp)|/proc/(?!cpuinfo|meminfo)|landlock|^/etc(/|$)|^/(root|home)/?$"
)
"""Texts by which code recognises a sandboxed process."""
PROCESS_NAMES = {"getppid", "getpgid", "getpgrp", "getsid", "socket", "create_connection", "gethostname"}
PROCESS_NAMES |= {"get_freeze_count", "safe_path", "register_at_fork"}
"""Functions and flags that say how a process was started, or what it may do. A sandboxed process opens no socket."""
CALENDAR = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
    "utils": {"formatdate"},
    "uuid": {"uuid1", "uuid6", "uuid7"},
    "cookiejar": {"time2isoz", "time2netscape"},
}
"""Functions that read the date, by the module or class that has them."""
NATIVE_CALENDAR = re.compile(
    r"\b(gettimeofday|localtime(_r)?|gmtime(_r)?|system_clock|time\s*\(\s*(NULL|nullptr|0)\s*\)"
    r"|(date|time|datetime|julianday|unixepoch|strftime)\s*\([^()]*['\"]now|CURRENT_(DATE|TIME|TIMESTAMP)\b)"
)
PRESENT = {"now", "today"}  # what numpy's dates are made from
MARK_KEYWORDS = {"ignore_index", "padding_idx", "pad_id", "pad_token_id", "ignore_id"}
LOSSES = re.compile(r"\b(cross_entropy|nll_loss|CrossEntropyLoss|NLLLoss)\b")
USUAL_IGNORED, MOST_MARKS, MOST_TEXTS = -100, 4, 16
PLAIN_ENCODINGS = re.compile(
    r"utf-8(-sig)?|ascii|(iso8859|cp125|koi8|mac-)[-_\w]*|gb\w+|big5\w*|euc_\w+|shift_jis\w*|cp(437|85\d|932|949|950)"
)
"""Encodings of sources in which each letter of ASCII is one byte, as in ASCII. Others, such as UTF-7, write a name in
several ways, or take hours to decode."""
COMPILED = ".pyc"
CACHED_CODE = {"pycache_prefix", "cache_from_source", "check_hash_based_pycs", "SourcelessFileLoader"}
CACHED_CODE |= {"_bootstrap_external", "_frozen_importlib_external"}
"""Names by which Python runs compiled code from another place than the source that it is said to belong to."""
NATIVE_COMPARED = re.compile(r"(?:[=!<>]=|(?<![<>-])[<>])\s*(\d{1,7})\b|\b(\d{1,7})\s*(?:[=!<>]=|[<>](?![<>]))")


MOST_ON_A_LETTER = 30  # marks, as Unicode's stream-safe format has at most; sorting them takes quadratic time


class ObscureText(SyntaxError):
    """An error for a source that is not scanned: in an encoding that is none of ``PLAIN_ENCODINGS``, or with more than
    ``MOST_ON_A_LETTER`` marks on one letter.
    """


def gather_sources(file: str) -> list[Path]:
    """Return ``file`` and those Python and native source files beside it that it names, directly or indirectly, and
    modules compiled for this Python that have no source. Files in its folder and in the direct subfolders count. At
    most ``FILES`` are returned, and none after ``MAX_SOURCE_BYTES`` letters, since looking through them takes half a
    minute.
    """
    first = Path(file)
    beside = _list_sources_beside(first.parent)
    sources: dict[Path, None] = {}
    left, letters = [first], 0
    while left and len(sources) < FILES and letters < MAX_SOURCE_BYTES:
        at = left.pop(0)
        if at in sources:
            continue
        sources[at] = None
        text = _read_source_text(at)
        words, letters = _words_of(text), letters + len(text)
        runs_all = _runs_listed_files(text, words)
        named = (p for p in beside if _is_named(p, text, words) or (runs_all and p.suffix == ".py"))
        left += [p for p in named if _is_source_in(first.parent, p)]
    return list(sources)


def _words_of(text: str) -> set[str]:
    """Return the words in the text of a source: as they stand there, as Python reads names, by the normal form of each
    letter, and as Python reads strings, with the letters that are escaped.
    """
    plain = ESCAPED.sub(lambda found: _escaped_letter(*found.groups()), text) if "\\" in text else text
    normal = text if _has_many_marks(text) else unicodedata.normalize("NFKC", text)
    return {word for each in {text, plain, normal} for word in re.findall(r"\w+", each)}


def _has_many_marks(text: str) -> bool:
    """Return whether a letter of ``text`` has more than ``MOST_ON_A_LETTER`` marks. Python's parser and the normal
    forms of Unicode sort them by their kinds, and would be busy for hours with a million of them.
    """
    first = {letter: unicodedata.normalize("NFKD", letter)[0] for letter in set(text) if not letter.isascii()}
    marks = "".join(re.escape(letter) for letter, plain in first.items() if unicodedata.combining(plain))
    return bool(marks) and re.search(f"[{marks}]{{{MOST_ON_A_LETTER + 1}}}", text) is not None


def _escaped_letter(*groups: str | None) -> str:
    """Return the letter of an escape, of which ``groups`` are those of ``ESCAPED``: hexadecimal numbers, an octal one
    and a name. An escaped end of a line is no letter.
    """
    *hexadecimal, octal, name = groups
    if name:
        with suppress(KeyError):
            return unicodedata.lookup(name)
        return ""
    digits = octal or next(filter(None, hexadecimal), "")
    number = int(digits or "110000", 8 if octal else 16)
    return chr(number) if number < 0x110000 else ""


def _runs_listed_files(text: str, words: set[str]) -> bool:
    """Return whether code with the text ``text`` and these ``words`` may list a folder and run what it finds there."""
    return not words.isdisjoint(LISTING) and (not words.isdisjoint(RUNNING) or bool(EVALUATING.search(text)))


def _is_named(source: Path, text: str, words: set[str]) -> bool:
    """Return whether code with the text ``text`` and these ``words`` may run the file ``source`` beside it by its name.
    A name that is no word, such as ``my-kernels``, may stand anywhere.
    """
    name = source.stem
    if name in words or (not name.isidentifier() and name in text) or not words.isdisjoint({UNNAMED.get(name)}):
        return True
    return name in (PACKAGE, "__main__") and source.parent.name in words


def _list_sources_beside(folder: Path) -> list[Path]:
    """Return the names of Python and native source files in a folder and in its direct subfolders, and of compiled
    modules there without a source, at most ``ENTRIES`` of each. The list is empty if the folder cannot be listed.

    The sandbox shows no more names of a folder either, so that none can be imported that is not looked at.
    """
    suffixes = {".py", COMPILED, *SOURCE_SUFFIXES}
    try:
        names = (islice(folder.glob(pattern), MOST_NAMES) for pattern in ("*.*", "*/*.*"))
        listed = ((p for p in each if p.suffix.lower() in suffixes) for each in names)
        found = [p for each in listed for p in islice(each, ENTRIES)]
    except OSError:
        return []
    shown = {*found}  # Python takes the source if there is one
    return [p for p in found if p.suffix != COMPILED or p.with_suffix(".py") not in shown]


def _is_source_in(folder: Path, source: Path) -> bool:
    """Return whether ``source`` is a regular file in ``folder``. A sandboxed process cannot follow a link that leads
    out of the folder, and this process must not. A module that another version of Python has compiled is none.
    """
    try:
        if not (source.is_file() and source.resolve().is_relative_to(folder.resolve())):
            return False
    except (OSError, RuntimeError):  # a link to itself
        return False
    return source.suffix != COMPILED or read_source(source).startswith(importlib.util.MAGIC_NUMBER)


def read_source(file: str | Path) -> bytes:
    """Return the bytes of a source file, of which at most one byte more than ``MAX_SOURCE_BYTES`` is read. The result
    is empty if the file cannot be read or is not a regular file.

    The size of a file in ``/proc`` is not known in advance, and reading one may never end.
    """
    content = b""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError):
        return content
    try:
        while len(content) <= MAX_SOURCE_BYTES and stat.S_ISREG(os.fstat(handle).st_mode):
            if not (more := os.read(handle, min(READ_BYTES, MAX_SOURCE_BYTES + 1 - len(content)))):
                break
            content += more
    except OSError:
        return b""
    finally:
        os.close(handle)
    return content


def parse_source(content: bytes) -> ast.Module:
    """Return the syntax tree of the Python source ``content``. Raise ``ObscureText`` for an encoding in which it is not
    scanned and for a letter with many marks, and what ``ast.parse`` raises.
    """
    if _has_many_marks(content.decode(_encoding_of(content), errors="replace")):
        raise ObscureText(f"a letter with more than {MOST_ON_A_LETTER} marks, which is not scanned")
    return ast.parse(content)


def _encoding_of(content: bytes) -> str:
    """Return the name of the encoding of the Python source ``content``. Raise ``ObscureText`` for one that is none of
    ``PLAIN_ENCODINGS``, and ``SyntaxError`` for one that Python does not take.
    """
    # As Python does, and unlike ``tokenize``: a carriage return ends a line, and a comment may have any bytes.
    head = b"\n".join(re.split(rb"\r\n?|\n", content, maxsplit=2)[:2])
    lines = io.BytesIO(re.sub(rb"[\x80-\xff]", b"?", head))
    encoding = codecs.lookup(tokenize.detect_encoding(lines.readline)[0]).name
    if not PLAIN_ENCODINGS.fullmatch(encoding):
        raise ObscureText(f"its text is in {encoding}, which is not scanned: save it in UTF-8")
    return encoding


def _read_source_text(file: Path) -> str:
    """Return the content of a file as a string. The string is empty if the file is too large or cannot be read."""
    content, encoding = read_source(file), "utf-8"
    if file.suffix == ".py":
        with suppress(SyntaxError):
            encoding = _encoding_of(content)
    return content.decode(encoding, errors="replace") if len(content) <= MAX_SOURCE_BYTES else ""


def find_suspicious_names(file: str, targets: Sequence[str] = ()) -> list[str]:
    """Return a string ``line N: reason`` for each suspicious name in a Python file, and ``FILE, line N: reason`` for
    each one in the modules beside it that it imports.

    A suspicious name reads frames or objects of other code, patches the process, or reads the date. ``targets`` are the
    names of the file's functions that other code calls.
    """
    reasons = _suspicious_names_in(file, targets)
    used = [*_words_of(_read_source_text(Path(file)))]  # a function of another module is called by its name
    for other in gather_sources(file)[1:]:
        if other.suffix == ".py":
            reasons += [f"{other.name}, {what}" for what in _suspicious_names_in(str(other), used)]
        elif other.suffix == COMPILED:
            reasons.append(f"{other.name} is a compiled module without a source, which cannot be scanned")
        natives = [other.with_suffix(suffix) for suffix in EXTENSION_SUFFIXES] if other.suffix == ".py" else []
        reasons += [f"{each.name} takes the place of {other.name}" for each in natives if _is_extension(each)]
    return reasons


def _is_extension(file: Path) -> bool:
    """Return whether Python can import the shared library ``file``, unlike one beside its wrapper that ``ctypes``
    loads. That of a module exports a function ``PyInit_NAME``. Return True for a library that is not read to its end.
    """
    content = read_source(file)
    return b"PyInit" in content or len(content) > MAX_SOURCE_BYTES


def _suspicious_names_in(file: str, called: Sequence[str]) -> list[str]:
    """Return a string ``line N: reason`` for each suspicious name in one Python file. The list is empty for a file that
    cannot be parsed. ``called`` are the names of its functions that other code calls.

    A file that is too large, nested too deeply or of obscure text is reported by a single string.
    """
    if len(content := read_source(file)) > MAX_SOURCE_BYTES:
        return [f"more than {MAX_SOURCE_BYTES} bytes, which is not scanned"]
    try:
        tree = parse_source(content)
    except ObscureText as e:
        return [str(e)]
    except (SyntaxError, ValueError):
        return []
    except (RecursionError, MemoryError):  # a process with another limit of recursion may import it
        return ["expressions that are nested too deeply to be scanned"]
    found = {*_find_suspicious_nodes(tree), *_find_calendar_reads(tree, called)}
    return [f"line {line}: {what}" for line, what in sorted(found)]


def _find_calendar_reads(tree: ast.Module, called: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) for each expression in a module that reads the date, since no result may depend on the date.

    Code behind ``if __name__ == "__main__"`` does not count. A function that is named like a benchmark does not count
    either, since it may time the candidate for its author. It counts if the module uses its name or ``called`` contains
    it.
    """
    imports = [a for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for a in node.names]
    real = {a.asname: a.name for a in imports if a.asname and a.name in CALENDAR}
    for node in live_nodes(tree, called):
        name, home = "", ""
        if isinstance(node, ast.Attribute):
            holder = node.value
            name, home = node.attr, getattr(holder, "attr", getattr(holder, "id", ""))
            home = real.get(home, home)
        elif isinstance(node, ast.ImportFrom) and node.module in CALENDAR:
            read = [a.name for a in node.names if a.name in CALENDAR[node.module]]
            name, home = (read[0], node.module) if read else ("", "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NATIVE_CALENDAR.search(node.value):
            yield node.lineno, "native code that reads the date, on which no result may depend"
        elif isinstance(node, ast.Call) and _is_present_date(node):
            yield node.lineno, "datetime64 reads the date, on which no result may depend"
        if name in CALENDAR.get(home, ()):
            yield getattr(node, "lineno", 0), f"{home}.{name} reads the date, on which no result may depend"


def _is_present_date(node: ast.Call) -> bool:
    """Return whether a call makes the present date as one of numpy, as ``np.datetime64("now")`` does."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return name == "datetime64" and any(isinstance(a, ast.Constant) and a.value in PRESENT for a in node.args)


def live_nodes(tree: ast.Module, called: Sequence[str]) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a module that can run when other code uses it.

    They are the nodes of its statements and of its functions. A function that is named like a benchmark or a test is
    left out, unless other code of the module uses its name or ``called`` contains it.
    """
    own = {s.name: s for s in tree.body if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef))}
    left: list[ast.AST] = [s for s in tree.body if s not in own.values() and not _is_main_guard(s)]
    left += [own[name] for name in own if name in called or not _looks_like_a_benchmark(name)]
    while left:
        for node in ast.walk(left.pop()):
            yield node
            name = node.id if isinstance(node, ast.Name) else ""
            if name in own and name not in called and _looks_like_a_benchmark(name):
                left.append(own.pop(name))


def _looks_like_a_benchmark(name: str) -> bool:
    """Return whether the name of a function contains a word such as ``bench``, ``test`` or ``time``. Such a function is
    ignored unless other code uses it.
    """
    return any(part in name.lower() for part in ("bench", "test", "main", "time", "profile", "measure"))


def _is_main_guard(node: ast.AST) -> bool:
    """Return whether a statement is ``if __name__ == "__main__"`` without an else. Such a statement does not run on
    import.
    """
    test = node.test if isinstance(node, ast.If) and not node.orelse else None
    tests = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return any(_compares_with_main(each) for each in tests)


def _compares_with_main(test: ast.AST | None) -> bool:
    """Return whether the expression ``test`` compares ``__name__`` with ``"__main__"`` for equality."""
    sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) else []
    values = {getattr(side, "id", None) or getattr(side, "value", None) for side in sides}
    return len(sides) == 2 and values == {"__name__", "__main__"}


def marks_in_source(file: str) -> list[int]:
    """Return the integers with which the source of a reference compares values, or which it passes as an index to
    ignore. If the source computes a loss, -100 is added, which is the usual index to ignore. At most ``MOST_MARKS`` are
    returned.

    The reference may treat these values specially, so samples should contain them. The list is empty if the file cannot
    be read or parsed.
    """
    try:
        text = Path(file).read_text()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return []
    marks: dict[int, None] = dict.fromkeys([USUAL_IGNORED] if LOSSES.search(text) else [])
    for node in ast.walk(tree):
        named = [node.value] if isinstance(node, ast.keyword) and node.arg in MARK_KEYWORDS else []
        compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        for value in (*named, *compared):
            try:
                number = ast.literal_eval(value)
            except (ValueError, TypeError):
                continue
            # ``type``, since True is an int.
            if type(number) is int and abs(number) < 1 << 31:
                marks[number] = None
    return list(marks)[:MOST_MARKS]


def constants_in_sources(file: str) -> list[float]:
    """Return the distinct numbers in a source file and in the source files beside it that it names. Numbers inside
    strings are included.

    A candidate may branch at these sizes and values. A string may be source code of a kernel.
    """
    values: dict[float, None] = {}
    for each in gather_sources(file):
        values |= dict.fromkeys(
            _constants_in_source(str(each)) if each.suffix == ".py" else integers_in_text(_read_source_text(each))
        )
    return list(values)


def _constants_in_source(file: str) -> list[float]:
    """Return the distinct numbers in one Python file, including integers in its strings. Those that the code compares
    come first. The list is empty if the file is too large or cannot be parsed.
    """
    if len(content := read_source(file)) > MAX_SOURCE_BYTES:  # ``find_suspicious_names`` reports such a file
        return []
    try:
        tree = parse_source(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    values: dict[float, None] = {}
    nodes = list(ast.walk(tree))
    sides = [side for node in nodes if isinstance(node, ast.Compare) for side in (node.left, *node.comparators)]
    for node in (*sides, *nodes):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            values |= dict.fromkeys(integers_in_text(node.value))
        elif isinstance(node, (ast.Constant, ast.BinOp, ast.Call)):
            number = number_of(node)
            values |= {number: None} if isinstance(number, (int, float)) and abs(number) < MAX_SOURCE_BYTES else {}
    return list(values)


def compared_numbers(file: str) -> set[int]:
    """Return the positive integers that a source file, or a source file beside it that it names, compares, in native
    code and in strings as well. The number of dims and the length of something count as no sizes.
    """
    numbers: set[int] = set()
    for each in gather_sources(file):
        nodes: list[ast.AST] = [ast.Constant(_read_source_text(each))]
        if each.suffix == ".py":
            with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                nodes = list(ast.walk(parse_source(read_source(each))))
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                numbers.update(int(a or b) for a, b in NATIVE_COMPARED.findall(node.value))
            elif isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                if not any(_counts_dims(side) for side in sides):
                    values = (v for side in sides for v in _flat(number_of(side)))
                    numbers.update(int(v) for v in values if isinstance(v, (int, float)) and v % 1 == 0)
    return {n for n in numbers if n > 0}


def _counts_dims(node: ast.AST) -> bool:
    """Return whether an expression is a number of dims or a length, as ``x.dim()``, ``x.ndim`` and ``len(x)`` are."""
    inner = node.func if isinstance(node, ast.Call) else node
    return getattr(inner, "attr", getattr(inner, "id", "")) in ("dim", "ndim", "len")


def _flat(value: Any) -> list[Any]:
    """Return the elements of a list, or a list of ``value`` alone."""
    return value if isinstance(value, list) else [value]


LARGEST_BASE, LARGEST_POWER = 1 << 24, 64
# By names: an import may come while torch.export traces, which replaces max, min and math.pow by functions without one.
NUMBER_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(module, name)
    for module, names in (
        (builtins, "abs float int len max min ord pow round sum"),
        (math, "ceil comb floor gcd isqrt lcm prod sqrt"),
    )
    for name in names.split()
}
"""Functions by which code may put a number together. Each takes little time for small numbers and short texts."""
NUMBER_OPERATORS: dict[type, Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod, ast.Pow: pow},
    **{ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv, ast.LShift: operator.lshift},
    **{ast.RShift: operator.rshift, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.USub: operator.neg},
}


def number_of(node: ast.AST, depth: int = 0) -> Any:
    """Return the value of an expression of numbers, short texts and lists of them, computed by ``NUMBER_OPERATORS`` and
    ``NUMBER_FUNCTIONS``. Return None for any other expression, and for one with a large intermediate value.
    """
    value: Any = None
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, str):
        value = node.value
    elif isinstance(node, (ast.List, ast.Tuple)):
        value = [number_of(each, depth + 1) for each in node.elts[:64]]
        value = None if any(each is None for each in value) else value
    elif depth < 16 and isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Call)):
        inner: list[ast.expr] = []
        if isinstance(node, ast.BinOp):
            made, inner = NUMBER_OPERATORS.get(type(node.op)), [node.left, node.right]
        elif isinstance(node, ast.UnaryOp):
            made, inner = NUMBER_OPERATORS.get(type(node.op)), [node.operand]
        else:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            made, inner = NUMBER_FUNCTIONS.get(name) if not node.keywords else None, node.args[:8]
        given = [number_of(each, depth + 1) for each in inner]
        if made is None or any(g is None for g in given) or not _is_quick(made, given):
            return None
        with suppress(Exception):
            value = made(*given)
    plain = type(value) is float or (type(value) is int and abs(value) < 1 << 40)
    return value if plain or (isinstance(value, (str, list)) and len(value) < 4096) else None


def _is_quick(made: Callable[..., Any], given: Sequence[Any]) -> bool:
    """Return whether ``made``, one of ``NUMBER_FUNCTIONS`` or ``NUMBER_OPERATORS``, takes little time and memory for
    the arguments ``given``, which a candidate chooses.
    """
    if made in (pow, operator.lshift, operator.rshift, math.comb):
        small = all(isinstance(g, (int, float)) and abs(g) < LARGEST_BASE for g in given)
        return small and all(abs(g) <= LARGEST_POWER for g in given[1:])
    return made not in NUMBER_OPERATORS.values() or all(isinstance(g, (int, float)) for g in given)


def parameters_in_source(file: str, names: Sequence[str]) -> list[str]:
    """Return the names of the positional parameters of the first function or class in a Python file that has one of
    ``names``. For a class they are those of its ``forward``, without the instance.

    The list is empty if there is none, if it is no plain definition, or if the file cannot be parsed.
    """
    try:
        tree = parse_source(read_source(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    own = {s.name: s for s in tree.body if isinstance(s, (ast.FunctionDef, ast.ClassDef))}
    found = next((own[name] for name in names if name in own), None)
    if isinstance(found, ast.ClassDef):
        found = next((s for s in found.body if isinstance(s, ast.FunctionDef) and s.name == "forward"), None)
        return [a.arg for a in found.args.args][1:] if found is not None else []
    return [a.arg for a in found.args.args] if found is not None else []


def texts_in_source(file: str) -> list[str]:
    """Return the distinct short texts in the source of a reference, with which its arguments may be compared, without
    those of its docstrings. The list is empty if the file cannot be read or parsed.
    """
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return list(dict.fromkeys(v for v in constants if isinstance(v, str) and v.isidentifier()))[:MOST_TEXTS]


def suspicious_names_of_function(fn: Any) -> list[str]:
    """Return the reasons to suspect names that the function ``fn`` uses. Names that are used by functions of its module
    which it calls are included. Each reason is a string, and the list is empty for harmless code.
    """
    reasons: dict[str, None] = {}
    for at in functions_used_by(fn):
        # Whoever tunes a function of Python uses this package; a candidate in a file of its own does not.
        names = sorted(_names_in_code(at.__code__) - {"shiplap"})
        reasons |= dict.fromkeys(what for name in names if (what := _describe_suspicion(name)))
    return list(reasons)


def functions_used_by(fn: Any) -> Iterator[FunctionType]:
    """Yield the function ``fn`` and the functions of its module that it uses, directly or through others."""
    left, seen = [getattr(fn, "fn", fn)], set[int]()  # a Triton kernel wraps its function
    while left:
        at = left.pop()
        if not isinstance(at, FunctionType) or id(at) in seen or at.__module__ != getattr(fn, "__module__", None):
            continue
        seen.add(id(at))
        yield at
        left += [at.__globals__[name] for name in _names_in_code(at.__code__) if name in at.__globals__]


def _names_in_code(code: CodeType) -> set[str]:
    """Return the global and attribute names that a code object uses, and its string constants. Functions nested in it
    are included.
    """
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union((c for c in code.co_consts if isinstance(c, str)), *map(_names_in_code, inner))


def _describe_suspicion(name: str) -> str:
    """Return why a candidate should not use the name or string ``name``, or an empty string if it may."""
    if name in STACK_NAMES or name in PYTHON_C_NAMES:
        return f"{name} looks at the callers"
    if name in HEAP_NAMES:
        return f"{name} looks at objects of others"
    if name in CACHED_CODE:
        return f"{name} runs other code than the source"
    if name in PROCESS_NAMES or SANDBOX_TEXT.search(name):
        return f"{name[:40]} tells a sandboxed process from others"
    return f"{name} changes the process that it runs in" if name in MEMORY_NAMES else ""


def _find_suspicious_nodes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) for each suspicious name, attribute, string or import in a syntax tree."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
            if node.attr == "stack" and isinstance(node.value, ast.Name) and node.value.id == "inspect":
                yield node.lineno, "inspect.stack looks at the callers"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        for name in names:
            if what := _describe_suspicion(name):
                yield getattr(node, "lineno", 0), what
