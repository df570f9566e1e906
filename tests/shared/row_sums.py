"""For scripts that run kernels in Triton's interpreter: its product is a BLAS's, where a row of a
tile may be summed in another order than the row above it (OpenBLAS for AVX2). A GPU does not do
that, and after `sum_rows_alike` the interpreter does not either."""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter


def sum_rows_alike() -> None:
    """Replaces the interpreter's product for the rest of the process."""

    def dot(self: object, a: Any, b: Any, d: Any, precision: object, imprecise: object) -> Any:
        product = np.einsum("ik,kj->ij", a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot  # type: ignore[method-assign]
