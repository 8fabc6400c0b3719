"""session.py with a relative checkpoint folder, in a working folder of its own at each start, as
under Hydra."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from session import main

(folder,) = (arg.partition("=")[2] for arg in sys.argv if arg.startswith("--folder="))
outputs = Path(folder, "outputs")
outputs.mkdir(exist_ok=True)
os.chdir(tempfile.mkdtemp(dir=outputs))
os.environ["ELASTIC_CHECKPOINTS"] = "checkpoints"
main()
