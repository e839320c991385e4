"""What the exit status of a training process says to the shell, the scheduler and the launcher.

======  =========  ==================================================================================
status  name       meaning
======  =========  ==================================================================================
0       OK         the run did all its steps
2       CONFIG     the configuration cannot be run; nothing was started
75      STOPPED    a signal asked it to stop, a checkpoint was saved; start it again to go on
76      NONFINITE  loss or gradient norm was not finite and the policy ends the run; look before a restart
======  =========  ==================================================================================

75 is EX_TEMPFAIL of sysexits.h: "try again later". 1 stays Python's own: an exception that nobody caught.
"""

from __future__ import annotations

OK = 0
CONFIG = 2
STOPPED = 75
NONFINITE = 76

SENTENCES = {
    OK: "the run did all its steps",
    CONFIG: "the configuration cannot be run; nothing was started",
    STOPPED: "a signal asked the run to stop and a checkpoint was saved; start it again to go on",
    NONFINITE: "the loss or the gradient norm was not finite and the policy ends the run; look at the log before "
    "starting it again",
}


def describe(code: int) -> str:
    """The sentence of an exit status; also for those that are not ours (a signal's, Python's own).

    >>> describe(75)
    'a signal asked the run to stop and a checkpoint was saved; start it again to go on'
    """
    if code in SENTENCES:
        return SENTENCES[code]
    if code == 1:
        return "an exception ended the process; the traceback is in its output"
    if code < 0 or code > 128:
        # subprocess counts signals downwards from 0, a shell upwards from 128
        return f"the process was ended by signal {-code if code < 0 else code - 128}"
    return f"status {code} is not one of ours"
