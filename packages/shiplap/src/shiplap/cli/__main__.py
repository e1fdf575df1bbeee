"""``python -m shiplap.cli``: the console script, for an environment whose ``bin`` is not on the path."""

from shiplap.cli.app import main

main()
