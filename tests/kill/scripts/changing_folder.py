"""session.py with another checkpoint folder at each start: a relative one in a working folder of
its own, as under Hydra, or with ``ABSOLUTE=1`` an absolute one."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from session import main

(folder,) = (arg.partition("=")[2] for arg in sys.argv if arg.startswith("--folder="))
outputs = Path(folder, "outputs")
outputs.mkdir(exist_ok=True)
own = tempfile.mkdtemp(dir=outputs)
os.chdir(own)
absolute = os.path.join(own, "checkpoints")
os.environ["ELASTIC_CHECKPOINTS"] = absolute if os.environ.get("ABSOLUTE") else "checkpoints"
main()
