"""Element types: torch's, the manifest's name, and the name inside a safetensors file.

The names are those of safetensors. A type that safetensors cannot name (complex128) is stored as
its component type with one more dimension, so that any safetensors reader can open the file; the
manifest records the actual type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ElementType:
    """One element type: its name in the manifest, its torch dtype, and how safetensors stores
    it."""

    name: str  # in the manifest
    torch: torch.dtype
    size_bytes: int
    file_name: str  # in the safetensors header
    file_shape: tuple[int, ...] = ()  # dimensions added to the shape there


_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
# safetensors versions that do not know these names reject the file.
_STORED_AS = {
    "C64": ("F32", (2,)),
    "C128": ("F64", (2,)),
    "F8_E4M3FNUZ": ("U8", ()),
    "F8_E5M2FNUZ": ("U8", ()),
    "F8_E8M0": ("U8", ()),
}


def _known() -> dict[str, ElementType]:
    types: dict[str, ElementType] = {}
    for name, attribute in {**_NAMES, "C128": "complex128"}.items():
        dtype = getattr(torch, attribute, None)
        if dtype is not None:
            file_name, file_shape = _STORED_AS.get(name, (name, ()))
            types[name] = ElementType(name, dtype, dtype.itemsize, file_name, file_shape)
    return types


BY_NAME: dict[str, ElementType] = _known()
BY_DTYPE: dict[torch.dtype, ElementType] = {e.torch: e for e in BY_NAME.values()}
