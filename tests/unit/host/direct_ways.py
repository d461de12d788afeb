"""The public functions on a pretended GPU, whose usual calls go to an operator before Python has checked anything.

A call gives, or raises, what it does on the long way; and every usual call goes the direct one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_register = torch.library.Library.impl


def _register_elsewhere(library: Any, name: Any, function: Any, key: str = "", **options: Any) -> None:
    """The host library's operators are those of CPU tensors here, and the reference stays away."""
    if not (key == "CPU" and _has_kernel(name)):
        _register(library, name, function, key, **options)


def _has_kernel(name: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_attn::{name}", "CPU")


torch.library.Library.impl = _register_elsewhere
from flash_attn import _ops, fp8, kvcache  # noqa: E402
from flash_attn import flash_attn_interface as interface  # noqa: E402
from flash_attn.flash_attn_interface import (  # noqa: E402
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

assert _ops.HOST_LIBRARY.failure is None, _ops.HOST_LIBRARY.failure
Tensor.is_cuda = property(lambda x: x.device.type == "cpu")
Tensor.is_cpu = property(lambda x: False)
fp8.runs_kernel = lambda x: False

_WAYS = [
    (interface, "_FWD_OUTPUT"), (interface, "_FWD_GENERAL_OUTPUT"), (interface, "_FWD_FP8_OUTPUT"),
    (kvcache, "_DECODE_OUTPUT"), (kvcache, "_KVCACHE_OUTPUT"), (fp8, "_FWD_ROUNDED"),
]  # fmt: skip
called: list[str] = []


def _watched(name: str, operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*arguments: Any) -> Tensor:
        called.append(f"{name} called")
        out = operator(*arguments)
        called[-1] = name
        return out

    return call


def _refused(*_: Any) -> Tensor:
    raise RuntimeError("refused")


_OPERATORS = {name: _watched(name, getattr(module, name)) for module, name in _WAYS}
_is_compiling = kvcache.is_compiling


def outcome(call: Callable[[], Tensor], *, direct: bool) -> Any:
    """What `call` gives, or the class and the text of what it raises."""
    for module, name in _WAYS:
        setattr(module, name, _OPERATORS[name] if direct else _refused)
    kvcache.is_compiling = _is_compiling if direct else lambda: True
    called.clear()
    try:
        return call()
    except Exception as error:
        return type(error).__name__, str(error)


def halves(*sizes: int) -> Tensor:
    return torch.randn(sizes).half()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


torch.manual_seed(0)
q, k, v = halves(2, 5, 4, 64), halves(2, 9, 2, 64), halves(2, 9, 2, 64)
query, new = q[:, :1], k[:, :1]
packed = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ints(0, 3, 10), ints(0, 9, 18), 7, 9)
small = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
USUAL: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    ("_FWD_OUTPUT", flash_attn_func, (q, k, v), {"causal": True}),
    ("_FWD_GENERAL_OUTPUT", flash_attn_varlen_func, packed, {"softmax_scale": 0.3}),
    ("_FWD_FP8_OUTPUT", flash_attn_func, tuple(small), {}),
    ("_DECODE_OUTPUT", flash_attn_with_kvcache, (query, k, v), {"cache_seqlens": ints(3, 8)}),
    ("_KVCACHE_OUTPUT", flash_attn_with_kvcache, (query, k.clone(), v.clone(), new, new), {"cache_seqlens": 3}),
    ("_FWD_ROUNDED", fp8.flash_attn_fp8_func, (q, k, v), {"causal": True}),
]
for name, function, arguments, options in USUAL:
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            out = outcome(lambda: function(*arguments, **options), direct=True)  # noqa: B023
            assert isinstance(out, Tensor), out
            assert called == [name], called
            wanted = outcome(lambda: function(*arguments, **options), direct=False)  # noqa: B023
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)

            # None is no tensor, which torch would say on stderr before anybody asks.
            for at in (1, 2):
                given = [*arguments[:at], None, *arguments[at + 1 :]]
                raised = outcome(lambda: function(*given, **options), direct=True)  # noqa: B023
                assert raised[0] == "ArgumentError", raised
                assert "must be a torch.Tensor, got NoneType" in raised[1], raised
                assert not called, (name, at, called)

            # Tensors without heads, and without rows in a dtype that no kernel has.
            for changed in (lambda x: x[..., :0, :], lambda x: x[:, :0].double()):
                given = [changed(x) if isinstance(x, Tensor) and x.dim() > 1 else x for x in arguments]
                raised = outcome(lambda: function(*given, **options), direct=True)  # noqa: B023
                assert raised == outcome(lambda: function(*given, **options), direct=False), raised  # noqa: B023
                assert raised[0] in ("ShapeError", "DtypeError"), raised

# Where what rounds all three tensors is not built, they are rounded one after the other, for the forward that is there.
wide = (halves(2, 5, 4, 256), halves(2, 9, 2, 256), halves(2, 9, 2, 256))
out = outcome(lambda: fp8.flash_attn_fp8_func(*wide, causal=True), direct=True)
assert isinstance(out, Tensor), out
assert called == ["_FWD_ROUNDED called"], called
assert torch.equal(out, outcome(lambda: fp8.flash_attn_fp8_func(*wide, causal=True), direct=False))
print("all is well")
