"""Whether torch can be imported, which only ``python -m flash_attn`` does without."""

from __future__ import annotations

__all__ = ["PROBLEM"]


def _problem() -> str | None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        return "torch is not installed" if error.name == "torch" else f"importing torch fails: {error}"
    except (ImportError, OSError) as error:  # OSError: a library of it cannot be loaded
        return f"importing torch fails: {error}"
    return None


PROBLEM = _problem()
