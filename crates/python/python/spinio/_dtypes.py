"""Element types: one table for safetensors, DLPack, NumPy, PyTorch and CuPy."""

from __future__ import annotations

from typing import Any, NamedTuple


class DType(NamedTuple):
    """One type. `numpy` and `torch` are the library's names of it, None if it has none."""

    name: str
    safetensors: str | None
    bits: int
    code: int  # DLPack's
    numpy: str | None
    torch: str | None

    @property
    def itemsize(self) -> int:
        """Bytes per element; 0 for types of fewer than 8 bits, whose elements share bytes."""
        return self.bits // 8

    def __str__(self) -> str:
        return self.name


_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6

TABLE = [
    DType("bool", "BOOL", 8, _BOOL, "bool", "bool"),
    DType("uint8", "U8", 8, _UINT, "uint8", "uint8"),
    DType("int8", "I8", 8, _INT, "int8", "int8"),
    DType("uint16", "U16", 16, _UINT, "uint16", "uint16"),
    DType("int16", "I16", 16, _INT, "int16", "int16"),
    DType("uint32", "U32", 32, _UINT, "uint32", "uint32"),
    DType("int32", "I32", 32, _INT, "int32", "int32"),
    DType("uint64", "U64", 64, _UINT, "uint64", "uint64"),
    DType("int64", "I64", 64, _INT, "int64", "int64"),
    DType("float16", "F16", 16, _FLOAT, "float16", "float16"),
    DType("float32", "F32", 32, _FLOAT, "float32", "float32"),
    DType("float64", "F64", 64, _FLOAT, "float64", "float64"),
    DType("complex64", "C64", 64, _COMPLEX, "complex64", "complex64"),
    DType("complex128", None, 128, _COMPLEX, "complex128", "complex128"),
    # NumPy has these if ml_dtypes is installed.
    DType("bfloat16", "BF16", 16, _BFLOAT, "bfloat16", "bfloat16"),
    DType("float8_e4m3fn", "F8_E4M3", 8, 10, "float8_e4m3fn", "float8_e4m3fn"),
    DType("float8_e4m3fnuz", "F8_E4M3FNUZ", 8, 11, "float8_e4m3fnuz", "float8_e4m3fnuz"),
    DType("float8_e5m2", "F8_E5M2", 8, 12, "float8_e5m2", "float8_e5m2"),
    DType("float8_e5m2fnuz", "F8_E5M2FNUZ", 8, 13, "float8_e5m2fnuz", "float8_e5m2fnuz"),
    DType("float8_e8m0fnu", "F8_E8M0", 8, 14, "float8_e8m0fnu", "float8_e8m0fnu"),
    DType("float6_e2m3fn", "F6_E2M3", 6, 15, None, None),
    DType("float6_e3m2fn", "F6_E3M2", 6, 16, None, None),
    DType("float4_e2m1fn", "F4", 4, 17, None, None),
]

NAMES = {d.name: d for d in TABLE}
SAFETENSORS = {d.safetensors: d for d in TABLE if d.safetensors}


def of(dtype: Any) -> DType:
    """The type for a name, a torch.dtype, a NumPy dtype or a Python type."""
    if isinstance(dtype, DType):
        return dtype
    _must_be_native(dtype)
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    if isinstance(dtype, type):
        # Not by ==: NumPy's types also compare equal to Python's.
        name = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}.get(dtype, name)
    known = NAMES.get(name)
    if known is None:
        try:
            import numpy

            found = numpy.dtype(dtype)
        except (ImportError, TypeError):
            found = None
        _must_be_native(found)
        known = NAMES.get(getattr(found, "name", ""))
    if known is None:
        raise TypeError(f"{dtype!r} is not an element type that spinio supports: {', '.join(NAMES)}")
    return known


def _must_be_native(dtype: Any) -> None:
    if not getattr(dtype, "isnative", True):
        raise TypeError(f"{dtype!r} has the other byte order: read bytes, and view them as that")
