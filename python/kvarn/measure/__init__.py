# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What measures: arrays of several libraries, problems, times, and the tuner."""
