"""``python -m shiplap.cli``: the console script, for an environment whose ``bin`` is not on the path."""

from shiplap_console import main

main()
