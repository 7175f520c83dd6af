"""What default guards ask for, named."""

from mismatch_probe.guards.actions import Action, ActionKind

LOG = Action(ActionKind.LOG)
WARN = Action(ActionKind.WARN)
SKIP = Action(ActionKind.SKIP_UPDATE)
RESYNC = Action(ActionKind.RESYNC)
LEAVE_OUT = Action(ActionKind.LEAVE_OUT)
ROLLBACK = Action(ActionKind.ROLLBACK)
STOP = Action(ActionKind.STOP)
TIGHTEN = Action(ActionKind.TIGHTEN_SEQUENCES, factor=0.5)
TENTH_OF_RATE = Action(ActionKind.LOWER_LEARNING_RATE, factor=0.1)
PATIENT = 4
"""Steps that what may heal by itself is borne for, before the next one ends the run."""
SEND_AGAIN = (*((SKIP, RESYNC),) * PATIENT, (STOP,))
BEAR = (*((SKIP,),) * PATIENT, (STOP,))
SMALLER_STEPS = ((ROLLBACK, TENTH_OF_RATE),) * 3
"""From a thousand times the rate that does no harm."""
RATE_BEFORE = Action(ActionKind.LOWER_LEARNING_RATE, to_level=True)
STEPS_AS_BEFORE = ((ROLLBACK, RATE_BEFORE),) * 3
