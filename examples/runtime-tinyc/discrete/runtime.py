"""The runtime tinyc on two devices with memory and streams of their own: the files of
tinyc, and a driver."""

from pathlib import Path

from shiplap_backend.runtime import Runtime

HERE = Path(__file__).parent
RUNTIME = Runtime(
    name="tinyc",
    contract=1,
    directory=HERE.parent,
    metadata=HERE.parent / "ops.yaml",
    graph="eager",
    sources=(HERE / "driver.cpp",),
    discrete=True,
)
