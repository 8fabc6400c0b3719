"""Import etcd3 0.12.0 with any protobuf from 3.20 on.

The library's generated ``*_pb2`` modules were written by a protoc so old that protobuf 4 and
later refuse to run them ("Descriptors cannot be created directly"). Its API and its gRPC stubs
are fine. So the message descriptions, which are constants in those files, are read out with
``ast`` without running the files; the classes are built from them in a descriptor pool of their
own (``kv.proto`` and ``rpc.proto`` are names that other libraries may use, too); and the result
is put into ``sys.modules`` under the names that etcd3 is about to import.

Nothing is pinned and no environment variable is needed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

from elastic.errors import ConfigError

_PACKAGE = "etcd3.etcdrpc"
_MODULES = ("kv_pb2", "auth_pb2", "rpc_pb2")  # in order of dependency
_LOCK = threading.Lock()
# Parsing the 5,000 lines of its descriptions for it takes longer than the import of grpc.
_SERIALIZED = re.compile(
    r"""\bserialized_pb=\s*(?:_b\(\s*)?(b?'[^'\\]*(?:\\.[^'\\]*)*')""", re.DOTALL
)


def load_rpc() -> ModuleType:
    """``etcd3.etcdrpc``: etcd's messages and gRPC stubs. Raises ConfigError without etcd3."""
    load_grpc()
    with _LOCK:
        if f"{_PACKAGE}.rpc_pb2" not in sys.modules:
            _register()
        return importlib.import_module(_PACKAGE)


def load_grpc() -> Any:
    """The ``grpc`` module; its C core is kept from writing its own log to stderr.

    It would report every refused connection there, which the store reports itself. A GRPC_VERBOSITY
    set by the user is kept. The variable does not leak to this process's children.
    """
    if "grpc" in sys.modules or "GRPC_VERBOSITY" in os.environ:
        return importlib.import_module("grpc")
    os.environ["GRPC_VERBOSITY"] = "NONE"
    try:
        return importlib.import_module("grpc")
    finally:
        os.environ.pop("GRPC_VERBOSITY", None)


def _register() -> None:
    folder = _package_folder()
    found = [_serialized_file(folder / f"{name}.py") for name in _MODULES]
    descriptions = [description for description in found if description is not None]
    if len(descriptions) < len(_MODULES):
        return  # a newer etcd3, generated for current protobuf: it needs no help
    pool = descriptor_pool.DescriptorPool()
    for name, description in zip(_MODULES, descriptions, strict=True):
        pool.AddSerializedFile(description)
        module = _build_module(f"{_PACKAGE}.{name}", pool, f"{name.removesuffix('_pb2')}.proto")
        sys.modules[module.__name__] = module


def _package_folder() -> Path:
    spec = importlib.util.find_spec("etcd3")  # of a top-level package: imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the Python package etcd3 is not installed", hint="pip install 'etcd3>=0.12'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "etcdrpc"


def _serialized_file(path: Path) -> bytes | None:
    """The constant of ``serialized_pb=`` of the file's ``FileDescriptor(...)``."""
    found = _SERIALIZED.search(path.read_text(encoding="utf-8"))
    if found is None:
        return None
    value = ast.literal_eval(found[1])
    # A text is written as _b('...'), which encodes to latin1.
    return value.encode("latin1") if isinstance(value, str) else bytes(value)


def _build_module(name: str, pool: Any, proto: str) -> ModuleType:
    """What protoc would have written: classes, enums and enum values as module attributes."""
    module = ModuleType(name, f"Built from {proto} by {__name__}.")
    description = pool.FindFileByName(proto)
    module.__dict__["DESCRIPTOR"] = description
    for message_name, message in description.message_types_by_name.items():
        module.__dict__[message_name] = _message_class(pool, message)
    for enum_name, enum in description.enum_types_by_name.items():
        module.__dict__[enum_name] = enum_type_wrapper.EnumTypeWrapper(enum)
        module.__dict__.update({value.name: value.number for value in enum.values})
    return module


def _message_class(pool: Any, description: Any) -> Any:
    factory: Any = message_factory  # its names differ between protobuf's versions
    if hasattr(factory, "GetMessageClass"):  # protobuf >= 4.22
        return factory.GetMessageClass(description)
    return factory.MessageFactory(pool).GetPrototype(description)
