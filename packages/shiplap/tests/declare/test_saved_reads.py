"""What a backward reads is found in its code, whatever way it is written; elsewhere saves= is asked for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch

from shiplap.declare.saved_reads import UnknownReads, _only_shows_values, attributes_read


def helper(s, g):
    return s.weight * g


def by_keyword(g, *, s):
    return s.bias


class Holder:
    def method(self, s):
        return s.method

    @staticmethod
    def static(s):
        return s.static

    def __call__(self, grad, saved, needs):
        return saved.called


holder = Holder()


@contextlib.contextmanager
def region():
    yield


def decorated(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        return f(*args, **kwargs)

    return wrapper


def plain(grad, saved, needs):
    return {"x": saved.scale * grad if needs.x else None, "y": saved.x.sum(0)}


def alias(grad, saved, needs):
    s = saved
    return {"x": helper(s, grad if needs.x else 1), "y": by_keyword(grad, s=saved), "z": s.x}


def methods(grad, saved, needs):
    return {"x": holder.method(saved) if needs.x else None, "y": Holder.static(saved)}


def comprehension(grad, saved, needs):
    return {"x": [x * saved.k for x in saved.xs], "y": (lambda: saved.y)(), "z": sum(saved.z for _ in range(2))}


def inner(grad, saved, needs):
    def of(s):
        return s.x

    def closed():
        return [saved.y]

    return of(saved), closed()


def branches(grad, saved, needs):
    x, y = saved.x, saved.y
    with region():
        z = saved.z
    try:
        x = saved.tried
    except ValueError as e:
        raise TypeError(saved.caught) from e
    finally:
        x = y
    for i in range(3):
        if i:
            continue
        x += y
    while x:
        x -= 1
    match needs.x:
        case True:
            return {"x": saved.case[0:2, ..., None] * -grad, "text": f"{saved.shown!r:>{3}}"}
        case _:
            return z


def of_a_class(grad, saved, needs):
    class Slopes:
        x = saved.x

        def y(self):
            return saved.y

    return Slopes.x, Slopes().y()


def written_out(grad, saved, needs):
    if saved is None or not saved:
        raise ValueError(needs)
    return getattr(saved, "x", None), saved.y if hasattr(saved, "y") else None


def shown(grad, saved, needs):
    print(saved, f"{saved}", type(saved))
    return saved.x


def reads_x(s):
    return s.x


def reads_y(s):
    return s.y


class Family:
    """Functions of saved in each place that an object has for them."""

    def __init__(self, reads):
        self.reads, self.part = reads, holder

    def backward(self, grad, saved, needs):
        return self.reads(saved), self.part.method(saved), self.own(saved), self.named(saved)

    def own(self, s):
        return s.own

    @classmethod
    def named(cls, s):
        return cls.last(s)

    @staticmethod
    def last(s):
        return s.last


class Heir(Family):
    def own(self, s):
        return s.heir


def closing(reads):
    return lambda s: reads(s)


closed_x, closed_y = closing(reads_x), closing(reads_y)
NAMES = ("x", "y")
ONE, TWO = torch.ones(2), torch.zeros(2)


def named(grad, saved, needs):
    result = {n: getattr(saved, n) for n in ("a", "b")}
    for name in NAMES:
        result[name] = getattr(saved, name) if hasattr(saved, name) else None
    return plain(grad, saved, needs), [n for n in result if n]


def third(first, second, s):
    return s.third


def after_condition(grad, saved, needs):
    return third(1 if needs.x else 2, grad, saved), [third(1 if needs else grad, saved.x, saved) for _ in grad]


def meets(grad, saved, needs):
    s = saved if needs.x else None
    factor = ONE
    if needs.x:
        factor = TWO
    return s.x * factor, (t := saved).y, t.z


def chosen(grad, saved, needs):
    reads = reads_x if needs.x else reads_y
    return reads(saved)


def changes(grad, saved, needs):
    reads = reads_x
    for _ in needs:
        grad.append(reads(saved))
        reads = reads_y


@decorated
def wrapped(grad, saved, needs):
    return saved.x


def late(first, grad, saved, needs):
    return saved.x


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (plain, "scale x"),
        (alias, "weight bias x"),
        (methods, "method static"),
        (comprehension, "k xs y z"),
        (inner, "x y"),
        (of_a_class, "x y"),
        (branches, "x y z tried caught case shown"),
        (written_out, "x y"),
        (shown, "x"),
        (wrapped, "x"),
        (functools.partial(late, 1), "x"),
        (holder, "called"),
        (Family(reads_x).backward, "x method own last"),
        (Heir(reads_y).backward, "y method heir last"),
        (lambda grad, saved, needs: (closed_x(saved), closed_y(saved)), "x y"),
        (named, "a b x y scale"),
        (meets, "x y z"),
        (after_condition, "third x"),
        (lambda grad, s, needs: {"x": s.x @ s.weight if needs.x and grad is not None else None}, "x weight"),
        (lambda grad, saved, needs: {"x": grad * 2}, ""),
        (lambda grad, saved, needs: (print(saved, grad[1:2]), saved.x), "x"),
        (lambda grad, saved, needs: (saved is None, saved.x), "x"),
    ],
)
def test_the_reads_are_found(fn: Callable[..., object], names: str) -> None:
    assert attributes_read(fn, 1) == {*names.split()}


def kept(grad, saved, needs):
    grad.s = saved


def starred(grad, saved, needs):
    return helper(*[saved, grad])


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda grad, saved, needs: {n: getattr(saved, n) for n in needs}, "getattr of it takes a name that is not"),
        (lambda grad, saved, needs: [getattr(saved, n) for n in (1, "x")], "getattr of it takes a name that is not"),
        (lambda grad, saved, needs: saved["x"], "it is subscripted"),
        (lambda grad, saved, needs: [grad for _ in saved], "it is iterated over"),
        (chosen, "something that cannot be looked into"),
        (changes, "something that cannot be looked into"),
        (lambda grad, saved, needs: vars(saved), "it is passed to vars"),
        (lambda grad, saved, needs: [saved], "it is put into a list"),
        (lambda grad, saved, needs: saved, "it is returned"),
        (lambda grad, saved, needs: grad.apply(saved), "it is passed to something that cannot be looked into"),
        (lambda grad, saved, needs: saved.__dict__, ".__dict__ of it is read"),
        (lambda *args: 1, "<lambda> takes it in *args"),
        (lambda grad, saved, needs: {"s": saved}["s"].x, "it is put into a list, tuple, set or dict"),
        (lambda grad, saved, needs: (lambda s=saved: s.x)(), "it is"),
        (lambda grad, saved, needs: saved(), "it is called"),
        (kept, "it is stored in an object"),
        (starred, "it is put into a list"),
        (lambda grad, saved, needs: (saved, grad or 1), "it is put into a list"),  # beside a value of either branch
    ],
)
def test_the_reads_cannot_be_found(fn: Callable[..., object], why: str) -> None:
    with pytest.raises(UnknownReads, match=why.replace("*", r"\*").replace(".", r"\.")):
        attributes_read(fn, 1)


def test_functions_that_only_show_a_value():
    """Those of pytest are known by their package, since it rewrites assertions. Functions in C have none."""
    from _pytest.assertion import rewrite

    assert all(map(_only_shows_values, (print, repr, rewrite._format_explanation)))
    assert not any(map(_only_shows_values, (len, torch.relu, functools.wraps, Holder.static)))
