"""What benchmark.py measures: the cases, how their operations and bytes are counted, and the bars they are to reach.

Knows no torch, so that it can be tested, and reports be made, anywhere.
"""

from __future__ import annotations

import fnmatch
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS = 16384  # batch times sequence length of a forward or backward
HIDDEN = 2048  # heads times head dim
LENGTHS = {"1k": 1024, "4k": 4096, "8k": 8192, "16k": 16384, "64k": 65536}
OURS, FLASH, CUDNN = "flash_attn", "FLASH", "CUDNN"
UNITS = {
    "fwd": "TFLOP/s",
    "bwd": "TFLOP/s",
    "fp8": "TFLOP/s",
    "varlen": "TFLOP/s",
    "feature": "TFLOP/s",
    "decode": "GB/s",
    "append": "GB/s",
    "host": "us",
}
# The ceiling that a group's figures are a share of: a matrix product, or a copy.
CEILINGS = dict.fromkeys(("fwd", "bwd", "varlen", "feature"), "gemm-bf16") | {"fp8": "gemm-fp8"}
CEILINGS |= {"decode": "copy", "append": "copy"}


@dataclass(frozen=True)
class Attention:
    """A forward, a backward (timed without its forward) or an FP8 forward; lengths of a packed batch for varlen.

    For `feature`, a forward, what models have besides: a causal window (so many keys before the query's own), a
    softcap, a sink for each head, several query heads for each KV head.
    """

    group: str
    head_dim: int
    causal: bool
    length: str
    lengths: tuple[int, ...] = ()
    window: int | None = None
    softcap: float = 0.0
    sink: bool = False
    queries_per_key: int = 1

    @property
    def name(self) -> str:
        mask = "full" if not self.causal else "causal" if self.window is None else f"window{self.window}"
        features = "-softcap" * (self.softcap > 0.0) + "-sink" * self.sink
        return f"{self.group}-d{self.head_dim}-{mask}{features}-{self.length}"

    @property
    def heads(self) -> int:
        return max(1, HIDDEN // self.head_dim)

    @property
    def heads_kv(self) -> int:
        return self.heads // self.queries_per_key

    @property
    def sequences(self) -> tuple[int, ...]:
        """The length of each sequence of the batch."""
        seqlen = LENGTHS.get(self.length, 0)
        return self.lengths or (seqlen,) * (TOKENS // seqlen)

    def work(self) -> float:
        """Floating-point operations: 4 * heads * Sq * Sk * head dim, half if causal, 2.5 times that for a backward.

        Of a causal window, less the half of a smaller square that lies before it.
        """
        before = [0 if self.window is None else max(0, n - self.window - 1) for n in self.sequences]
        scores = float(sum(n * n - hidden * hidden for n, hidden in zip(self.sequences, before, strict=True)))
        forward = 4.0 * self.heads * scores * self.head_dim * (0.5 if self.causal else 1.0)
        return forward * (2.5 if self.group == "bwd" else 1.0)


@dataclass(frozen=True)
class Decoding:
    """Few query tokens against a KV cache in slabs or pages, bf16; `append` writes and rotates new rows first."""

    group: str
    layout: str
    batch: int
    length: str
    tokens: int
    head_dim: int = 128
    heads: int = 32
    heads_kv: int = 8
    page_size: int = 64

    @property
    def name(self) -> str:
        return f"{self.group}-{self.layout}-b{self.batch}-{self.length}-q{self.tokens}"

    def work(self) -> float:
        """Bytes of keys and values: each is read once."""
        return 2.0 * self.batch * LENGTHS[self.length] * self.heads_kv * self.head_dim * 2


@dataclass(frozen=True)
class Host:
    """The time of a call on the CPU, on a problem so small that the GPU waits."""

    call: str
    group: str = "host"

    @property
    def name(self) -> str:
        return f"host-{self.call}"


Case = Attention | Decoding | Host


def mixed_lengths(total: int, count: int) -> tuple[int, ...]:
    """`count` lengths from short to long in equal steps, together about `total`: what a packed batch looks like."""
    step = 2.0 * total / (count * (count + 1))
    return tuple(max(1, round(step * (i + 1))) for i in range(count))


def all_cases() -> list[Case]:
    found: list[Case] = [
        Host(call)
        for call in ("forward", "forward-autograd", "varlen", "decode", "append", "append-rotary", "fp8", "fp8-func")
    ]
    for group, head_dims in (("fwd", (64, 96, 128, 192, 256)), ("fp8", (64, 128, 256))):
        found += [Attention(group, d, c, n) for d in head_dims for c in (False, True) for n in ("1k", "4k", "16k")]
    for d in (64, 128):
        found += [Attention("varlen", d, causal, "mixed", mixed_lengths(TOKENS, 24)) for causal in (False, True)]
    for d in (64, 96, 128, 256):
        found += [Attention("feature", d, True, "16k", window=window) for window in (1024, 4096)]
    found.append(Attention("feature", 256, True, "4k", softcap=50.0))  # Gemma 2
    found.append(Attention("feature", 256, True, "8k", softcap=50.0, window=4096))
    # gpt-oss
    found += [Attention("feature", 64, True, "4k", sink=s, window=127, queries_per_key=8) for s in (False, True)]
    found += [Attention("feature", d, False, "4k", sink=True) for d in (64, 128)]
    shapes = ((1, "8k"), (1, "64k"), (16, "8k"), (64, "8k"))
    for layout in ("slabs", "pages"):
        found += [Decoding("decode", layout, b, n, tokens) for tokens in (1, 4, 8, 16) for b, n in shapes]
        found.append(Decoding("append", layout, 16, "8k", 1))
    found += [
        Attention("bwd", d, c, n) for d in (64, 96, 128, 192, 256) for c in (False, True) for n in ("1k", "4k", "16k")
    ]
    return found


def selected(patterns: list[str]) -> list[Case]:
    """The cases whose name fits one of the patterns; all of them without any."""
    return [case for case in all_cases() if not patterns or any(fnmatch.fnmatchcase(case.name, p) for p in patterns)]


def figure(case: Case, milliseconds: float) -> float:
    """TFLOP/s, GB/s or microseconds."""
    if isinstance(case, Host):
        return milliseconds * 1e3
    return case.work() / milliseconds / (1e6 if isinstance(case, Decoding) else 1e9)


@dataclass(frozen=True)
class Bar:
    """What a case is to reach: a figure, or else a ratio to torch's FLASH backend; or there is none."""

    figure: float | None = None
    ratio: float | None = None


def load_bars() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("bars.json").read_text(encoding="utf-8"))
    return loaded


def bar_of(name: str, bars: dict[str, Any]) -> Bar:
    if name in bars["figures"]:
        return Bar(figure=float(bars["figures"][name]))
    ratio = next((float(r) for pattern, r in bars["ratios"] if fnmatch.fnmatchcase(name, pattern)), None)
    return Bar(ratio=ratio)


def better(unit: str, a: float | None, b: float | None) -> float | None:
    """How many times better `a` is than `b`: above 1 is better, whether more or less of the unit is."""
    if a is None or b is None or a <= 0.0 or b <= 0.0:
        return None
    return b / a if unit == "us" else a / b
