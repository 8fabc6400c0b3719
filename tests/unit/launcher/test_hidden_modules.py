"""A user's file that hides a module of the standard library in the workers is named."""

from __future__ import annotations

import queue
import sys
from pathlib import Path

import pytest

from elastic.launcher.launch import hidden_modules


def test_a_file_beside_the_script_is_named_with_the_module_that_it_hides(tmp_path: Path) -> None:
    (tmp_path / "queue.py").touch()
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "__init__.py").touch()
    (tmp_path / "data.py").touch()  # no module of the library
    (tmp_path / "os.py").touch()  # imported before the folder is on the search path
    (tmp_path / "turtle.py").touch()  # which no library imports
    script = tmp_path / "train.py"
    assert "turtle" not in sys.modules
    hidden = dict(hidden_modules((sys.executable, "-u", str(script), "--epochs=3")))
    assert hidden.pop(str(tmp_path / "queue.py")) == queue.__file__
    assert [Path(path) for path in hidden] == [tmp_path / "random" / "__init__.py"]


def test_a_module_has_the_working_folder_on_its_search_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").touch()
    monkeypatch.chdir(tmp_path)
    (named,) = hidden_modules((sys.executable, "-u", "-m", "package.train"))
    assert named == (str(tmp_path / "queue.py"), queue.__file__)
    assert hidden_modules(("/bin/program",)) == hidden_modules(()) == []
