"""The command line ``shiplap``: one verb a file. Verbs import torch only when they run.

Installed distributions add verbs, whose modules import ``shiplap.cli.console``. This package therefore does not import
its ``app``, which imports those modules.
"""
