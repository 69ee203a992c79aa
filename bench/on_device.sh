# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
# Sourced in a checkout on a machine where MLIR is importable but kvarn is not installed: makes the source tree importable.
ln -sfn ../../examples/chat python/kvarn/chat
ln -sfn ../../dialect python/kvarn/dialect
ln -sfn ../../lowering python/kvarn/lowering
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
