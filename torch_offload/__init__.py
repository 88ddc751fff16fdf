"""Put a model's device memory away in host memory for the length of a block, and bring it back bit for bit."""

from .errors import (
    DeviceMemoryError,
    GradientsError,
    HostMemoryError,
    IntegrityError,
    MirrorMismatchError,
    OffloadedTensorError,
    OffloadError,
    SharedStorageError,
    TransitionError,
    UnsupportedTargetError,
)
from .host_memory import PageableMirrorWarning, trim_host_memory
from .offloader import Offloader, offloaded, reload, resident
from .report import LeftRow, MirrorRow, Residency, TransitionReport
from .snapshot import Snapshot, snapshot
from .strategies import (
    Claim,
    FlatBufferStrategy,
    FSDP2Strategy,
    MegatronOptimizerStrategy,
    OptimizerStrategy,
    PerParameterStrategy,
    Strategy,
    strategy_for,
)
from .transition import PreparedOffload
from .unreached import Unreached, UnreachedRow

__version__ = "0.1.0"

__all__ = [
    "Claim",
    "DeviceMemoryError",
    "FSDP2Strategy",
    "FlatBufferStrategy",
    "GradientsError",
    "HostMemoryError",
    "IntegrityError",
    "LeftRow",
    "MegatronOptimizerStrategy",
    "MirrorMismatchError",
    "MirrorRow",
    "OffloadError",
    "OffloadedTensorError",
    "Offloader",
    "OptimizerStrategy",
    "PageableMirrorWarning",
    "PerParameterStrategy",
    "PreparedOffload",
    "Residency",
    "SharedStorageError",
    "Snapshot",
    "Strategy",
    "TransitionError",
    "TransitionReport",
    "Unreached",
    "UnreachedRow",
    "UnsupportedTargetError",
    "offloaded",
    "reload",
    "resident",
    "snapshot",
    "strategy_for",
    "trim_host_memory",
]
