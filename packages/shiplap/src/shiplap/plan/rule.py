"""``ArgumentRule``, a condition of a call in Python and in C++, with the error of a call that breaks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType

from shiplap.errors import CATALOGUE, ShiplapError, error
from shiplap.plan.expression import Expression, Text
from shiplap.plan.values import Constant, Local, rule_scope

TRUE = Expression("True", "true")


@dataclass(frozen=True)
class ArgumentRule:
    """One rule of calls, as data. The checks in both languages and the errors are generated from it.

    Attributes:
        id: the number of the error in the catalogue.
        condition: a condition that a valid call meets.
        where: the op, and the argument if the rule is about one.
        got, expected: the texts of the error.
        argument: the tensor argument that the rule is about, or an empty string.
        title, fix: the words of the error, or empty strings to use those of the catalogue.
        fix_of_one: the fix for a call whose wrong size is 1, which may be meant to broadcast. It is empty if such a
            call has the same fix as any other.
        cpp_is_one: the C++ condition that the wrong size is 1. It is empty if ``fix_of_one`` is.
        constants: the values that the Python condition uses in addition to the variables of the call.
        cpp_by: in words, what ensures the rule for C++ if the C++ condition is ``true``.
        undecided: in words, the calls that only Python can check against the rule, or an empty string.
        deferral: the C++ condition on unconverted arguments under which C++ passes such a call to Python. It has
            ``{index}`` for the position of the argument.
    """

    id: str
    condition: Expression
    where: Text
    got: Text
    expected: Text
    argument: str = ""
    title: str = ""
    fix: str = ""
    fix_of_one: str = ""
    cpp_is_one: str = ""
    constants: Mapping[str, Constant] = field(default_factory=dict)
    cpp_by: str = ""
    undecided: str = ""
    deferral: str = ""

    @property
    def error_title(self) -> str:
        """The first line of the error. It is the rule's own title, or that of the catalogue entry if the rule
        has none.
        """
        return self.title or CATALOGUE[self.id].title

    @property
    def error_fix(self) -> str:
        """The action that the error recommends. It is the rule's own fix, or that of the catalogue entry if the rule
        has none.
        """
        return self.fix or CATALOGUE[self.id].fix

    def fix_for(self, got: str) -> str:
        """Return the fix of an error whose line ``got`` has this text, or an empty string if the fix is that of the
        catalogue. The text shows which size is wrong, such as ``n = 1``.
        """
        return self.fix_of_one if self.fix_of_one and got.endswith(" = 1") else self.fix

    def make_error(self, values: Mapping[str, Local]) -> ShiplapError:
        """Return the error of a call that breaks the rule. ``values`` are the variables of the generated checks by
        name. The texts of the error are completed with them.
        """
        parts = ", ".join(format_template(text) for text in (self.where, self.got, self.expected))
        # The texts are expressions of our own declarations, never of a caller.
        where, got, expected = eval(f"({parts})", rule_scope(self.constants), dict(values))
        return error(self.id, what=self.title, where=where, got=got, expected=expected, fix=self.fix_for(got))

    def check_call(self, values: Mapping[str, Local]) -> None:
        """Raise the error of the rule unless its Python condition is true for ``values``, the variables of the
        generated checks by name.
        """
        if not eval(_compile_condition(self.condition.python), rule_scope(self.constants), dict(values)):
            raise self.make_error(values)


@lru_cache(maxsize=512)
def _compile_condition(condition: str) -> CodeType:
    """Return the compiled code of a Python condition. It is cached, since parsing takes as long as two launches and
    there are few conditions.
    """
    return compile(condition, "<rule>", "eval")


def format_template(text: Text) -> str:
    """Return Python source that computes ``text``, which consists of words and expressions. An example is ``'n =
    {}'.format(d_n)``.
    """
    if not any(isinstance(p, Expression) for p in text):
        return repr("".join(p for p in text if isinstance(p, str)))
    literal = "".join("{}" if isinstance(p, Expression) else p.replace("{", "{{").replace("}", "}}") for p in text)
    terms = [p.shown[0] for p in text if isinstance(p, Expression)]
    return f"{literal!r}.format({', '.join(terms)})"
