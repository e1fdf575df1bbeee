"""A rule of a call: when it holds, in Python and in C++, and what an error says of a call that breaks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType
from typing import ClassVar

from shiplap.errors import CATALOGUE, ShiplapError, error
from shiplap.plan.expression import Term, Text
from shiplap.plan.values import Constant, Local, scope

TRUE = Term("True", "true")


class Rule(ABC):
    """One rule, which is all there is of it: printers and errors ask it, and nobody else knows what it says.

    Class attributes: ``id`` in the catalogue; ``title`` and ``fix`` where they are not the catalogue's;
    ``cpp_by``: who sees to it in C++, for a rule whose C++ condition is ``true``; ``undecided``: a call of which only
    Python can say whether it breaks the rule; ``real``: it looks at memory, so that only calls with real tensors are
    held to it.
    """

    id: ClassVar[str]
    title: ClassVar[str] = ""
    fix: ClassVar[str] = ""
    cpp_by: ClassVar[str] = ""
    undecided: ClassVar[str] = ""
    real: ClassVar[bool] = False

    @abstractmethod
    def holds(self) -> Term:
        """True of a good call."""

    @abstractmethod
    def where(self) -> Text:
        """The op, and the argument if it is about one."""

    @abstractmethod
    def got(self) -> Text: ...

    @abstractmethod
    def expected(self) -> Text: ...

    def constants(self) -> dict[str, Constant]:
        """What the Python condition needs besides the variables of the call."""
        return {}

    def defers(self, index: int) -> str:
        """C++ condition, on the arguments that nobody has taken, under which Python has to decide; or empty."""
        return ""

    @property
    def what(self) -> str:
        return self.title or CATALOGUE[self.id].title

    @property
    def remedy(self) -> str:
        return self.fix or CATALOGUE[self.id].fix

    def explain(self, values: Mapping[str, Local]) -> ShiplapError:
        """The error for a call whose variables are ``values``."""
        parts = ", ".join(template(text) for text in (self.where(), self.got(), self.expected()))
        where, got, expected = eval(f"({parts})", scope(self.constants()), dict(values))
        return error(self.id, what=self.what, where=where, got=got, expected=expected, fix=self.remedy)

    def hold(self, values: Mapping[str, Local]) -> None:
        """Raise the error unless the rule holds for a call whose variables are ``values``."""
        if not eval(_compiled(self.holds().python), scope(self.constants()), dict(values)):
            raise self.explain(values)


@lru_cache(maxsize=512)
def _compiled(condition: str) -> CodeType:
    """Conditions are few, and asked in each call: to read one takes as long as two launches."""
    return compile(condition, "<rule>", "eval")


def template(text: Text) -> str:
    """``text`` as a Python expression: ``'n = {}'.format(d_n)``."""
    if not any(isinstance(p, Term) for p in text):
        return repr("".join(p for p in text if isinstance(p, str)))
    literal = "".join("{}" if isinstance(p, Term) else p.replace("{", "{{").replace("}", "}}") for p in text)
    terms = [p.shown[0] for p in text if isinstance(p, Term)]
    return f"{literal!r}.format({', '.join(terms)})"
