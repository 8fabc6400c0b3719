"""Refuses ``elastic.join`` in a data worker, and in other processes that the script starts.

A process that multiprocessing spawns runs the script again, as the module ``__mp_main__``. It would
join the job as another worker, and the agent refuses it without a reason that the script has.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch.utils.data import get_worker_info

from elastic.errors import ConfigError


def refuse_child_process(frame: FrameType | None = None) -> None:
    """Raise ConfigError in a data worker, and while multiprocessing runs the script again.
    ``frame``: the caller's.

    A function that a launcher starts in a spawned process is not refused.
    """
    if get_worker_info() is None and not _is_main_module_again(frame or sys._getframe(1)):
        return
    raise ConfigError(
        "elastic.join() was called in a data worker or another child process of this worker, which "
        "runs the script from its beginning",
        hint='if __name__ == "__main__":\n    main()    # everything that only the worker does',
    )


def _is_main_module_again(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            return True
        frame = frame.f_back
    return False
