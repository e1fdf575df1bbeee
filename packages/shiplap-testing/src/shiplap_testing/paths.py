"""Where the repository's files are, for tests of pages, examples, benchmarks and tools."""

import os
from pathlib import Path

# An installed shiplap-testing does not lie in the repository, and is told where that is.
REPOSITORY = Path(os.environ.get("SHIPLAP_TEST_ROOT") or Path(__file__).parents[4]).resolve()

# The tests of each package are a part of the namespace package ``tests``; programs that tests start find it here too.
SEARCHED = (REPOSITORY, *sorted(p.parent for p in REPOSITORY.glob("packages/*/tests")))


def searched() -> str:
    """Return a value for the environment variable ``PYTHONPATH``. It has the folders in which tests find each other's
    helpers, followed by the folders of the present value.
    """
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([*map(str, SEARCHED), *given]))
