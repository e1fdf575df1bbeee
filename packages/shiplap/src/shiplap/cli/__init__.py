"""``shiplap``: one verb a file. Verbs import torch only when they run.

Installed distributions bring verbs of their own, whose modules import ``shiplap.cli.console``: so this package does not
import its ``app``, which imports them.
"""
