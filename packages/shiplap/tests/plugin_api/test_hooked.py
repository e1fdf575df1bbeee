"""``is_hooked``: a module whose call is its ``forward``, and everything that makes it more."""

from __future__ import annotations

import pytest
from torch import nn
from torch.nn.modules import module as modules

from shiplap.plugin_api import is_hooked

OWN = "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"
OF_ALL = "register_module_forward_hook", "register_module_forward_pre_hook", "register_module_full_backward_hook"


def nothing(*args: object) -> None:
    """A hook."""


@pytest.mark.parametrize("register", OWN)
def test_a_hook_is_seen_until_it_is_removed(register):
    module = nn.ReLU()
    assert not is_hooked(module)
    handle = getattr(module, register)(nothing)
    assert is_hooked(module)
    handle.remove()
    assert not is_hooked(module)


@pytest.mark.parametrize("register", OF_ALL)
def test_a_hook_of_all_modules_is_one_of_each(register):
    handle = getattr(modules, register)(nothing)
    try:
        assert is_hooked(nn.ReLU())
    finally:
        handle.remove()
    assert not is_hooked(nn.ReLU())


def test_a_forward_of_its_own_is_seen():
    module = nn.ReLU()
    module.forward = nothing
    assert is_hooked(module)
