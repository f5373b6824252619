"""A twin GPU node: NVIDIA's libraries, real in their ABI, over hardware that is a state file.

`libnvidia-ml.so.1` and `libcuda.so.1` are compiled from `csrc/` and loaded as the real ones are, so
that the unmodified pynvml, torch, DeepSpeed and Ray run against them. Whatever is measured on such
a node is no measurement of a GPU: say "twin" beside every figure.
"""

from tests.twin.build import Libraries, build, compiler
from tests.twin.gpu import TwinGpu
from tests.twin.node import STATE, TwinNode, joined_node

__all__ = ["STATE", "Libraries", "TwinGpu", "TwinNode", "build", "compiler", "joined_node"]
