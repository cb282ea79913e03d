"""HOW 2, the range of gradients: no, static and dynamic scale, what scale a gradient carries, the non-finite test."""

from halfstep.scale.buffers import BufferGuard
from halfstep.scale.grad_scaler import GradScaler
from halfstep.scale.ledger import Collected, GradientLedger
from halfstep.scale.norm import global_norm
from halfstep.scale.scaling import DynamicScale, NoScale, Scale, StaticScale, make_scale

__all__ = [
    "BufferGuard",
    "Collected",
    "DynamicScale",
    "GradScaler",
    "GradientLedger",
    "NoScale",
    "Scale",
    "StaticScale",
    "global_norm",
    "make_scale",
]
