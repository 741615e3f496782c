"""Before torch is imported: some tests ask for equal bits, and MKL rounds by how a tensor happens to lie in memory."""

import os

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

from processes import forks  # noqa: F401 (a fixture)
