"""Matrix products of fixed sizes by cuBLASLt, with a choice of the algorithm.

cuBLASLt names algorithms in the order in which it expects them to be fast, from a model of the
device. torch takes the first.

In the library's terms, whose matrices are stored column by column, y = x @ weight.T is

    D [out, rows]  =  A.T [out, in]  @  B [in, rows]         A weight, B x, D y: memory as it is
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

WORKSPACE_BYTES = 32 * 2**20

# Names of cublasLt.h, library_types.h and cublas_api.h.
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
_COMPUTE_32F, _OP_T = 68, 1
_TRANSA, _A_SCALE_POINTER, _B_SCALE_POINTER, _FAST_ACCUM = 3, 17, 18, 25
_A_SCALE_MODE, _B_SCALE_MODE, _SCALE_OUTER_VEC = 31, 32, 3
_MAX_WORKSPACE = 1

_Value = ctypes.c_int | ctypes.c_int8 | ctypes.c_size_t | ctypes.c_void_p


class Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; its first 64 bytes are a cublasLtMatmulAlgo_t."""

    _fields_ = (
        ("data", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class Scales:
    """Of e4m3 factors: x [rows, 1] and weight [out], float32."""

    x: torch.Tensor
    weight: torch.Tensor


class LtProduct:
    """x @ weight.T for x [rows, inputs], weight [outputs, inputs], contiguous, both of `dtype`.

    The sum is in float32. e4m3 gives bfloat16 and takes `Scales`. One object serves one stream.
    Raises RuntimeError where the library refuses.
    """

    def __init__(
        self, rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._is_scaled = dtype == torch.float8_e4m3fn
        result = torch.bfloat16 if self._is_scaled else dtype
        self._description = _create("MatmulDesc", ctypes.c_int(_COMPUTE_32F), ctypes.c_int(0))
        self._describe(_TRANSA, ctypes.c_int(_OP_T))
        if self._is_scaled:
            self._describe(_FAST_ACCUM, ctypes.c_int8(1))
            self._describe(_A_SCALE_MODE, ctypes.c_int(_SCALE_OUTER_VEC))
            self._describe(_B_SCALE_MODE, ctypes.c_int(_SCALE_OUTER_VEC))
        self._a, self._b = _layout(dtype, inputs, outputs), _layout(dtype, inputs, rows)
        self._d = _layout(result, outputs, rows)
        self._out = (rows, outputs, result)
        self._workspace = _workspace(device)
        handle = torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        self._handle = ctypes.c_void_p(handle)

    def algorithms(self, most: int) -> list[Algorithm]:
        """At most so many, the one first that the library expects to be the fastest."""
        preference = _create("MatmulPreference")
        size = ctypes.c_size_t(self._workspace.numel())
        _set("MatmulPreference", preference, _MAX_WORKSPACE, size)
        found, count = (Algorithm * most)(), ctypes.c_int(0)
        matrices = (self._a, self._b, self._d, self._d)
        head = (self._handle, self._description, *matrices, preference)
        _call("MatmulAlgoGetHeuristic", *head, ctypes.c_int(most), found, ctypes.byref(count))
        return [one for one in found[: count.value] if one.status == 0]

    def run(
        self,
        algorithm: Algorithm,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: Scales | None = None,
    ) -> torch.Tensor:
        """Starts the product on the current stream; a CUDA Graph may hold it."""
        if scales is not None:
            self._describe(_A_SCALE_POINTER, _pointer(scales.weight))
            self._describe(_B_SCALE_POINTER, _pointer(scales.x))
        rows, outputs, dtype = self._out
        y = torch.empty(rows, outputs, dtype=dtype, device=x.device)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        factors = (_pointer(weight), self._a, _pointer(x), self._b)
        _call(
            "Matmul",
            self._handle,
            self._description,
            ctypes.byref(one),
            *factors,
            ctypes.byref(zero),
            *(_pointer(y), self._d) * 2,
            ctypes.byref(algorithm.data),
            _pointer(self._workspace),
            ctypes.c_size_t(self._workspace.numel()),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        return y

    def _describe(self, name: int, value: _Value) -> None:
        _set("MatmulDesc", self._description, name, value)


@functools.cache
def _library() -> ctypes.CDLL:
    """The one that torch has loaded."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), f"cublasLt{name}")(*arguments)
    if status:
        raise RuntimeError(f"cublasLt{name} failed with status {status}")


def _create(kind: str, *arguments: object) -> ctypes.c_void_p:
    """Objects of the library; they live as long as the process."""
    made = ctypes.c_void_p()
    _call(f"{kind}Create", ctypes.byref(made), *arguments)
    return made


def _set(kind: str, made: ctypes.c_void_p, name: int, value: _Value) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _call(f"{kind}SetAttribute", made, ctypes.c_int(name), ctypes.byref(value), size)


def _layout(dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
    sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
    return _create("MatrixLayout", ctypes.c_int(_TYPES[dtype]), *sizes)


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
