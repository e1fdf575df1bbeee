"""``ArgumentRule``: a condition of a call in Python and in C++, and the error of a call that breaks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType
from typing import ClassVar

from shiplap.errors import CATALOGUE, ShiplapError, error
from shiplap.plan.expression import Expression, Text
from shiplap.plan.values import Constant, Local, rule_scope

TRUE = Expression("True", "true")


class ArgumentRule(ABC):
    """One rule of calls. The printers of both languages and the errors are derived from it.

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
    def holds(self) -> Expression:
        """Return the condition that a valid call fulfils."""

    @abstractmethod
    def where(self) -> Text:
        """Return the op, and the argument if the rule is about one."""

    @abstractmethod
    def got(self) -> Text: ...

    @abstractmethod
    def expected(self) -> Text: ...

    def constants(self) -> dict[str, Constant]:
        """Return the constants that the Python condition uses besides the variables of the call."""
        return {}

    def defers(self, index: int) -> str:
        """Return the C++ condition, on raw arguments, under which C++ leaves the call to Python. Empty for never."""
        return ""

    @property
    def what(self) -> str:
        return self.title or CATALOGUE[self.id].title

    @property
    def remedy(self) -> str:
        return self.fix or CATALOGUE[self.id].fix

    def explain(self, values: Mapping[str, Local]) -> ShiplapError:
        """Return the error for a call whose variables are ``values``."""
        parts = ", ".join(format_template(text) for text in (self.where(), self.got(), self.expected()))
        where, got, expected = eval(f"({parts})", rule_scope(self.constants()), dict(values))
        return error(self.id, what=self.what, where=where, got=got, expected=expected, fix=self.remedy)

    def hold(self, values: Mapping[str, Local]) -> None:
        """Raise the error unless the rule holds for a call whose variables are ``values``."""
        if not eval(_compile_condition(self.holds().python), rule_scope(self.constants()), dict(values)):
            raise self.explain(values)


@lru_cache(maxsize=512)
def _compile_condition(condition: str) -> CodeType:
    """Return the compiled condition. Parsing takes as long as two launches, and there are few conditions."""
    return compile(condition, "<rule>", "eval")


def format_template(text: Text) -> str:
    """Return ``text`` as a Python expression, such as ``'n = {}'.format(d_n)``."""
    if not any(isinstance(p, Expression) for p in text):
        return repr("".join(p for p in text if isinstance(p, str)))
    literal = "".join("{}" if isinstance(p, Expression) else p.replace("{", "{{").replace("}", "}}") for p in text)
    terms = [p.shown[0] for p in text if isinstance(p, Expression)]
    return f"{literal!r}.format({', '.join(terms)})"
