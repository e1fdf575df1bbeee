"""A plugin of pytest that runs a share of the files of tests, so that several processes divide them.

pytest itself collects all tests, by its own options and settings. Which files have tests is not guessed from outside.
"""

from __future__ import annotations

from typing import Any

OPTION = "--shiplap-share"


def share_arguments(at: int, of: int) -> list[str]:
    """Return the arguments with which pytest runs the tests of share ``at`` of ``of`` shares, counted from 0. A
    file that cannot be collected stops the tests of no share.
    """
    return ["-p", __name__, f"{OPTION}={at}/{of}", "--continue-on-collection-errors"]


def pytest_addoption(parser: Any) -> None:
    """Add the option that says which share is run."""
    parser.addoption(OPTION, default="0/1", help="run one share of the files of tests, as 0/2 or 1/2")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave the tests of the share in ``items``. All tests of one file are in the same share."""
    at, of = map(int, config.getoption(OPTION).split("/"))
    files = {item: item.nodeid.partition("::")[0] for item in items}
    mine = set(sorted(set(files.values()))[at::of])
    before = len(items)
    items[:] = [item for item in items if files[item] in mine]
    config.shiplap_left_out = len(items) < before


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    """Report success if there was no test because other shares have them all."""
    if int(exitstatus) == 5 and getattr(session.config, "shiplap_left_out", False):
        session.exitstatus = 0
