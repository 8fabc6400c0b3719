"""Write docs/idioms.md from the docstrings of the scripts in tests/idioms.

python scripts/idioms_table.py          # write the page
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "idioms"))

from catalogue import PAGE, page  # noqa: E402  found by the line above

if __name__ == "__main__":
    PAGE.write_text(page())
