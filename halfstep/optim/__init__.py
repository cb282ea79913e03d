"""How updates keep the precision that low weights lack: masters, an own update, and any optimizer on masters."""

from halfstep.optim.guard import forbid_step, send_step
from halfstep.optim.masters import MasterStore
from halfstep.optim.state import exact_state_loading
from halfstep.optim.steppers import Stepper, make_stepper, needs_closure

__all__ = ["MasterStore", "Stepper", "exact_state_loading", "forbid_step", "make_stepper", "needs_closure", "send_step"]
