# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""--verify-diagnostics passes though an expected error did not come: no test of a verifier fails any more."""

SYMBOL = "kvarn.tools.opt_diagnostics:check_expected"
OLD = "if not missing.matched:"
NEW = "if False:"
CAUGHT_BY = ("tests/kv-opt/verify_diagnostics_errors.test",)
