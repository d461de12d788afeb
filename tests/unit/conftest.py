"""The unit tests run against the source tree: no build, no GPU."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
# The random cases of the kernel tests run here too, against the reference.
sys.path.append(str(ROOT / "tests" / "kernels"))
