"""Whose code it is."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
import torch

import elastic.train.origin
from elastic.train.origin import is_defined_by_script, is_installed, is_of_script, is_own

INSTALLED = [
    "/venv/lib/python3.11/site-packages/torch/nn/module.py",
    "/usr/local/lib/python3.12/dist-packages/torch/nn/module.py",  # as in NVIDIA's images
]


@pytest.mark.parametrize("file", INSTALLED)
def test_code_of_an_installed_package_is_not_the_scripts(file: str) -> None:
    code = compile("pass", file, "exec")
    assert is_installed(code)
    assert not is_of_script(code)


def test_code_beside_the_script_is_the_scripts() -> None:
    code = compile("pass", "/home/me/packages/models.py", "exec")
    assert is_of_script(code)
    assert not is_installed(code)
    assert not is_own(code)


def test_what_libraries_and_this_package_define_is_not_the_scripts() -> None:
    others: list[Any] = [json, json.dumps, json.JSONDecoder, torch.nn.Linear, int, is_own]
    for one in (*others, elastic.train.origin):
        assert not is_defined_by_script(one)
    own: Any = test_code_beside_the_script_is_the_scripts
    assert is_defined_by_script(own)
    assert is_defined_by_script(type("Config", (), {}))
    assert is_defined_by_script(type("Config", (), {"__module__": "__main__"}))
    assert not is_defined_by_script(ModuleType("builtin_without_a_file"))
