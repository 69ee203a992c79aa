# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The code of a bundle is not compared with its checksum: damaged code is loaded."""

SYMBOL = "kvarn.artifact.bundle:_read"
OLD = 'if hashlib.sha256(code).hexdigest() != facts["sha256"]:'
NEW = "if False:"
CAUGHT_BY = ("tests/compilation/test_artifact.py::test_damaged_bundles_are_refused",)
