"""How floats are compared: one helper, a relative and an absolute tolerance that fit their type and their size.

|actual − expected| ≤ max(rtol |expected| + rtol size, atol), with `size` the largest of the expected numbers unless a
test names that of the terms they are sums of. A number near 0 beside large ones is thereby held to the large ones'
rounding, as another processor may sum in another order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

# Several roundings of each type, of sums of some hundred terms.
RTOL = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_close(
    actual: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float = 0.0,
    size: float | None = None,
    msg: str | None = None,
) -> None:
    """Raise unless two numbers, arrays, tensors, or mappings or sequences of them, are equal up to rounding."""
    if isinstance(expected, list | tuple) and any(isinstance(each, Tensor | np.ndarray) for each in expected):
        actual, expected = ({str(place): value for place, value in enumerate(of)} for of in (actual, expected))
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(actual[name], value, rtol=rtol, atol=atol, size=size, msg=msg or name)
        return
    found, wanted = (torch.as_tensor(each).detach() for each in (actual, expected))
    if wanted.dim() == 0:
        wanted = wanted.expand_as(found)
    relative = rtol or max(RTOL.get(each.dtype, 0.0) for each in (found, wanted)) or RTOL[torch.float64]
    found, wanted = (each.cpu().to(torch.promote_types(each.dtype, torch.float64)) for each in (found, wanted))
    finite = wanted[wanted.isfinite()] if wanted.is_floating_point() else wanted.flatten()
    largest = size if size is not None else float(finite.abs().max()) if finite.numel() else 0.0
    told: Any = {} if msg is None else {"msg": lambda text: f"{msg}: {text}"}
    limits: Any = {"rtol": relative, "atol": max(atol, relative * largest), "equal_nan": True, "check_dtype": False}
    torch.testing.assert_close(found, wanted, **limits, **told)


def close(actual: Any, expected: Any, **tolerances: Any) -> bool:
    """Whether `assert_close` passes."""
    try:
        assert_close(actual, expected, **tolerances)
    except AssertionError:
        return False
    return True


def approx(expected: Any, rel: float | None = None, abs: float | None = None, **options: Any) -> Any:
    """`pytest.approx` under the same rule, for numbers, sequences and mappings of them."""
    relative = rel or 1e-6
    plain = list(expected.values()) if isinstance(expected, Mapping) else expected
    nested = isinstance(plain, Sequence | np.ndarray | Tensor)
    values = np.asarray(plain, dtype=float).reshape(-1) if nested else np.asarray([plain], dtype=float)
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max()) if len(finite) else 0.0
    return pytest.approx(expected, rel=relative, abs=max(abs or 0.0, relative * largest, 1e-12), **options)
