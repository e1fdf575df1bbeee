"""Kernel families that Shiplap ships, each built on the public API alone: the proof that it suffices."""
