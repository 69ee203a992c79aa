# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""`python -m kvarn.demo`."""

import sys

from . import main

sys.exit(main())
