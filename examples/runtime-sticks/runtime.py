"""The runtime sticks: a library of fp16 whose memory is in blocks of 64 bytes."""

from pathlib import Path

from shiplap_backend.runtime import Runtime

HERE = Path(__file__).parent
RUNTIME = Runtime(
    name="sticks",
    contract=1,
    directory=HERE,
    metadata=HERE / "ops.yaml",
    graph="eager",
    block=32,
)
