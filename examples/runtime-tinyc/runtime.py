"""The runtime tinyc: what `shiplap backend new NAME --runtime DIRECTORY` reads."""

from pathlib import Path

from shiplap_backend.runtime import Runtime

HERE = Path(__file__).parent
RUNTIME = Runtime(
    name="tinyc", contract=1, directory=HERE, metadata=HERE / "ops.yaml", graph="eager"
)
