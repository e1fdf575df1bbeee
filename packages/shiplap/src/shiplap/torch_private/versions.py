"""The releases of torch that the suite was run on: the only place that lists them.

``nox -s matrix`` runs the suite on each release, and ``shiplap env`` prints what was verified on them. Nothing is
imported here, since ``noxfile.py`` reads this file in an environment without torch.
"""

RELEASES: dict[str, tuple[str, ...]] = {
    # release of torch: the capabilities (``shiplap.torch_private.CAPABILITIES``) that no run on it has verified
    "2.11.0": ("graph-break registry", "structured trace"),
    "2.13.0": ("abandoned captures",),
    "2.15.0": (
        "Inductor on a generated device",
        "abandoned captures",
        "autocast rules",
        "cache keys of graphs",
        "calls below autograd",
        "calls past OpOverload.__call__",
        "compile counters",
        "data-dependent sizes",
        "dynamic dims",
        "graph-break registry",
        "redeclaring an op",
        "storage identity",
        "structured trace",
        "symbolic fakes",
        "symbolic sizes",
        "tuning keys and guards",
    ),
}


def short(version: str) -> str:
    """The major and minor number of a version: "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])
