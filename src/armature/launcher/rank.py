"""A rank as the elastic agent starts it: `python -m armature.launcher.rank RUN_DIR`.

It handles signals before the slow imports. No process of a run outlives the one that started it,
however that one
ended: SIGKILL cannot be handled, and an orphan would hold its GPU and write into the run directory
of the next start.
"""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make this process, and those that it forks, such as data loader workers, end with their
    parents.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        libc, main = ctypes.CDLL(None), threading.main_thread().ident

        def end_with_parent_thread() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        def in_child() -> None:
            # another thread may end before the children that it started
            if threading.get_ident() == main:
                end_with_parent_thread()

        end_with_parent_thread()
        os.register_at_fork(after_in_child=in_child)

    def watch() -> None:  # for systems without that call, and a parent that ended before it
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def leave(code: int = 0) -> NoReturn:
    """End a finished rank without the interpreter's teardown: a gloo thread can abort it, which
    counts as failed.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_at_exit(code: int) -> None:
    """Call `leave` when this process ends: after its error is shown, and before torch tears down
    its process group.
    """

    def leave_now() -> None:
        atexit.unregister(leave_now)
        leave(code)

    atexit.register(leave_now)


def main() -> None:
    # Ctrl-C during the imports ends a rank without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    # garbage collection during imports takes a quarter of the start; the worker enables it again
    gc.disable()
    from armature import worker
    from armature.launcher import streams

    streams.make_lasting()
    worker.main()


if __name__ == "__main__":
    main()
