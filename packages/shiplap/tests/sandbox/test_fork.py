"""A process forks also if it was forked while another thread forked."""

import os
import signal
import threading

from shiplap.sandbox import fork


def test_a_process_that_other_code_has_forked_can_fork() -> None:
    with fork._LOCKS.setdefault(os.getpid(), threading.Lock()):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            if (pid := fork.fork_process()) == 0:
                os._exit(7)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
