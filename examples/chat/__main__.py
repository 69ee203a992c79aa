# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""`python -m kvarn.chat`, or `python -m chat` in examples/."""

import sys

from . import main

sys.exit(main())
