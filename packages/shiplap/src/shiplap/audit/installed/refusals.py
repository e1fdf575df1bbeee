"""What the message of an exception says with which an op has refused a call."""

from __future__ import annotations

import math
import re

from shiplap.dtypes import DTYPES, preferred

EMPTY = "an empty result"  # of a call that no check has refused
# Errors of torch, of Triton and of packages where a device is missing.
_NO_DEVICE = re.compile(
    "not compiled with CUDA|compiled with GPU support|NVIDIA driver|active drivers?|CUDA is not available|"
    "requires? (a )?(CUDA|GPU)|be a cuda device|non-CUDA DeviceType"
)
# The dispatcher's error where another op inside of the op has no kernel for the device.
NO_KERNEL_INSIDE = re.compile(r"Could not run '[\w:.]+' with arguments from the '(CPU|CUDA)' backend")
# A tensor that is quantised or sparse has a backend of its own, for which most ops have no kernel.
_MISSING_KERNEL = re.compile(
    r"Could not run '(?P<op>[^']+)' with arguments from the '(?!Quantized|Sparse|Nested|Mkldnn)\w+' backend"
)
_NO_FALLBACK = re.compile(r"no tensor arguments .* no fallback function is registered for schema (?P<op>[\w:.]+\w)")
# Errors of kernels, which a dtype or a single argument may also cause.
REFUSES_DEVICE = re.compile(
    r"not supported (by|on) (the )?CPU\b|must be a (GPU|CUDA)\b.{0,40} tensor; it is currently on device CPU|"
    r"CPU tensors are never"
)
# Words that name a type of elements: refusals that differ only in them come from one line of the op.
_TYPE_WORDS = re.compile(
    r"\b(c10::|torch\.|CPU)?(u?int\d*|long|short|char|byte|bool|half|double|b?float\w*|complex\w*)"
    r"(tensor|type|<\w+>)?\b",
    re.IGNORECASE,
)
# The severity, date, time and thread with which glog begins a message.
_LOG_HEAD = re.compile(r"\[[FE]\d{4} [\d:.]+ +(\d+ +)?")
_DTYPES = preferred()
# As torch's C++ names them in errors, such as Long.
_NAMED_DTYPES = {row.aten.removeprefix("k").lower(): row.name for row in DTYPES.values() if row.aten}
_DIMENSION = re.compile(r"Dimension (?:out of range .*but got|specified as) (\d)\b")
_RANKS = {"scalar": 0, "vector": 1, "matrix": 2}
_NUMBERS_IN_BRACKETS = re.compile(r"[\[(](\d{1,4}(?:, ?\d{1,4})*)[\])]")
_TOKENS = re.compile(r"-?\b\d+\b|\w+|[^\w\s]")


def without_time(text: str) -> str:
    """Return the message ``text`` without the time at which it was logged."""
    return _LOG_HEAD.sub("[", text)


def refusal_form(text: str) -> str:
    """Return the message ``text`` of an exception with its numbers, lists of numbers and names of dtypes replaced, cut
    after 200 characters. Messages that one line of the op raises then become equal.
    """
    return re.sub(r"[-\d.]+(, ?[-\d.]+)*", "#", _TYPE_WORDS.sub("@", text))[:200]


def has_no_kernel(op: str, refusal: str) -> bool:
    """Return whether ``refusal`` says that the op ``op`` has no kernel for the device of its arguments, or for a call
    without tensors. The dispatcher's error may also come from another op inside of it.
    """
    missing = _MISSING_KERNEL.search(refusal) or _NO_FALLBACK.search(refusal)
    own = missing is not None and missing["op"] == op.removesuffix(".default")
    return own or bool(_NO_DEVICE.search(refusal))


def is_withdrawn(op: str, refusal: str) -> bool:
    """Return whether ``refusal`` says that the op ``op`` as a whole is deprecated or was removed, so that it raises for
    all arguments. A sentence that goes on may limit that to some of them.
    """
    name = re.escape(op.rpartition("::")[2].partition(".")[0])
    return bool(re.search(rf"\b{name}(\(\))? (is|was|has been) (deprecated|removed)(?=[.,;:!]|$)", refusal))


def dtypes_in(refusal: str) -> list[str]:
    """Return the dtypes that the message of an exception names, as Python or C++ does."""
    named = [dtype_of_word(w) for w in re.findall(r"[A-Za-z]+\d*", refusal)]
    return list(dict.fromkeys(d for d in named if d))


def dtype_of_word(word: str) -> str:
    """Return the dtype that ``word`` names as Python or C++ does, or an empty string."""
    lower = word.lower()
    named = _NAMED_DTYPES.get(lower.removeprefix("k"), lower)
    return named if named in _DTYPES else ""


def ranks_in(refusal: str) -> list[int]:
    """Return the numbers of dims that the message of an exception names, such as "3-dimensional", "2D", "4 dims" or "a
    vector". A number in "but tensor has 0" or "found 4" is one, too.
    """
    named = re.findall(r"\b([0-5])[- ]?(?:dim|d\b)|(?:tensor has|found) ([0-5])\b", refusal, re.IGNORECASE)
    named += [(str(int(n) + 1), "") for n in _DIMENSION.findall(refusal)]  # a dim with this index has to exist
    words = [rank for word, rank in _RANKS.items() if re.search(rf"\ba {word}\b", refusal, re.IGNORECASE)]
    return list(dict.fromkeys([*(int(a or b) for a, b in named), *words]))


def numbers_in(refusal: str) -> list[int]:
    """Return the whole numbers of up to four digits in the message of an exception, each of them once."""
    return list(dict.fromkeys(int(w) for w in re.findall(r"\b\d{1,4}\b", without_time(refusal))))


def totals_in(refusal: str) -> list[int]:
    """Return the sum and the product of each list of whole numbers in the message of an exception, as one tensor may
    have to have as many elements as sizes in brackets add up to, or as a shape has.
    """
    lists = [[int(n) for n in found.split(",")] for found in _NUMBERS_IN_BRACKETS.findall(refusal)]
    return list(dict.fromkeys(total for numbers in lists for total in (sum(numbers), math.prod(numbers))))


def quotes(refusal: str, other: str, value: str | int, changed: str | int) -> bool:
    """Return whether the message ``other`` is ``refusal`` with ``changed`` in place of ``value``, a dtype or a number:
    the op has quoted what was changed between the two calls.
    """
    left, right = _TOKENS.findall(refusal), _TOKENS.findall(other)
    pairs = [(a, b) for a, b in zip(left, right, strict=False) if a != b]
    same = (str(value), str(changed))
    return (
        len(left) == len(right)
        and bool(pairs)
        and all((a, b) == same or (dtype_of_word(a), dtype_of_word(b)) == same for a, b in pairs)
    )
