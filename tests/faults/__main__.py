"""`python tests/faults` runs the fault tests; `--help` lists the options."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from faults.run import main

    sys.exit(main())
