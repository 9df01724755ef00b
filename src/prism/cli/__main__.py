"""python -m prism.cli: what torchrun starts."""

import sys

from prism.cli import main

sys.exit(main())
