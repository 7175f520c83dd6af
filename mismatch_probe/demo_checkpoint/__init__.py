"""The checkpoint that ships with the package; README.md beside this file is its model card."""

from pathlib import Path
from typing import Final

DEMO_CHECKPOINT: Final = Path(__file__).parent
