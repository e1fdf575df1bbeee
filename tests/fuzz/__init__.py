"""Mutated files: a corpus, the program that mutates it, and a sample of what ``nox -s fuzz`` does for longer."""
